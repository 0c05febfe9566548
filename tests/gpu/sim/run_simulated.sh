#!/bin/bash
# Runs a program on a simulated machine of its own, and fails when the simulator finds misuse.
#
# Usage: run_simulated.sh [NAME=VALUE | TWIN_LIBRARY]… [--uses USER] -- PROGRAM [ARGUMENT…]
#   NAME=VALUE    a setting of tests/gpu/sim/machine.h
#   TWIN_LIBRARY  host twins of the program's kernels
#   USER          the program that uses CUDA, where PROGRAM only starts it
set -uo pipefail

# Where the simulator lies: beside this script, or among a test's runfiles.
sim=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ -n "${TEST_SRCDIR:-}" && -d "$TEST_SRCDIR/$TEST_WORKSPACE/tests/gpu/sim" ]]; then
  sim=$TEST_SRCDIR/$TEST_WORKSPACE/tests/gpu/sim
fi
kernels=
user=
while (($# > 0)) && [[ "$1" != -- ]]; do
  case "$1" in
    *.so) kernels+=${kernels:+:}$(realpath --no-symlinks "$1") ;;
    --uses)
      user=$2
      shift
      ;;
    *=*) export "$1" ;;
    *)
      echo "run_simulated.sh: neither a setting nor a library: $1" >&2
      exit 2
      ;;
  esac
  shift
done
shift
if (($# == 0)); then
  echo "run_simulated.sh: no program" >&2
  exit 2
fi
user=${user:-$1}

# A program with a static cudart, or with none, would run on no simulator at all.
# (Whole outputs: a grep that has seen enough would end what writes to it.)
if ! grep -q 'NEEDED.*libcudart\.so\.' <<<"$(readelf -d "$user")"; then
  echo "FAILED: $user is not linked with the shared libcudart" >&2
  exit 1
fi

# Short: sockets lie in it.
GPU_SIM_DIR=$(mktemp -d /tmp/gpusim.XXXXXX) || exit 1
trap 'rm -rf "$GPU_SIM_DIR"' EXIT
export GPU_SIM_DIR
export GPU_SIM_KERNELS=$kernels
export LD_LIBRARY_PATH=$sim${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

if ! grep -q "libcudart.* => $sim/" <<<"$(ldd "$user")"; then
  echo "FAILED: the simulated libcudart in $sim is not what $user loads" >&2
  exit 1
fi

"$@"
code=$?
if [[ -s "$GPU_SIM_DIR/findings" ]]; then
  echo "FAILED: the simulated GPU was misused:" >&2
  cat "$GPU_SIM_DIR/findings" >&2
  exit 1
fi
exit $code
