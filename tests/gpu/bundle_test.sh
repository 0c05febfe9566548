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
  'NCCL on one GPU: passed' 'registration through a daemon: passed' \
  'publishes through a daemon, store=device: passed' \
  'publishes through a daemon, store=host: passed' \
  'a trainer and workers through a daemon: passed' 'kill tests: passed' \
  'slowdown of a compute loop: passed'; do
  grep -q "$line" <<<"$output" || fail "no line '$line' in: $output"
done
# Every figure that is wanted, beside its floor.
for figure in 'copy inside the GPU' 'pack, with digests of frames' 'store=device: stall' \
  'store=device: pause' 'unpack' 'unpack, by copy engines' 'unpack, by the agent' 'read of GPU memory' 'digest, over a read' \
  'copy to pinned host memory' 'store=host: stall' 'store=host: pause' 'register 300 tensors' \
  'compute loop during a transfer'; do
  grep -Eq "^$figure +[0-9.]+ ms  floor +[0-9.]+ ms  ratio [0-9.]+  goal [0-9.]+$" "$work/results.txt" ||
    fail "no figure '$figure' in the results"
done
for line in 'moved twice: small.safetensors, [0-9]* bytes, to 2 workers' \
  'published by 2 ranks to one worker, store=device: small.safetensors, [0-9]* bytes' \
  'published by 2 ranks to one worker, store=host: small.safetensors, [0-9]* bytes'; do
  grep -q "^$line$" <<<"$output" || fail "no line '$line' in: $output"
done
grep -q '^moved twice: small.safetensors, [0-9]* bytes, to 2 workers$' "$work/results.txt" ||
  fail "how much was moved is not said in: $output"
for line in 'the agent was killed: the next version arrived' \
  'the trainer was killed: the next' 'the worker was killed: the next' \
  'rank 1: joined in'; do
  grep -q "$line" "$work/results.txt" || fail "no line '$line' in the results"
done

# The same without NCCL: it is missing by name, in both lines. (A file that is no library stands
# before those that this machine has.) What takes long has been run above.
echo 'none' >"$root/lib/libnccl.so.2"
for program in gpu_memory_check daemon_check.sh; do
  printf '#!/bin/sh\n' >"$root/$program"
done
mv "$root/gpu_bench" "$root/gpu_bench.real"
# shellcheck disable=SC2016  # for the script
printf '#!/bin/sh\n[ "$1" != --list ] || exec "%s" --list\n' "$root/gpu_bench.real" >"$root/gpu_bench"
chmod +x "$root/gpu_bench" "$root/gpu_memory_check" "$root/daemon_check.sh"
output=$("$root/run.sh" --smoke "$work/none.txt" 2>&1) || fail "without NCCL: $output"
for line in 'NCCL on one GPU: NOT MEASURED (.*libnccl.so.2' \
  'groups over NCCL: NOT MEASURED (.*libnccl.so.2'; do
  grep -q "^$line" <<<"$output" || fail "no line '$line' in: $output"
done
! grep -q 'groups over NCCL: NOT MEASURED (NCCL on one GPU' <<<"$output" ||
  fail "a line quotes another instead of saying why: $output"

# And on a machine whose driver hangs, the question has an end.
grep -q 'timeout .*gpu_bench" --list' "$root/run.sh" || fail "gpu_bench --list has no deadline"
grep -q 'timeout .*gpu_group_check" --check_nccl' "$root/run.sh" ||
  fail "gpu_group_check --check_nccl has no deadline"
exit $failed
