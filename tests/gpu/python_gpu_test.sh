#!/bin/bash
# Puts the Python package together as it is installed, and runs its test over the simulated GPU.
#
# Usage: python_gpu_test.sh TEST PACKAGE_FILE LIBRARY DAEMON
set -euo pipefail
place=$(mktemp -d /tmp/wspy.XXXXXX)
trap 'rm -rf "$place"' EXIT
mkdir -p "$place/weightsync/_lib"
cp "$(dirname "$2")"/*.py "$place/weightsync/"
cp "$3" "$place/weightsync/_lib/libweightsync.so"
PYTHONPATH=$place PYTHONDONTWRITEBYTECODE=1 /usr/bin/python3 "$1" "$(realpath --no-symlinks "$4")"
