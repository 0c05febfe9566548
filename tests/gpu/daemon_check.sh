#!/bin/bash
# A real daemon, a trainer's processes and workers' processes on one GPU, by CUDA IPC.
#
# Usage: daemon_check.sh [--smoke] move | kill | load
#   move     two versions of a model of 16 GB of bf16 (a smaller one where there is no room for it),
#            hashes and digests compared
#   kill     the device agent, the trainer and the worker are killed in the middle of an update;
#            the next version arrives each time
#   load     by how much a compute loop on the same GPU is slower while updates run
#   --smoke  small sizes
#
# Runs from the folder that `bazel run //tests/gpu:bundle` has packed.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit 1
smoke=
if [[ "${1:-}" == --smoke ]]; then
  smoke=--smoke
  shift
fi
what=${1:-}

work=$(mktemp -d "${TMPDIR:-/tmp}/wsgpu.XXXXXX") || exit 1
pids=()

# shellcheck disable=SC2317
finish() {
  local code=$? pid
  trap - EXIT
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null; done
  for pid in "${pids[@]}"; do
    timeout 15 tail --pid="$pid" -f /dev/null 2>/dev/null || kill -9 "$pid" 2>/dev/null
  done
  if ((code != 0)); then
    tail -n 8 "$work"/*.log 2>/dev/null
  fi
  rm -rf "$work"
  exit "$code"
}
trap finish EXIT
trap 'exit 143' TERM INT

fail() {
  echo "FAILED: $*"
  exit 1
}

# start NAME PROGRAM ARGUMENT…: leaves its process number in `started`.
start() {
  local name=$1 program=$2
  shift 2
  "$here/$program" "$@" </dev/null >"$work/$name.out" 2>"$work/$name.log" &
  started=$!
  pids+=("$started")
}

# await SECONDS PID PATTERN FILE: until a line of the file matches; the process must live.
await() {
  local end=$((SECONDS + $1)) pid=$2 pattern=$3 file=$4
  until grep -q -- "$pattern" "$file" 2>/dev/null; do
    kill -0 "$pid" 2>/dev/null || grep -q -- "$pattern" "$file" || return 1
    ((SECONDS < end)) || return 1
    sleep 0.05
  done
}

# safetensors FILE: a model of 24 tensors of bf16, some MB.
safetensors() {
  local header="{" offset=0 i rows columns bytes
  for ((i = 0; i < 24; ++i)); do
    rows=$((100 + 37 * i % 211)) columns=$((64 + 16 * (i % 5)))
    bytes=$((2 * rows * columns))
    ((i == 0)) || header+=","
    header+="\"layers.$i.weight\":{\"dtype\":\"BF16\",\"shape\":[$rows,$columns]"
    header+=",\"data_offsets\":[$offset,$((offset + bytes))]}"
    offset=$((offset + bytes))
  done
  header+="}"
  while ((${#header} % 8 != 0)); do header+=" "; done
  {
    for ((i = 0; i < 8; ++i)); do
      printf '%b' "\\x$(printf '%02x' $(((${#header} >> (8 * i)) & 255)))"
    done
    printf '%s' "$header"
    head -c "$offset" /dev/urandom
  } >"$1"
}

# choose LARGEST: a model that fits here, in `model`, its name in `chosen`, and in `instead` why it
# is not the large one that was wanted.
choose() {
  instead=
  local gpu host
  if [[ -n $smoke ]]; then
    safetensors "$work/small.safetensors"
    model=(--safetensors="$work/small.safetensors")
    chosen=small.safetensors
    budget=100000000 bucket=$((1 << 20))
    return
  fi
  gpu=$(timeout --kill-after=5 60 "$here/gpu_bench" --list | head -1 | awk '{ print $NF / 1e9 }')
  host=$(awk '$1 == "MemAvailable:" { print $2 / 1e6 }' /proc/meminfo)
  bucket=$((256 << 20))
  # A trainer's tensors and a worker's; the store twice, and two copies to fill and to hash.
  if [[ "$1" == large ]] && awk -v g="$gpu" -v h="$host" 'BEGIN { exit !(g > 40 && h > 90) }'; then
    model=(--model=llama-3.1-8b)
    chosen=llama-3.1-8b
    budget=40000000000
  else
    model=(--model=qwen2.5-0.5b)
    chosen=qwen2.5-0.5b
    # Less than 16 GB must not pass for it.
    [[ "$1" != large ]] ||
      instead=", not 16 GB: wanted are a GPU of 40 GB (this has $gpu) and 90 GB of host memory ($host)"
    budget=4000000000
  fi
}

start_daemon() {
  start daemon weightsyncd --logtostderr --node=check --listen= --unix_socket="$work/s" \
    --state_dir="$work/state" --ready_file="$work/ready" --memory=cuda \
    --store_budget_bytes="$budget" --bucket_bytes="$bucket" --device_timeout=90s \
    --apply_timeout=120s --publish_timeout=120s
  daemon=$started
  await 60 "$daemon" . "$work/ready" || fail "the daemon did not start"
}

# start_worker NAME VERSIONS HASHES: of a replica of one worker.
start_worker() {
  start "$1" demo_worker --address="unix:$work/s" "${model[@]}" --memory=cuda --gpu=0 --gpus=1 \
    --replica=replica-0 --versions="$2" --hash_parts="$ranks" --hashes="$3" --linger
  worker=$started
  await 300 "$worker" '^ready' "$work/$1.out" || fail "$1 is not ready"
}

# start_ranks NAME FIRST COUNT: a trainer that publishes COUNT versions from FIRST on.
start_ranks() {
  local rank
  trainer=()
  for ((rank = 0; rank < ranks; ++rank)); do
    start "$1.$rank" demo_trainer --address="unix:$work/s" "${model[@]}" --memory=cuda --gpu=0 \
      --rank="$rank" --world_size="$ranks" --first_version="$2" --versions="$3" \
      --worker_counts=1 --hashes="$work/$1.$rank.hashes" --times="$work/$1.$rank.times"
    trainer+=("$started")
  done
}

# await_ranks NAME: until they have published all.
await_ranks() {
  local rank
  for ((rank = 0; rank < ranks; ++rank)); do
    await 300 "${trainer[rank]}" '^done' "$work/$1.$rank.out" ||
      fail "$1: rank $rank has not published all: $(tail -1 "$work/$1.$rank.log")"
  done
}

# same VERSION NAME HASHES: what the worker held is what the ranks published.
same() {
  cat "$work/$2".*.hashes | grep "^$1 " | LC_ALL=C sort >"$work/expected"
  [[ -s "$work/expected" ]] || fail "nothing was published as version $1"
  # The worker hashes after it was resumed.
  local end=$((SECONDS + 120))
  until grep "^$1 " "$3" 2>/dev/null | LC_ALL=C sort | cmp -s - "$work/expected"; do
    ((SECONDS < end)) || fail "version $1: the worker's bytes are not the trainer's"
    sleep 0.2
  done
}

verify() {
  "$here/weightsyncctl" verify demo/replica-0 --address="unix:$work/s" >"$work/verify" 2>&1 ||
    fail "verify: $(tail -1 "$work/verify")"
}

# The daemon's children are its device agents.
agent_of() {
  local stat line
  for stat in /proc/[0-9]*/stat; do
    read -r line 2>/dev/null <"$stat" || continue
    if [[ "$line" == *"(weightsync_devi) "[^ZX]" $1 "* ]]; then
      echo "${line%% *}"
    fi
  done
}

