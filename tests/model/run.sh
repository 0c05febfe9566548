#!/bin/bash
# Checks the model of the commit and recovery protocol (commit.pml) with spin.
#
# Usage: tests/model/run.sh [--only NAME]
# One line for each configuration: states, depth, memory, seconds, result. A
# mutant, which leaves one rule of the protocol out, must be found wanting.
# Each run stops at 3 GiB of memory and says so: then it is no proof.
# Exit code: 0 when every configuration came out as it must.
set -uo pipefail

readonly HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
only=
if [[ "${1:-}" == --only ]]; then
  only=${2:?--only needs a name}
elif (($# > 0)); then
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
  exit 2
fi
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
bad=0

# configuration NAME holds|fails DEFINES…
configuration() {
  local name=$1 expected=$2
  shift 2
  [[ -z "$only" || "$only" == "$name" ]] || return 0
  cd "$work" && rm -f pan* ./*.trail
  if ! spin -a "$@" "$HERE/commit.pml" >spin.out 2>&1 ||
    ! gcc -O1 -w -DSAFETY -DCOLLAPSE -DMEMLIM=3072 -o pan pan.c; then
    cat spin.out
    echo "$name: does not compile"
    bad=1
    return
  fi
  ./pan -m300000 -n >pan.out 2>&1
  local states depth memory seconds found=holds
  states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.out)
  depth=$(sed -n 's/.*depth reached \([0-9]*\).*/\1/p' pan.out)
  memory=$(sed -n 's/^ *\([0-9.]*\)\ttotal actual memory usage.*/\1/p' pan.out)
  seconds=$(sed -n 's/^pan: elapsed time \([0-9.]*\) seconds/\1/p' pan.out)
  if ! grep -q 'errors: 0' pan.out; then
    found="fails ($(sed -n 's/^pan:[0-9]*: \(.*\)/\1/p' pan.out | head -1))"
  elif grep -Eq 'max search depth too small|reached -DMEMLIM' pan.out; then
    found="not finished"
  fi
  local verdict=ok
  if [[ "$found" != "$expected"* ]]; then
    verdict=WRONG
    bad=1
  fi
  printf '%-22s %10s states, depth %6s, %8s MiB, %7s s: %s, %s\n' "$name" \
    "${states:-?}" "${depth:-?}" "${memory:-?}" "${seconds:-?}" "$found" "$verdict"
}

configuration break holds -DCRASHES=0 -DBREAKS=1 -DABORTS=0
configuration crash holds -DCRASHES=1 -DBREAKS=0 -DABORTS=0
configuration crash_abort holds -DCRASHES=1 -DBREAKS=0 -DABORTS=1
configuration one_node holds -DONE_NODE -DCRASHES=1 -DBREAKS=1 -DABORTS=0
configuration double holds -DDOUBLES=1 -DCRASHES=0 -DBREAKS=0 -DABORTS=1
configuration loss holds -DLOSSES=1 -DCRASHES=0 -DBREAKS=0 -DABORTS=1
configuration second holds -DSECONDS=1 -DCRASHES=0 -DBREAKS=2 -DABORTS=0
configuration stream holds -DSTREAM -DCRASHES=0 -DBREAKS=0 -DABORTS=1

configuration tell_first fails -DMUTANT_TELL_FIRST -DBREAKS=0
configuration resume_early fails -DMUTANT_RESUME_EARLY -DBREAKS=0
configuration empty_journal fails -DMUTANT_EMPTY_JOURNAL -DSECONDS=1 -DBREAKS=2 -DCRASHES=0
configuration refusal_two_nodes fails -DMUTANT_REFUSAL -DCRASHES=0 -DBREAKS=1
configuration stream_abort fails -DMUTANT_STREAM_ABORT -DSTREAM -DBREAKS=0
exit "$bad"
