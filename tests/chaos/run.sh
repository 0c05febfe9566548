#!/bin/bash
# Breaks clusters of real daemons, trainers and engines, and checks that no replica ever serves a
# mix, an update that nobody committed, or an older one than before, and that every cluster comes
# back. Reports each trial, a table of faults x states of the update, and totals as JSON.
#
# Usage: tests/chaos/run.sh [--trials N] [--seed S] [--nodes K] [--minutes M] [--kinds TEXT]
#                           [--operators TEXT] [--gpu [GROUP] [--store STORE]] [--cluster C] [--keep DIR]
#                           [--json FILE] [--programs DIR]
#   --trials N    how many faults (default 30); a cluster lives for ten of them
#   --seed S      what is random follows from it (default 1): a finding names its seed
#   --nodes K     daemons (default 4)
#   --minutes M   begin no trial after so long
#   --kinds TEXT  only kinds of fault whose name contains TEXT
#   --operators TEXT  only what operators do (held, rolled back, drained) whose name contains TEXT
#   --gpu [GROUP]  all tensors on simulated GPUs (tests/gpu/sim), and faults of these and of device
#                 agents next to those of processes; with nccl in the place of GROUP bytes between
#                 nodes go over the simulated NCCL, which then fails too; with `--store device`
#                 the daemons' stores are in memory of these GPUs, and end with their agents
#   --cluster C   of a run that is replayed, only cluster C
#   --keep DIR    where logs of clusters with a finding go
#   --json FILE   the trials; --sum FILE... adds runs up, and runs nothing
#   --programs DIR  what was built before; otherwise it is built now
#
# As root it makes network namespaces, control groups and small file systems of its own; without
# root only processes and frames are at fault, and it says so. Exit code: 0 when nothing was mixed
# and nothing stuck, and every kind of fault with five trials or more has hit an update in flight.
set -uo pipefail

case "${1:-}" in
  -h | --help)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

programs=()
if [[ " $* " != *" --programs"* && " $* " != *" --sum "* ]]; then
  log=$(mktemp) || exit 1
  gpu=()
  if [[ " $* " == *" --gpu "* ]]; then
    gpu=(//daemon:weightsync_device_agent //tests/gpu/sim:runtime //transport/cuda:libkernel_twins.so)
  fi
  if ! bazel build --noshow_progress --color=no \
    //tests/chaos:{weightsyncd_faulty,engine,trainer} //client/ctl:weightsyncctl "${gpu[@]}" \
    >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    exit 1
  fi
  rm -f "$log"
  programs=(--programs bazel-bin)
fi
exec /usr/bin/python3 -B -m tests.chaos.chaos "${programs[@]}" "$@"
