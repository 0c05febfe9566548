#!/bin/bash
# Prints C for every function whose name is on stdin: it aborts with its name. The functions are
# weak, so that what the simulator implements is in their place.
set -euo pipefail
echo 'void gpu_sim_not_simulated(const char* name);'
while read -r name; do
  printf '__attribute__((weak, visibility("default"))) void %s(void) { gpu_sim_not_simulated("%s"); }\n' \
    "$name" "$name"
done
