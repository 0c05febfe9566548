#!/bin/bash
# Measures weightsync on this machine, each number beside what the machine itself does in the
# same minutes.
#
# Usage: tests/bench/run.sh [NAME ...] [--json] [--smoke] [--runs N] [--verbose]
#   NAME      same_node_stage  publish to applied on one node, 1 GiB: GB/s over memcpy
#             same_node_stream the same with STREAM and IN_PLACE: the worker copies straight from
#                              the trainer's memory, 2 threads
#             pause            how long a replica stands still for a STAGE update on one node, 1 GiB:
#                              seconds over memcpy
#             stall            how long a snapshot keeps the trainer from its work, 1 GiB: seconds
#                              over memcpy
#             same_node_stage_tensors  the same with tensors of 8 MiB: over memcpy, a call a tensor
#             one_hop          first byte to VERIFIED between two network namespaces, 1 GiB:
#                              GB/s over plain sockets
#             fanout_1 _2 _4   256 MiB to so many nodes over links of 1 Gbit/s: seconds over
#                              those of plain sockets to one node
#             predict_one_hop predict_fanout_1 _2 _4   seconds of the same transfers beside
#                              those predicted: by the cost model for links as fast as plain
#                              sockets were just before; and (…_learned) by the daemon, from
#                              the updates before
#             peer_gloo_1      the work of one_hop, and (peer_gloo_4) that of fanout_4, done by
#             peer_gloo_4      torch.distributed's gloo broadcast in the same minutes: our seconds,
#                              gloo's, and gloo's over ours. Needs the .venv of tests/run.sh.
#             daemon_memory    resident bytes of the daemon of same_node_stage beyond its arenas
#             plan_deepseek plan_growth replan   time to plan; nothing moves
#             Without names: all.
#   --json    one JSON object a line: {"bench","value","unit","floor","floor_unit","ratio","runs"}
#   --smoke   tiny sizes, once: shows that it works, not how fast
#   --runs N  updates that are counted (default 5; 9 for one_hop)
#   --verbose every update to stderr
#
# peer_gloo_1 shall be at least 1.0 and peer_gloo_4 at least 3.3: BELOW GOAL on stderr says when one is not. No test
# depends on that.
#
# Values are medians; `ratio` is the median of the ratios of neighbouring measurements. Those that
# need network namespaces need root. Exit code: 0 when all were measured.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
. tests/bench/netns.sh
readonly ALL=(same_node_stage same_node_stage_tensors same_node_stream pause stall
  daemon_memory one_hop fanout_1 fanout_2 fanout_4
  predict_one_hop predict_fanout_1 predict_fanout_2 predict_fanout_4
  peer_gloo_1 peer_gloo_4
  plan_deepseek plan_growth replan)
readonly SMOKE=(same_node_stage same_node_stream pause stall daemon_memory one_hop fanout_2
  predict_fanout_2 peer_gloo_1 peer_gloo_4 plan_growth)
readonly PORT=7670
readonly SINK_PORT=7000

json=
smoke=
verbose=
runs=
names=()
while (($# > 0)); do
  case "$1" in
    --json) json=1 ;;
    --smoke) smoke=1 ;;
    --verbose) verbose=--verbose ;;
    --runs)
      runs=${2:?--runs needs a number}
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
    *)
      if [[ " ${ALL[*]} " != *" $1 "* ]]; then
        echo "run.sh: no benchmark is called $1; there are: ${ALL[*]}" >&2
        exit 2
      fi
      names+=("$1")
      ;;
  esac
  shift
