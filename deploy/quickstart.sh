#!/bin/bash
# From a fresh clone to a running cluster in one command: installs what is
# missing, builds, starts three daemons on this machine, and moves a model of real
# size from three trainer ranks to three replicas on two other nodes, version after
# version. Then every worker's live memory, hashed by the worker itself, is compared
# with what the trainer published.
#
# Usage: quickstart.sh [--model NAME] [--safetensors FILE] [--versions N] [--keep]
#   --model NAME        a published model's catalog, filled with random values that
#                       change with every version (default: qwen2.5-0.5b, 988 MB)
#   --safetensors FILE  publish the tensors of this file instead
#   --versions N        how many versions (default: 3)
#   --memory host|cuda  where trainers and workers have their tensors (default: host);
#                       with cuda they go from one to the next of the machine's GPUs
#   --store host|device with --memory cuda: where the daemons keep weights (default: host)
#   --simulate_gpu      with --memory cuda: on simulated GPUs (tests/gpu/sim), which are
#                       slow, and find any use of memory that is not there
#   --keep              leave the cluster up, and print the commands to look at it
#   --flip_bit          damage one bit in one worker before the last comparison, to
#                       see that it is found
#
# Exit code: 0 when all bytes are equal, 1 otherwise, 2 for a wrong command line.
# Needs about 10 times the model's bytes in memory.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root

model=qwen2.5-0.5b
safetensors=
versions=3
keep=
flip_bit=
memory=host
store=host
simulate_gpu=

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
}

wrong() {
  echo "quickstart.sh: $* (see --help)" >&2
  exit 2
}

while (($# > 0)); do
  option=$1
  value=
  case "$option" in
    --model=* | --safetensors=* | --versions=* | --memory=* | --store=*)
      value=${option#*=}
      option=${option%%=*}
      ;;
    --model | --safetensors | --versions | --memory | --store)
      (($# > 1)) || wrong "$option needs a value"
      value=$2
      shift
      ;;
  esac
  case "$option" in
    --model) model=$value ;;
    --safetensors) safetensors=$value ;;
    --versions) versions=$value ;;
    --memory) memory=$value ;;
    --store) store=$value ;;
    --simulate_gpu) simulate_gpu=1 ;;
    --keep) keep=1 ;;
    --flip_bit) flip_bit=1 ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) wrong "unknown argument: $option" ;;
  esac
  shift
done
[[ $versions =~ ^[1-9][0-9]{0,5}$ ]] || wrong "--versions $versions is no count"
[[ $memory == host || $memory == cuda ]] || wrong "--memory is host or cuda, not $memory"
[[ $store == host || $store == device ]] || wrong "--store is host or device, not $store"
[[ $store == host || $memory == cuda ]] || wrong "--store device needs --memory cuda"
[[ -z $simulate_gpu || $memory == cuda ]] || wrong "--simulate_gpu needs --memory cuda"
if [[ -n $safetensors ]]; then
  [[ -r $safetensors ]] || wrong "cannot read $safetensors"
  safetensors=$(realpath -- "$safetensors")
fi

# ---- Build ----

