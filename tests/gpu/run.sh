#!/bin/bash
# Checks and figures on real GPUs. Needs nothing but a driver (and NCCL for the groups): it runs
# from the folder that `bazel run //tests/gpu:bundle` has packed.
#
# Usage: run.sh [--smoke] [RESULTS]
#   --smoke   small sizes: that everything runs, not how fast
#   RESULTS   a file for the results (default: results.txt beside this script): what is said here,
#             the figures, and everything that the programs have said
#
# Ends in 8 minutes. What could not be run says NOT MEASURED and why. Exit code 0 when nothing
# failed.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit 1
smoke=
results=$here/results.txt
while (($# > 0)); do
  case "$1" in
    --smoke) smoke=--smoke ;;
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    -*)
      echo "run.sh: unknown argument: $1 (see --help)" >&2
      exit 2
      ;;
    *) results=$1 ;;
  esac
  shift
done

failed=0
end=$((SECONDS + 480))
: >"$results"

say() {
  echo "$*" | tee -a "$results"
}

# step NAME COMMAND…: runs it in what is left of the time.
step() {
  local name=$1 left=$((end - SECONDS)) output code
  shift
  if ((left <= 5)); then
    say "$name: NOT MEASURED (no time left)"
    return 1
  fi
  output=$(timeout --kill-after=5 "$left" "$@" 2>&1)
  code=$?
  echo "$output" >>"$results"
  if ((code == 0)); then
    say "$name: passed"
    return 0
  fi
  echo "$output" | tail -20
  say "$name: FAILED (exit code $code)"
  failed=1
  return 1
}

# Versions as "2.36": is the first at least the second?
at_least() {
  [[ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | tail -1)" == "$1" ]]
}

say "date $(date -u +%Y-%m-%d)"
needed=$(cat "$here/GLIBC")
have=$(getconf GNU_LIBC_VERSION | awk '{ print $2 }')
if ! at_least "$have" "$needed"; then
  say "glibc here is $have, and these programs need $needed: NOT MEASURED"
  exit 1
fi

# A driver that is ill answers nobody.
devices=$(timeout --kill-after=5 60 "$here/gpu_bench" --list 2>&1)
code=$?
if ((code != 0)); then
  ((code != 124 && code != 137)) || devices="gpu_bench --list did not end within 60 s"
  say "no usable GPU: NOT MEASURED ($devices)"
  exit 1
fi
say "$devices"
count=$(wc -l <<<"$devices")

step "memory conformance" "$here/gpu_memory_check"
step "figures" "$here/gpu_bench" $smoke
# The library has 218 MB, perhaps on a disk that is far away.
nccl=$(timeout --kill-after=5 60 "$here/gpu_group_check" --check_nccl 2>&1)
code=$?
echo "$nccl" >>"$results"
if ((code != 0)); then
  why=$(tail -1 <<<"$nccl")
  ((code != 124 && code != 137)) || why="gpu_group_check --check_nccl did not end within 60 s"
  say "NCCL on one GPU: NOT MEASURED ($why)"
  say "groups over NCCL: NOT MEASURED ($why)"
else
  step "NCCL on one GPU" "$here/gpu_nccl_check"
  if ((count < 2)); then
    say "groups over NCCL: NOT MEASURED (one GPU, and NCCL wants one for each rank)"
  elif ((count < 8)); then
    step "groups over NCCL, one receiver" "$here/gpu_group_check" \
      --gtest_filter='*ToOneReceiver*:*ASourceAlone*:*NothingToMove*'
  else
    step "groups over NCCL" "$here/gpu_group_check"
  fi
fi
step "registration through a daemon" "$here/daemon_check.sh" $smoke register
for store in device host; do
  step "publishes through a daemon, store=$store" "$here/daemon_check.sh" $smoke publish "$store"
done
step "a trainer and workers through a daemon" "$here/daemon_check.sh" $smoke move
# How much it was: a smaller model than the 16 GB that are wanted is another figure.
grep -E '^(moved twice: |published by )' "$results"
step "kill tests" "$here/daemon_check.sh" $smoke kill
step "slowdown of a compute loop" "$here/daemon_check.sh" $smoke load
exit $failed
