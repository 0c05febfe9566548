#!/bin/bash
# Who is linked with what. A daemon starts where there is no CUDA, and holds no context; its device
# agent has CUDA from the start, and loads NCCL, which has 218 MB, when a group wants it.
#
# Usage: links_test.sh DAEMON AGENT CLIENT_LIBRARY
set -uo pipefail

failed=0
# links PROGRAM PATTERN: what it needs that matches, on one line.
links() {
  local needed
  needed=$(readelf -d "$1") || exit 1
  grep -q NEEDED <<<"$needed" || {
    echo "FAILED: $1 needs no library at all"
    exit 1
  }
  grep NEEDED <<<"$needed" | grep -Eo "$2[^]]*" | tr '\n' ' '
}
expect() {
  if [[ "$2" != "$3" ]]; then
    echo "FAILED: $1 is linked with '$2', and not with '$3'"
    failed=1
  fi
}

for program in "$1" "$3"; do
  expect "$program" "$(links "$program" 'lib(cuda|cudart|nccl|nvidia)')" ''
done
if [[ ! "$(links "$2" 'libcudart\.so')" =~ ^libcudart\.so\.[0-9]+\ $ ]]; then
  echo "FAILED: $2 is not linked with the shared cudart"
  failed=1
fi
expect "$2" "$(links "$2" 'lib(cuda\.|nccl|nvidia)')" ''
exit $failed