"$root/deploy/install_deps.sh"
cd "$root"
bazel_output=(--noshow_progress --color=no)
[[ ! -t 1 ]] || bazel_output=()
targets=(//daemon:weightsyncd //client/ctl:weightsyncctl //tests/e2e:demo_trainer
  //tests/e2e:demo_worker)
[[ $memory == host ]] || targets+=(//daemon:weightsync_device_agent)
[[ -z $simulate_gpu ]] || targets+=(//tests/gpu/sim:runtime //transport/cuda:libkernel_twins.so)
bazel build "${bazel_output[@]}" "${targets[@]}"
readonly daemon=$root/bazel-bin/daemon/weightsyncd
readonly ctl=$root/bazel-bin/client/ctl/weightsyncctl
readonly trainer=$root/bazel-bin/tests/e2e/demo_trainer
readonly worker=$root/bazel-bin/tests/e2e/demo_worker

# ---- GPUs ----

gpus=1
if [[ -n $simulate_gpu ]]; then
  gpus=7
elif [[ $memory == cuda ]]; then
  gpus=$(nvidia-smi -L | grep -c '^GPU ') || wrong "nvidia-smi finds no GPU; try --simulate_gpu"
fi
# The GPU that the next one takes.
next_gpu=0

# ---- Processes ----

work=$(mktemp -d "${TMPDIR:-/tmp}/weightsync.XXXXXX")
readonly work
readonly name=demo
# name -> pid, and the order in which they were started.
declare -A pids=()
order=()
watcher=
leave=
if [[ -n $simulate_gpu ]]; then
  export GPU_SIM_DIR=$work/gpu GPU_SIM_DEVICES=$gpus GPU_SIM_MEMORY_MB=8192
  export GPU_SIM_DELAY_US=0 GPU_SIM_KERNELS=$root/bazel-bin/transport/cuda/libkernel_twins.so
  mkdir "$GPU_SIM_DIR"
  LD_LIBRARY_PATH=$root/bazel-bin/tests/gpu/sim${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export LD_LIBRARY_PATH
fi

start() {
  local process=$1
  shift
  # A session of its own: Ctrl-C reaches this script alone, which ends the rest.
  setsid "$@" </dev/null >"$work/$process.out" 2>"$work/$process.log" &
  pids[$process]=$!
  order+=("$process")
}

running() {
  kill -0 "${pids[$1]}" 2>/dev/null
}

# Ends everything, the last started first, and leaves nothing behind.
# shellcheck disable=SC2317
finish() {
  local code=$? process i
  trap - EXIT INT TERM
  [[ -z $watcher ]] || kill "$watcher" 2>/dev/null || true
  if [[ -n $leave ]]; then
    exit "$code"
  fi
  for ((i = ${#order[@]} - 1; i >= 0; --i)); do
    kill -TERM "${pids[${order[i]}]}" 2>/dev/null || true
  done
  for process in "${order[@]}"; do
    for ((i = 0; i < 100; ++i)); do
      running "$process" || break
      sleep 0.1
    done
    kill -KILL "${pids[$process]}" 2>/dev/null || true
    wait "${pids[$process]}" 2>/dev/null || true
  done
  rm -rf "$work"
  exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# With what the processes said.
fail() {
  local process
  if [[ -n $watcher ]]; then
    kill "$watcher" 2>/dev/null || true
    watcher=
    echo
  fi
  echo "quickstart.sh: $*" >&2
  for process in "${order[@]}"; do
    if [[ -s $work/$process.log ]]; then
      echo "--- $process:" >&2
      tail -n 5 "$work/$process.log" >&2
    fi
  done
  exit 1
}

# Waits until all of the given processes have printed a line.
await() {
  local line=$1 deadline=$((SECONDS + 900)) process left
  shift
  while true; do
    left=
    for process in "$@"; do
      grep -qx "$line" "$work/$process.out" && continue
      running "$process" || fail "$process ended too early"
      left=1
    done
    [[ -n $left ]] || return 0
    ((SECONDS < deadline)) || fail "time is up"
    sleep 0.2
  done
}

address_of() {
  jq -r '"unix:" + .unix_socket' "$work/$1.ready"
}

coordinator=()
start_daemon() {
  local node=$1 i
  start "$node" "$daemon" --node="$node" --listen=127.0.0.1:0 \
    --unix_socket="$work/$node.sock" --state_dir="$work/$node.state" \
    --ready_file="$work/$node.ready" --memory="$memory" --store="$store" "${coordinator[@]}"
  for ((i = 0; i < 300; ++i)); do
    [[ ! -e $work/$node.ready ]] || return 0
    running "$node" || fail "the daemon of $node did not start"
    sleep 0.1
  done
  fail "the daemon of $node did not start in 30 s"
}

# ---- The cluster ----

what=(--name="$name" --model="$model")
shown=$model
if [[ -n $safetensors ]]; then
  what=(--name="$name" --safetensors="$safetensors")
  shown=$safetensors
fi
linger=()
[[ -z $keep ]] || linger=(--linger)
damage=()
[[ -z $flip_bit ]] || damage=(--flip_bit)

echo
echo "Starting three daemons: node-a (coordinates), node-b, node-c."
start_daemon node-a
coordinator=(--coordinator_address="$(jq -r '.listen[0]' "$work/node-a.ready")")
start_daemon node-b
start_daemon node-c

echo "Model $shown: three trainer ranks on node-a; replica-0 and replica-1 (two" \
  "workers) on node-b, replica-2 on node-c."
start_replica() {
  local replica=$1 node=$2 workers=$3
  shift 3
  set -- "$@" --memory="$memory" --gpu=$((next_gpu % gpus)) --gpus="$gpus"
  next_gpu=$((next_gpu + workers))
  start "$replica" "$worker" --address="$(address_of "$node")" "${what[@]}" \
    --replica="$replica" --workers="$workers" --versions="$versions" \
    --hash_parts=3 --hashes="$work/$replica.hashes" "${linger[@]}" "$@"
}
start_replica replica-0 node-b 1
start_replica replica-1 node-b 2 "${damage[@]}"
start_replica replica-2 node-c 1
# Their nodes reserve memory now, which no update shall wait for.
await ready replica-0 replica-1 replica-2
for rank in 0 1 2; do
  start "rank-$rank" "$trainer" --address="$(address_of node-a)" "${what[@]}" \
    --rank=$rank --world_size=3 --wait_replicas=3 --versions="$versions" \
    --worker_counts=1,2 --hashes="$work/rank-$rank.hashes" --memory="$memory" \
    --gpu=$((next_gpu++ % gpus)) "${linger[@]}"
done

# Progress, from a node that does not coordinate.
address=$(address_of node-b)
readonly address
for ((i = 0; i < 600; ++i)); do
  "$ctl" models "$name" --address "$address" >/dev/null 2>&1 && break
  for process in "${order[@]}"; do
    running "$process" || fail "$process ended too early"
  done
  sleep 0.1
done
"$ctl" watch "$name" --address "$address" &
watcher=$!

await "done" rank-0 rank-1 rank-2 replica-0 replica-1 replica-2
sleep 0.3
kill "$watcher" 2>/dev/null || true
wait "$watcher" 2>/dev/null || true
watcher=

# ---- Proof ----

differ=
compare() {
  local replica=$1 workers=$2 first
  cat "$work"/rank-*.hashes | grep " [0-9]*/$workers " | LC_ALL=C sort \
    >"$work/$replica.expected"
  LC_ALL=C sort "$work/$replica.hashes" >"$work/$replica.found"
  if [[ ! -s $work/$replica.expected ]]; then
    echo "DIFFERENT: nothing was published for $replica" >&2
    differ=1
  elif ! cmp -s "$work/$replica.expected" "$work/$replica.found"; then
    first=$(LC_ALL=C comm -3 "$work/$replica.expected" "$work/$replica.found" |
      head -n 1 | tr -d '\t' || true)
    read -r v w p part _ <<<"$first"
    echo "DIFFERENT: $replica, worker $w, version $v: $p (part $part)" >&2
    differ=1
  fi
}
compare replica-0 1
compare replica-1 2
compare replica-2 1

# The stall is that of the slowest rank; the rest is the update's own.
echo
cat "$work"/rank-0.out "$work"/rank-1.out "$work"/rank-2.out | awk '
  $1 == "result" {
    for (i = 2; i <= NF; ++i) { split($i, kv, "="); f[kv[1]] = kv[2] }
    v = f["version"]
    if (!(v in bytes)) { order[++n] = v; bytes[v] = f["bytes"]
      transfer[v] = f["transfer"]; pause[v] = f["pause"]; total[v] = f["total"] }
    if (f["stall"] > stall[v]) stall[v] = f["stall"]
  }
  END {
    printf "%7s  %13s  %13s  %9s  %8s  %8s  %6s\n", "version", "bytes",
      "trainer stall", "transfer", "pause", "total", "GiB/s"
    for (i = 1; i <= n; ++i) { v = order[i]
      printf "%7d  %13d  %11.3f s  %7.3f s  %6.3f s  %6.3f s  %6s\n", v, bytes[v],
        stall[v], transfer[v], pause[v], total[v],
        (transfer[v] > 0 ? sprintf("%.2f", bytes[v] / transfer[v] / 2^30) : "-")
    }
  }'
echo
if [[ -n $differ ]]; then
  echo "DIFFERENT: not all bytes are equal" >&2
  exit 1
fi
if [[ -n $simulate_gpu && -s $GPU_SIM_DIR/findings ]]; then
  cat "$GPU_SIM_DIR/findings" >&2
  fail "GPU memory was misused"
fi
plural=s
((versions > 1)) || plural=
echo "OK: $versions version$plural, 3 replicas, 4 workers, all bytes equal${simulate_gpu:+, on simulated GPUs}"

if [[ -n $keep ]]; then
  printf '%s\n' "${pids[@]}" >"$work/pids"
  cat <<TEXT

The cluster is up. Look at it:
  export WEIGHTSYNC_ADDRESS=$address
  $ctl status
  $ctl versions $name/latest
  $ctl replicas $name/replica-1
  $ctl watch $name
  grpc_cli ls $(jq -r '.listen[0]' "$work/node-a.ready") weightsync.v1.AdminService
Its logs are in $work. End it:
  kill \$(cat $work/pids) && rm -rf $work
TEXT
  leave=1
fi
