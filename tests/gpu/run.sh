#!/bin/bash
# Checks and figures on real GPUs. Needs nothing but a driver (and NCCL for the groups): it runs
# from the folder that `bazel run //tests/gpu:bundle` has packed.
#
# Usage: run.sh [--smoke] [--minutes N] [RESULTS]
#   --smoke      small sizes: that everything runs, not how fast
#   --minutes N  how long all of it may take (default 8; also fractions, as 1.5)
#   RESULTS      a file for the results (default: results.txt beside this script): what is said
#                here, the figures, and everything that the programs have said
#
# Every step has a share of the time (SHARES: seconds of 8 minutes). What one leaves over goes to
# those after it, and none takes what is theirs. A step that does not end in its share, all of it
# or more, FAILED: it hangs. One that was given less, because N is small, is NOT MEASURED, and so
# is what could not be run; each says why. Exit code 0 when nothing failed.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit 1
smoke=
minutes=8
results=$here/results.txt
while (($# > 0)); do
  case "$1" in
    --smoke) smoke=--smoke ;;
    --minutes)
      minutes=${2:-}
      shift
      ;;
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
if [[ ! "$minutes" =~ ^[0-9]+(\.[0-9]+)?$ ]]; then
  echo "run.sh: --minutes wants a number, not '$minutes'" >&2
  exit 2
fi

failed=0
# Wall clock, in milliseconds.
now() { echo $((${EPOCHREALTIME/[.,]/} / 1000)); }
end=$(($(now) + $(awk -v m="$minutes" 'BEGIN { printf "%d", m * 60000 }')))
: >"$results"

say() {
  echo "$*" | tee -a "$results"
}

# Of the steps, in the order in which they come: 440 s; what is asked in between needs the others.
readonly SHARES=(
  35 25    # memory conformance, figures
  35 45    # NCCL on one GPU, groups over NCCL
  25 45 45 # through a daemon: registration, publishes with either store
  60 60    # a trainer and workers, kill tests
  30 35    # slowdown of a compute loop with either store
)
steps=0

# step NAME COMMAND…
step() {
  local name=$1 share=${SHARES[steps]} left rest=0 i limit began took output code
  shift
  for ((i = steps; i < ${#SHARES[@]}; ++i)); do rest=$((rest + SHARES[i])); done
  steps=$((steps + 1))
  left=$((end - $(now)))
  # Of what is left, as much as it is of what is still to come.
  limit=$((left > 0 ? left * share / rest : 0))
  if ((limit < 100)); then
    say "$name: NOT MEASURED (no time left)"
    return 1
  fi
  began=$(now)
  # The signal is for all of its processes.
  output=$(timeout --kill-after=5 "$((limit / 1000)).$(printf '%03d' $((limit % 1000)))" "$@" 2>&1)
  code=$?
  took=$(($(now) - began))
  echo "$output" >>"$results"
  if ((code == 0)); then
    say "$name: passed"
    return 0
  fi
  # Programs have these codes as well: of the clock they are when its time was over.
  if ((code == 124 || code == 137)) && ((took >= limit)); then
    if ((limit < share * 1000)); then
      say "$name: NOT MEASURED (cut off after $((limit / 1000)) s: no time left)"
      return 1
    fi
    echo "$output" | tail -20
    say "$name: FAILED (it did not end within $((limit / 1000)) s)"
    failed=1
    return 1
  fi
  echo "$output" | tail -20
  say "$name: FAILED (exit code $code)"
  failed=1
  return 1
}

# skip NAME WHY: a step that cannot be run leaves its share to the others.
skip() {
  steps=$((steps + 1))
  say "$1: NOT MEASURED ($2)"
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
  skip "NCCL on one GPU" "$why"
  skip "groups over NCCL" "$why"
else
  step "NCCL on one GPU" "$here/gpu_nccl_check"
  if ((count < 2)); then
    skip "groups over NCCL" "one GPU, and NCCL wants one for each rank"
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
step "kill tests" "$here/daemon_check.sh" $smoke kill
step "slowdown of a compute loop, store=device" "$here/daemon_check.sh" $smoke load device
step "slowdown of a compute loop, store=host" "$here/daemon_check.sh" $smoke load host
# How much it was: a smaller model than the 16 GB that are wanted is another figure.
grep -E '^(moved twice: |published by |computed beside )' "$results"
exit $failed
