#!/bin/bash
# What run_simulated.sh lets pass, and what not.
#
# Usage: run_simulated_test.sh RUN_SIMULATED PROGRAM STATIC_PROGRAM
set -uo pipefail

run=$1
program=$2
static=$3
failed=0

# expect CODE PATTERN COMMAND…: how it ends, and what it says.
expect() {
  local want=$1 pattern=$2 output code
  shift 2
  output=$("$@" 2>&1)
  code=$?
  if ((code != want)) || ! grep -q -- "$pattern" <<<"$output"; then
    echo "FAILED: $*: exit code $code, not $want, or nothing like '$pattern' in:"
    echo "$output"
    failed=1
  fi
}

expect 0 "PASSED" "$run" -- "$program" --gtest_filter=CudartTest.FreshMemoryIsNotZero
expect 1 "leak: 12345 bytes not freed" "$run" -- "$program" --child=leaker
expect 1 "not linked with the shared libcudart" "$run" -- "$static"
expect 1 "not linked with the shared libcudart" "$run" -- /bin/true
expect 2 "no program" "$run" GPU_SIM_DEVICES=1
# A library of an unknown name is no setting.
expect 2 "neither a setting" "$run" twins -- "$program"
exit $failed
