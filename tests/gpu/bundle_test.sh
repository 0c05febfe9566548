#!/bin/bash
# The bundle, packed, unpacked elsewhere, and run: with the simulated GPU in the place of a real one.
#
# Usage: bundle_test.sh BUNDLE RUN_SIMULATED TWINS LOAD_TWINS SCRIPT_OR_PROGRAM…
set -uo pipefail

bundle=$1
sim=$(realpath "$(dirname "$2")")
twins=$(realpath --no-symlinks "$3"):$(realpath --no-symlinks "$4")
shift 4

work=$(mktemp -d "${TMPDIR:-/tmp}/bundle_test.XXXXXX") || exit 1
GPU_SIM_DIR=$(mktemp -d /tmp/gpusim.XXXXXX) || exit 1
trap 'rm -rf "$work" "$GPU_SIM_DIR"' EXIT
failed=0
fail() {
  echo "FAILED: $*"
  failed=1
}

"$bundle" --output "$work/bundle.tar.gz" "$@" || exit 1
tar -C "$work" -xzf "$work/bundle.tar.gz" || exit 1
root=$work/gpu_bundle
for library in libc.so.6 libnccl.so.2 libcuda.so.1 libpthread.so.0; do
  [[ ! -e "$root/lib/$library" ]] || fail "$library is in the bundle"
done
[[ -e "$root/lib/libstdc++.so.6" ]] || fail "libstdc++ is not in the bundle"

# A machine whose C library is too old.
cp "$root/GLIBC" "$work/GLIBC"
echo 9.99 >"$root/GLIBC"
grep -q 'these programs need 9.99' <<<"$("$root/run.sh" "$work/old.txt")" ||
  fail "an old glibc is not named"
cp "$work/GLIBC" "$root/GLIBC"

# A machine without a driver: the real runtime is in the bundle.
grep -q 'NOT MEASURED.*DRIVER_TOO_OLD' <<<"$("$root/run.sh" "$work/none.txt")" ||
  fail "a machine without a driver is not named"

# One with a GPU.
cp -f "$sim/libcudart.so.13" "$root/lib/libcudart.so.13"
cp -f "$sim/libnccl.so.2" "$root/lib/libnccl.so.2"
export GPU_SIM_DIR GPU_SIM_EXECUTOR=$sim/gpu_sim_executor GPU_SIM_KERNELS=$twins GPU_SIM_RACES=0
export GPU_SIM_DELAY_US=0 GPU_SIM_DEVICES=2
if ! output=$("$root/run.sh" --smoke "$work/results.txt" 2>&1); then
  fail "run.sh: $output"
  cat "$work/results.txt"
fi
for line in 'memory conformance: passed' 'figures: passed' 'groups over NCCL, one receiver: passed' \
  'NCCL on one GPU: passed' 'a trainer and workers through a daemon: passed' 'kill tests: passed' \
  'slowdown of a compute loop: passed'; do
  grep -q "$line" <<<"$output" || fail "no line '$line' in: $output"
done
for line in 'pack, with digests of frames .* ratio' 'the agent was killed: the next version arrived' \
  'the trainer was killed: the next' 'the worker was killed: the next' \
  'compute loop during a transfer .* ratio' 'rank 1: joined in'; do
  grep -q "$line" "$work/results.txt" || fail "no line '$line' in the results"
done
exit $failed