done
if ((${#names[@]} == 0)); then
  if [[ -n "$smoke" ]]; then names=("${SMOKE[@]}"); else names=("${ALL[@]}"); fi
fi

readonly DAEMON=bazel-bin/daemon/weightsyncd
readonly BENCH=bazel-bin/tests/bench/product_bench
readonly PLAN_BENCH=bazel-bin/tests/bench/plan_bench
readonly VENV_PYTHON=.venv/bin/python
readonly GLOO_PORT=7100

work=$(mktemp -d "${TMPDIR:-/tmp}/weightsync-bench.XXXXXX") || exit 1
results=$work/results
: >"$results"
networked=   # set while there are network namespaces
daemons=()  # process ids
workers=()  # process ids

# Ends what this script started, by process id, and removes its namespaces.
tear_down() {
  local pid
  exec 9>&- # the workers' standard input: they end
  for pid in "${workers[@]}"; do wait "$pid" 2>/dev/null; done
  for pid in "${daemons[@]}"; do kill -TERM "$pid" 2>/dev/null; done
  for pid in "${daemons[@]}"; do wait "$pid" 2>/dev/null; done
  if [[ -n "$networked" ]]; then netns_destroy; fi
  workers=()
  daemons=()
  networked=
}
set_traps() {
  trap 'tear_down; rm -rf "$work"' EXIT
  trap 'exit 130' INT TERM
}
set_traps

# Waits until a file exists: `wait_for FILE SECONDS PID`. Fails when the process ends before.
wait_for() {
  local deadline=$((SECONDS + $2))
  while [[ ! -s $1 ]]; do
    if ((SECONDS >= deadline)) || ! kill -0 "$3" 2>/dev/null; then
      return 1
    fi
    sleep 0.05
  done
}

# Where node $1 lives: a prefix for commands, which become the process that was started.
inside() {
  if [[ -n "$networked" ]]; then
    echo ip netns exec "$(netns_name "$1")"
  fi
}

address() {
  if [[ -n "$networked" ]]; then netns_address "$1"; else echo 127.0.0.1; fi
}

# So many hosts, each behind a link of the given rate or as fast as the machine is.
make_network() {
  networked=1
  netns_create "$@"
  local status=$?
  # It has set its own.
  set_traps
  return $status
}

# Starts the daemon of node $1 with a budget of $2 bytes; node 0 coordinates.
start_daemon() {
  local i=$1 budget=$2 ready=$work/ready$1
  rm -rf "$ready" "$work/state$i"
  local flags=(--node="n$i" --unix_socket="$work/n$i.sock" --state_dir="$work/state$i"
    --ready_file="$ready" --store_budget_bytes="$budget")
  if [[ -n "$networked" ]]; then
    flags+=(--insecure --listen="$(address "$i"):$PORT" --data_address="$(address "$i")")
  else
    flags+=(--listen=127.0.0.1:0)
  fi
  if ((i > 0)); then
    flags+=(--coordinator_address="$(address 0):$PORT")
  fi
  $(inside "$i") "$DAEMON" "${flags[@]}" >"$work/n$i.log" 2>&1 9>&- &
  daemons+=($!)
  if ! wait_for "$ready" 30 "${daemons[-1]}"; then
    echo "run.sh: the daemon of node $i did not start:" >&2
    tail -n 5 "$work/n$i.log" >&2
    return 1
  fi
}

start_worker() {
  local i=$1
  shift
  $(inside "$i") "$BENCH" --role=worker --address="unix:$work/n$i.sock" --replica="r$i" "$@" \
    <"$work/stdin" >"$work/worker$i" 2>"$work/worker$i.log" 9>&- &
  workers+=($!)
}

worker_ready() {
  local position=$1 i=$2
  if ! wait_for "$work/worker$i" 120 "${workers[$position]}"; then
    echo "run.sh: the worker of node $i did not start:" >&2
    tail -n 5 "$work/worker$i.log" "$work/n$i.log" >&2
    return 1
  fi
}

# Keeps the workers' standard input open until tear_down: descriptor 9, which nobody else may hold.
open_stdin() {
  rm -f "$work/stdin"
  mkfifo "$work/stdin" && exec 9<>"$work/stdin"
}

trainer() {
  if ! $(inside 0) "$BENCH" --role=trainer --address="unix:$work/n0.sock" $verbose "$@" \
    >>"$results" 2>"$work/trainer.log" 9>&-; then
    cat "$work/trainer.log" >&2
    tail -n 5 "$work"/n*.log >&2
    return 1
  fi
  if [[ -n "$verbose" ]]; then cat "$work/trainer.log" >&2; fi
}

# Resident bytes that are not shared memory: what a daemon takes beyond its arenas.
private_bytes() {
  awk '/^RssAnon:|^RssFile:/ {sum += $2} END {print sum * 1024}' "/proc/$1/status"
}

same_node_stage() {
  local bytes=$1 want_stage=$2 want_memory=$3
  open_stdin &&
    start_daemon 0 $((bytes * 7 / 2)) &&
    start_worker 0 --bytes="$bytes" &&
    worker_ready 0 0 || return 1
  local held=$work/stage
  local keep=$results
  results=$held
  trainer --bench=same_node_stage --bytes="$bytes" --runs="${runs:-5}" --value=applied \
    --floor=memcpy
  local status=$?
  results=$keep
  ((status == 0)) || return 1
  if [[ -n "$want_stage" ]]; then cat "$held" >>"$results"; fi
  if [[ -n "$want_memory" ]]; then
    printf '{"bench": "daemon_memory", "value": %d, "unit": "bytes", "floor": null, %s}\n' \
      "$(private_bytes "${daemons[0]}")" '"floor_unit": null, "ratio": null, "runs": 1' >>"$results"
  fi
}

# One value of updates on one node: `one_node NAME BYTES VALUE [FLAG ...]`.
one_node() {
  local name=$1 bytes=$2 value=$3
  shift 3
  open_stdin &&
    start_daemon 0 $((bytes * 7 / 2)) &&
    start_worker 0 --bytes="$bytes" --copy_threads=2 &&
    worker_ready 0 0 &&
    trainer --bench="$name" --bytes="$bytes" --runs="${runs:-5}" --value="$value" \
      --floor=memcpy "$@"
}

same_node_stage_tensors() {
  local bytes=$1 size=--tensor_bytes=$((8 << 20))
  open_stdin &&
    start_daemon 0 $((bytes * 7 / 2)) &&
    start_worker 0 --bytes="$bytes" "$size" &&
    worker_ready 0 0 &&
    trainer --bench=same_node_stage_tensors --bytes="$bytes" "$size" --runs="${runs:-5}" \
      --value=applied --floor=memcpy_tensors
}

over_network() {
  local name=$1 receivers=$2 rate=$3 bytes=$4 value=$5 default_runs=$6 i
  make_network $((receivers + 1)) "$rate" && open_stdin || return 1
  for ((i = 0; i <= receivers; ++i)); do
    start_daemon "$i" $((bytes * 7 / 2)) || return 1
  done
  for ((i = 1; i <= receivers; ++i)); do
    local sink=()
    if ((i == 1)); then sink=(--sink_port=$SINK_PORT); fi
    start_worker "$i" --bytes="$bytes" "${sink[@]}"
  done
  for ((i = 1; i <= receivers; ++i)); do
    worker_ready $((i - 1)) "$i" || return 1
  done
  local held=$work/over keep=$results status
  : >"$held"
  results=$held
  trainer --bench="$name" --bytes="$bytes" --replicas="$receivers" \
    --runs="${runs:-$default_runs}" --value="$value" --floor=sockets \
    --sink="$(address 1):$SINK_PORT" --predict
  status=$?
  results=$keep
  # One run serves both: what is measured, and what was predicted.
  if wants "$name"; then grep -v '"bench": "predict_' "$held" >>"$results"; fi
  if wants "predict_$name"; then grep '"bench": "predict_' "$held" >>"$results"; fi
  return $status
}

# Seconds of gloo's broadcast to $1 receivers of $2 bytes, median of $3.
gloo() {
  local receivers=$1 bytes=$2 count=$3 i pids=() out=$work/gloo
  for ((i = receivers; i >= 0; --i)); do
    $(inside "$i") "$VENV_PYTHON" tests/bench/gloo_peer.py "$i" $((receivers + 1)) "$(address 0)" \
      "$GLOO_PORT" "$bytes" "$count" >"$out$i" 2>"$out$i.log" 9>&- &
    pids+=($!)
  done
  local status=0 pid
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  if ((status != 0)); then
    tail -n 5 "$out"*.log >&2
    return 1
  fi
  cat "${out}0"
}

# One line of ours beside gloo's, measured before and after ours; the faster of the two counts.
peer_gloo() {
  local receivers=$1 rate=$2 bytes=$3 count=${runs:-5} before after ours
  make_network $((receivers + 1)) "$rate" && before=$(gloo "$receivers" "$bytes" "$count") || return 1
  tear_down
  local keep=$results
  results=$work/peer
  : >"$results"
  names+=(peer_ours)
  over_network peer_ours "$receivers" "$rate" "$bytes" seconds "$count"
  local status=$?
  results=$keep
  unset 'names[-1]'
  ((status == 0)) || return 1
  # The daemons stay; they have nothing to do.
  after=$(gloo "$receivers" "$bytes" "$count") || return 1
  ours=$(jq -r .value "$work/peer")
  jq -cn --arg bench "peer_gloo_$receivers" --argjson ours "$ours" --argjson a "$before" --argjson b "$after" \
    --argjson runs "$count" '([$a, $b] | min) as $gloo | {bench: $bench, value: $ours, unit: "s",
      floor: ($gloo * 1e4 | round / 1e4), floor_unit: "s gloo broadcast; ratio is gloo / ours",
      ratio: ($gloo / $ours * 1e4 | round / 1e4), runs: $runs}' >>"$results"
}

plan() {
  "$PLAN_BENCH" "$1" >>"$results"
}

sizes=($((1 << 30)) $((256 << 20)))
if [[ -n "$smoke" ]]; then
  sizes=($((64 << 20)) $((16 << 20)))
  runs=${runs:-1}
fi

targets=(//daemon:weightsyncd //tests/bench/...)
if ! bazel build --noshow_progress --color=no "${targets[@]}" >"$work/build" 2>&1; then
  cat "$work/build" >&2
  exit 1
fi

wants() {
  [[ " ${names[*]} " == *" $1 "* ]]
}

failed=0
stage_done=
network_done=
for name in "${names[@]}"; do
  case "$name" in
    same_node_stage | daemon_memory)
      # One run serves both.
      if [[ -n "$stage_done" ]]; then continue; fi
      stage_done=1
      same_node_stage "${sizes[0]}" "$(wants same_node_stage && echo 1)" \
        "$(wants daemon_memory && echo 1)"
      ;;
    same_node_stream) one_node "$name" "${sizes[0]}" applied --stream ;;
    pause | stall) one_node "$name" "${sizes[0]}" "$name" ;;
    same_node_stage_tensors)
      same_node_stage_tensors "${sizes[0]}"
      ;;
    one_hop | fanout_* | predict_*)
      name=${name#predict_}
      if [[ " $network_done " == *" $name "* ]]; then continue; fi
      network_done+=" $name"
      if ((EUID != 0)); then
        echo "run.sh: $name is left out: network namespaces need root" >&2
        failed=1
        continue
      fi
      if [[ $name == one_hop ]]; then
        over_network "$name" 1 "" "${sizes[0]}" transfer 9
      else
        over_network "$name" "${name#fanout_}" 1gbit "${sizes[1]}" seconds 5
      fi
      ;;
    peer_gloo_*)
      if ((EUID != 0)) || ! "$VENV_PYTHON" -c 'import torch' 2>/dev/null; then
        echo "run.sh: $name is left out: it needs root, and torch in .venv (tests/run.sh)" >&2
        failed=1
        continue
      fi
      if [[ $name == peer_gloo_1 ]]; then
        peer_gloo 1 "" "${sizes[0]}"
      else
        peer_gloo "${name#peer_gloo_}" 1gbit "${sizes[1]}"
      fi
      ;;
    plan_* | replan) plan "$name" ;;
  esac
  if (($? != 0)); then
    echo "run.sh: $name was not measured" >&2
    failed=1
  fi
  tear_down
done

if [[ -z "$smoke" ]]; then
  jq -r '{peer_gloo_1: 1.0, peer_gloo_4: 3.3} as $goals | select($goals[.bench] != null and .ratio < $goals[.bench])
      | "run.sh: BELOW GOAL: \(.bench) \(.ratio), not \($goals[.bench])"' "$results" >&2
fi
if [[ -n "$json" ]]; then
  cat "$results"
else
  jq -r '[.bench, .value, .unit, .floor // "-", .ratio // "-", .runs, .floor_unit // "-"]
      | map(tostring) | join("|")' "$results" |
    awk -F '|' -v OFS= '
      function row(a, b, c, d, e, f, g) { printf "%-22s %12s %-18s %10s %7s %4s  %s\n", a, b, c, d, e, f, g }
      BEGIN { row("bench", "value", "unit", "floor", "ratio", "runs", "floor is") }
      { row($1, $2, $3, $4, $5, $6, $7) }'
fi
exit "$failed"