check_move() {
  choose large
  ranks=2
  [[ -n $smoke ]] || ranks=8
  start_daemon
  start_worker worker 2 "$work/worker.hashes"
  start_ranks trainer 1 2
  await_ranks trainer
  same 1 trainer "$work/worker.hashes"
  same 2 trainer "$work/worker.hashes"
  verify
  grep -h '^result' "$work/trainer.0.out"
  local bytes
  bytes=$(grep -h '^result' "$work/trainer.0.out" | tail -1 | grep -o ' bytes=[0-9]*')
  echo "moved twice: $chosen, ${bytes#*=} bytes$instead"
}

check_kill() {
  choose small
  ranks=1
  start_daemon
  start_worker worker 100000 "$work/worker.hashes"

  start_ranks first 1 500
  await 120 "${trainer[0]}" '^result' "$work/first.0.out" || fail "no first version"
  kill -9 $(agent_of "$daemon") || fail "the daemon has no device agent"
  sleep 0.5
  kill -9 "${trainer[0]}" 2>/dev/null
  start_ranks second 1001 2
  await_ranks second
  same 1002 second "$work/worker.hashes"
  echo "the agent was killed: the next version arrived"

  start_ranks third 2001 500
  await 120 "${trainer[0]}" '^result' "$work/third.0.out" || fail "no version before the kill"
  kill -9 "${trainer[0]}"
  start_ranks fourth 3001 1
  await_ranks fourth
  same 3001 fourth "$work/worker.hashes"
  echo "the trainer was killed: the next version arrived"

  start_ranks fifth 4001 500
  await 120 "${trainer[0]}" '^result' "$work/fifth.0.out" || fail "no version before the kill"
  kill -9 "$worker"
  start_worker worker_again 100000 "$work/again.hashes"
  kill -9 "${trainer[0]}" 2>/dev/null
  start_ranks sixth 5001 1
  await_ranks sixth
  same 5001 sixth "$work/again.hashes"
  verify
  echo "the worker was killed: the next version arrived"
}

check_load() {
  choose small
  ranks=1
  start_daemon
  start_worker worker 100000 "$work/worker.hashes"
  start load gpu_load --out "$work/load.times" $smoke
  local load=$started
  await 60 "$load" '^ready' "$work/load.out" || fail "gpu_load: $(tail -1 "$work/load.log")"
  sleep 3
  start_ranks trainer 1 8
  await_ranks trainer
  kill -TERM "$load"
  timeout 15 tail --pid="$load" -f /dev/null
  # Pieces that lie in the time of an update, and those that touch none.
  awk '
    NR == FNR { began[++n] = $1; ended[n] = $2; next }
    {
      inside = 0
      for (i = 1; i <= n; ++i) if ($2 > began[i] && $1 < ended[i]) inside = 1
      if (inside) { during += $2 - $1; ++durings } else { alone += $2 - $1; ++alones }
    }
    END {
      if (durings < 3 || alones < 3) { print "too few pieces of work"; exit 1 }
      a = alone / alones; d = during / durings
      printf "compute loop during a transfer     %10.3f ms  floor %10.3f ms  ratio %.3f  goal 0.95\n",
        d * 1e3, a * 1e3, a / d
    }' "$work/trainer.0.times" "$work/load.times" || fail "no figure of the compute loop"
}

case "$what" in
  move | kill | load) "check_$what" ;;
  *)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
