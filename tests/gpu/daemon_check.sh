#!/bin/bash
# A real daemon, a trainer's processes and workers' processes on one GPU, by CUDA IPC.
#
# Usage: daemon_check.sh [--smoke] move | register | publish STORE | kill | load STORE
#   move     two versions of a model of 16 GB of bf16 (a smaller one where there is no room for it)
#            to two engines, and a third as a STREAM out of the trainer's own memory; hashes and
#            digests compared
#   register how long a trainer takes to register 18,867 tensors
#   publish  STORE is device or host: the trainer's stall and the engine's pause when such a model
#            is published, over one copy of as many bytes inside the GPU, or over PCIe
#   kill     the device agent, the trainer and the worker are killed in the middle of an update:
#            after it was seen under way, and before it ended; the next version arrives each time
#   load     STORE as above: by how much a compute loop on the same GPU is slower while updates of
#            such a model run
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
  # First: whoever ends this may not wait for what follows.
  if ((code != 0)); then
    tail -n 8 "$work"/*.log 2>/dev/null
  fi
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null; done
  local end=$((SECONDS + 15))
  ((code != 143)) || end=$((SECONDS + 3))
  for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null && ((SECONDS < end)); do sleep 0.05; done
    kill -9 "$pid" 2>/dev/null
  done
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

# many FILE COUNT: a model of so many tensors of bf16, 256 bytes each.
many() {
  awk -v n="$2" -v body="$1.body" '
    BEGIN {
      for (i = 0; i < n; ++i) {
        header = sprintf("%s\"layers.%d.weight\":{\"dtype\":\"BF16\",\"shape\":[8,16],\"data_offsets\":[%d,%d]}",
          i == 0 ? "" : ",", i, 256 * i, 256 * i + 256)
        length_ += length(header)
        print header >body
      }
      print length_ + 2
    }' >"$1.length"
  local length padded i
  length=$(cat "$1.length")
  padded=$(((length + 7) / 8 * 8))
  {
    for ((i = 0; i < 8; ++i)); do
      printf '%b' "\\x$(printf '%02x' $(((padded >> (8 * i)) & 255)))"
    done
    printf '{'
    tr -d '\n' <"$1.body"
    printf '}%*s' $((padded - length)) ''
    head -c $((256 * $2)) /dev/zero
  } >"$1"
}

# choose LARGEST: a model that fits here, in `model`, its name in `chosen`, and in `instead` why it
# is not the large one that was wanted.
choose() {
  instead=
  gpu=0 host=0
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

# choose_stored STORE: as choose large, where the store may be on the GPU as well.
choose_stored() {
  choose large
  # The trainer's tensors, the engine's, and two versions in the store.
  if [[ -z $smoke && $1 == device && $chosen == llama-3.1-8b ]] &&
    awk -v g="$gpu" 'BEGIN { exit !(g < 72) }'; then
    model=(--model=qwen2.5-0.5b)
    chosen=qwen2.5-0.5b
    budget=4000000000
    instead=", not 16 GB: wanted is a GPU of 72 GB (this has $gpu)"
  fi
}

# start_daemon FLAG…
start_daemon() {
  start daemon weightsyncd --logtostderr --node=check --listen= --unix_socket="$work/s" \
    --state_dir="$work/state" --ready_file="$work/ready" --memory=cuda \
    --store_budget_bytes="$budget" --bucket_bytes="$bucket" --device_timeout=90s \
    --apply_timeout=120s --publish_timeout=120s "$@"
  daemon=$started
  await 60 "$daemon" . "$work/ready" || fail "the daemon did not start"
}

# start_worker NAME VERSIONS HASHES [REPLICA]: of a replica of one worker.
start_worker() {
  start "$1" demo_worker --address="unix:$work/s" "${model[@]}" --memory=cuda --gpu=0 --gpus=1 \
    --replica="${4:-replica-0}" --versions="$2" --hash_parts="$ranks" --hashes="$3" --linger
  worker=$started
  await 300 "$worker" '^ready' "$work/$1.out" || fail "$1 is not ready"
}

# start_ranks NAME FIRST COUNT FLAG…: a trainer that publishes COUNT versions from FIRST on.
start_ranks() {
  local name=$1 first=$2 count=$3 rank
  shift 3
  trainer=()
  for ((rank = 0; rank < ranks; ++rank)); do
    start "$name.$rank" demo_trainer --address="unix:$work/s" "${model[@]}" --memory=cuda --gpu=0 \
      --rank="$rank" --world_size="$ranks" --first_version="$first" --versions="$count" \
      --worker_counts=1 --hashes="$work/$name.$rank.hashes" --times="$work/$name.$rank.times" "$@"
    trainer+=("$started")
  done
}

# await_ranks NAME: until they have published all. One that ends early is said at once: the others
# would wait for it.
await_ranks() {
  local end=$((SECONDS + 300)) rank waiting
  while true; do
    waiting=
    for ((rank = 0; rank < ranks; ++rank)); do
      ! grep -q '^done' "$work/$1.$rank.out" || continue
      kill -0 "${trainer[rank]}" 2>/dev/null || grep -q '^done' "$work/$1.$rank.out" ||
        fail "$1: rank $rank has not published all: $(tail -1 "$work/$1.$rank.log")"
      waiting+=" $rank"
    done
    [[ -n "$waiting" ]] || return 0
    ((SECONDS < end)) || fail "$1: not published in 300 s: ranks$waiting"
    sleep 0.05
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

# bytes_of NAME: of a version that these ranks have published.
bytes_of() {
  local bytes
  bytes=$(grep -h '^result' "$work/$1.0.out" | tail -1 | grep -o ' bytes=[0-9]*')
  echo "${bytes#*=}"
}

# verify [REPLICA]
verify() {
  "$here/weightsyncctl" verify "demo/${1:-replica-0}" --address="unix:$work/s" >"$work/verify" 2>&1 ||
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
  # A second engine, where there is room for it beside the others.
  local replicas=(replica-0 replica-1) replica version
  if [[ -z $smoke && $chosen == llama-3.1-8b ]] &&
    awk -v g="$gpu" -v h="$host" 'BEGIN { exit !(g < 60 || h < 110) }'; then
    replicas=(replica-0)
  fi
  start_daemon
  for replica in "${replicas[@]}"; do
    start_worker "$replica" 3 "$work/$replica.hashes" "$replica"
  done
  start_ranks trainer 1 2
  await_ranks trainer
  for version in 1 2; do
    for replica in "${replicas[@]}"; do same "$version" trainer "$work/$replica.hashes"; done
  done
  # The last one goes straight from the trainer's memory to the engines'.
  for rank in "${trainer[@]}"; do
    timeout --foreground 60 tail --pid="$rank" -f /dev/null || fail "a rank does not end"
  done
  start_ranks streamed 3 1 --update_mode=stream
  await_ranks streamed
  for replica in "${replicas[@]}"; do
    same 3 streamed "$work/$replica.hashes"
    verify "$replica"
  done
  grep -q "straight out of trainers' memory, [1-9]" "$work/daemon.log" ||
    fail "nothing went straight out of the trainer's memory"
  ! grep -q 'is passed bucket' "$work/daemon.log" ||
    fail "a worker could not copy out of the trainer's memory: $(grep -m1 'is passed bucket' "$work/daemon.log")"
  grep -h '^result' "$work/trainer.0.out" "$work/streamed.0.out"
  echo "moved twice: $chosen, $(bytes_of trainer) bytes, to ${#replicas[@]} workers$instead"
  told
}

check_register() {
  local count=18867
  [[ -z $smoke ]] || count=300
  many "$work/many.safetensors" "$count"
  model=(--safetensors="$work/many.safetensors")
  ranks=1 budget=100000000 bucket=$((1 << 20))
  start_daemon
  # The first starts the GPU's agent, which takes seconds, once. Nothing is published.
  local round seconds best=
  for round in 1 2 3 4; do
    start_ranks "register$round" 1 0
    await_ranks "register$round"
    timeout --foreground 60 tail --pid="${trainer[0]}" -f /dev/null || fail "the trainer does not end"
    seconds=$(awk -F'seconds=' '/^registered/ { print $2 }' "$work/register$round.0.out")
    [[ -n "$seconds" ]] || fail "the trainer does not say how long it took"
    ((round == 1)) && continue
    best=$(awk -v a="$seconds" -v b="${best:-1000}" 'BEGIN { print a < b ? a : b }')
  done
  grep -q "^registered tensors=$count " "$work/register1.0.out" || fail "not $count tensors"
  figure "register $count tensors" "$best" 0.05 1.00
}

# figure NAME SECONDS FLOOR GOAL
figure() {
  awk -v name="$1" -v s="$2" -v f="$3" -v goal="$4" 'BEGIN {
    printf "%-34s %10.3f ms  floor %10.3f ms  ratio %.3f  goal %.2f\n", name, s * 1e3, f * 1e3, f / s, goal
  }'
}

# What the programs have said that gives a figure another meaning: another way than the one that is
# to be timed was taken.
told() {
  grep -hE 'cannot be pinned|go by its copy engines|by way of host memory|does not pin' "$work"/*.log |
    sed 's/^.*\] /said: /' | sort | uniq -c
  return 0
}

check_publish() {
  local store=$1
  choose_stored "$store"
  ranks=2
  [[ -n $smoke ]] || ranks=8
  start_daemon --store="$store" --keep_updates=1
  start_worker worker 3 ""
  start_ranks trainer 1 3 --hashes=
  await_ranks trainer
  # The first version maps, pins and opens what the others use.
  local stall pause bytes
  read -r stall pause bytes < <(cat "$work"/trainer.*.out | awk '
    /^result/ {
      for (i = 2; i <= NF; ++i) { split($i, word, "="); of[word[1]] = word[2] }
      v = of["version"]
      if (of["stall"] > stall[v]) stall[v] = of["stall"]
      pause[v] = of["pause"]
      bytes = of["bytes"]
    }
    END {
      s = stall[2] < stall[3] ? stall[2] : stall[3]
      p = pause[2] < pause[3] ? pause[2] : pause[3]
      printf "%s %s %s\n", s, p, bytes
    }')
  [[ -n "$bytes" ]] || fail "the trainer says no result"
  # Nobody else uses the GPU while its copies are timed.
  for rank in "${trainer[@]}"; do timeout --foreground 60 tail --pid="$rank" -f /dev/null; done
  timeout --foreground --kill-after=5 60 "$here/gpu_bench" --floors "$bytes" >"$work/floors" ||
    fail "gpu_bench --floors"
  local out=within in=within goal=0.77
  if [[ $store == host ]]; then out=to_host in=from_host goal=0.91; fi
  figure "store=$store: stall" "$stall" "$(awk -v f="floor_$out" '$1 == f { print $2 }' "$work/floors")" $goal
  figure "store=$store: pause" "$pause" "$(awk -v f="floor_$in" '$1 == f { print $2 }' "$work/floors")" $goal
  echo "published by $ranks ranks to one worker, store=$store: $chosen, $bytes bytes$instead"
  told
}

# look VERSION: its state and when it was created, committed and ended, in microseconds (0: not
# yet), in `state`, `number`, `created`, `committed` and `ended`.
look() {
  local json name value
  json=$("$here/weightsyncctl" versions "demo/$1" --json --address="unix:$work/s" 2>&1) || return 1
  state='' number='' created=0 committed=0 ended=0
  while IFS=$'\t' read -r name value; do
    case "$name" in
      state) state=$value ;;
      version) number=$value ;;
      createTime) created=$(micros "$value") ;;
      commitTime) committed=$(micros "$value") ;;
      endTime) ended=$(micros "$value") ;;
    esac
    # Of the version, and of none of what is inside it.
  done < <(sed -nE 's/^ ?"(state|version|createTime|commitTime|endTime)": *"?([^",]*)"?,?$/\1\t\2/p' <<<"$json")
  [[ -n "$state" ]]
}

micros() { date -d "$1" +%s%6N; }
now() { echo "${EPOCHREALTIME/[.,]/}"; }

# nap SECONDS: without a process of its own, which takes longer.
nap() {
  [[ -n "${nowhere:-}" ]] || { mkfifo "$work/nowhere" && exec {nowhere}<>"$work/nowhere"; }
  read -rt "$1" -u "$nowhere" || :
}

# lines FILE: how many, in `count`.
lines() {
  local all=()
  [[ ! -e "$1" ]] || mapfile -t all <"$1"
  count=${#all[@]}
}

# strike NAME HELD TARGET FIRST PATIENCE STATE…: kills TARGET in the middle of an update of the
# trainer NAME. HELD (the same process, or one without which it does not go on) is stopped at some
# moment of an update: first after FIRST twentieths of the time that one takes. Where the update is
# seen in one of these states within PATIENCE ms, TARGET is killed; otherwise HELD goes on, and it is
# tried with another update. Leaves in `struck` which it was, in `seen` its state, in `at` when.
strike() {
  local name=$1 held=$2 target=$3 part=$4 patience=$5 try before until wanted length
  shift 5
  for ((try = 0; try < 150; ++try)); do
    # A rank writes down what it is about to publish.
    lines "$work/$name.0.hashes"
    before=$count until=$(($(now) + 60000000))
    while ((count == before)); do
      kill -0 "${trainer[0]}" 2>/dev/null || fail "$name has ended: $(tail -1 "$work/$name.0.log")"
      (($(now) < until)) || fail "$name does not publish"
      nap 0.002
      lines "$work/$name.0.hashes"
    done
    # Another moment each time.
    length=$(tail -1 "$work/$name.0.times" 2>/dev/null | awk '{ print $2 - $1 }')
    nap "$(awk -v s="${length:-0.1}" -v part="$(((part + 7 * try) % 20))" \
      'BEGIN { printf "%.4f", 0.001 + s * part / 20 }')"
    kill -STOP "$held" || fail "process $held is not there"
    until=$(($(now) + patience * 1000))
    while true; do
      if look latest; then
        for wanted in "$@"; do
          [[ "$state" == "STATE_$wanted" ]] || continue
          struck=$number seen=$state at=$(now)
          kill -9 "$target"
          kill -CONT "$held" 2>/dev/null
          return 0
        done
      fi
      (($(now) < until)) || break
    done
    kill -CONT "$held"
  done
  fail "$name: no update was in $*, 150 times"
}

# in_the_middle SINCE: the update that was struck had begun (SINCE: created, or committed) and had
# not ended. False: it had.
in_the_middle() {
  local until=$((SECONDS + 180)) since
  while true; do
    if ! look "$struck"; then
      # The oldest are forgotten.
      echo "version $struck had ended long ago when the kill came: once more"
      return 1
    fi
    ((ended == 0)) || break
    ((SECONDS < until)) || fail "version $struck does not end: it is in $state"
    nap 0.1
  done
  since=$created
  [[ $1 == created ]] || since=$committed
  if ((since == 0 || since > at || ended <= at)); then
    echo "version $struck had ended when the kill came: once more"
    return 1
  fi
  moment="in update $struck ($seen, $(((at - since) / 1000)) ms after it was $1, $(((ended - at) / 1000)) ms before its end)"
}

# next_ranks COUNT: a trainer of further versions, its name in `name`.
next_ranks() {
  first=$((${first:--999} + 1000))
  name=trainer$first
  start_ranks "$name" "$first" "$1"
}

# after_kill WHO HASHES: the next two versions arrive.
after_kill() {
  kill -9 "${trainer[0]}" 2>/dev/null
  next_ranks 2
  await_ranks "$name"
  same $((first + 1)) "$name" "$2"
  echo "the $1 was killed $moment: the next version arrived"
}

check_kill() {
  choose small
  ranks=1
  start_daemon
  start_worker worker 100000 "$work/worker.hashes"
  local who hashes=$work/worker.hashes round agent
  for who in agent trainer worker; do
    for ((round = 1; ; ++round)); do
      ((round <= 5)) || fail "the $who was not killed in the middle of an update, five times"
      next_ranks 500
      # The first maps and pins.
      await 120 "${trainer[0]}" '^result' "$work/$name.0.out" || fail "no version before the kill"
      agent=$(agent_of "$daemon")
      [[ -n "$agent" ]] || fail "the daemon has no device agent"
      case "$who" in
        agent) strike "$name" "$agent" "$agent" 1 5000 GATHERING PREPARING MOVING ;;
        trainer) strike "$name" "$agent" "${trainer[0]}" 1 5000 GATHERING PREPARING MOVING ;;
        worker)
          strike "$name" "$worker" "$worker" 17 0 COMMITTED APPLYING
          # An update that nobody is there for any more is over when its worker is here again.
          hashes=$work/worker$round.hashes
          start_worker "worker$round" 100000 "$hashes"
          ;;
      esac
      if [[ $who == worker ]]; then
        ! in_the_middle committed || break
      else
        ! in_the_middle created || break
      fi
      kill -9 "${trainer[0]}" 2>/dev/null
    done
    after_kill "$who" "$hashes"
  done
  verify
}

check_load() {
  local store=$1
  choose_stored "$store"
  ranks=2
  [[ -n $smoke ]] || ranks=8
  start_daemon --store="$store" --keep_updates=1
  start_worker worker 100000 ""
  start load gpu_load --out "$work/load.times" $smoke
  local load=$started
  await 60 "$load" '^ready' "$work/load.out" || fail "gpu_load: $(tail -1 "$work/load.log")"
  sleep 2
  start_ranks trainer 1 4 --hashes=
  await_ranks trainer
  kill -TERM "$load"
  timeout 15 tail --pid="$load" -f /dev/null
  # When bytes moved: while a rank stalled, and while the engine paused for what it was then given.
  # The first update maps, pins and opens what the others use.
  local rank
  for ((rank = 0; rank < ranks; ++rank)); do
    paste -d' ' "$work/trainer.$rank.times" <(grep '^result' "$work/trainer.$rank.out")
  done | awk '{
    for (i = 3; i <= NF; ++i) { split($i, word, "="); of[word[1]] = word[2] }
    print "update", $1, $2
    if (of["version"] == 1) next
    printf "moving %.6f %.6f\n", $1, $1 + of["stall"]
    printf "moving %.6f %.6f\n", $2 - of["pause"], $2
  }' >"$work/windows"
  # Pieces of work that lie within such a time, all of each; and those that touch no update.
  awk -v name="store=$store: compute loop" '
    NR == FNR { kind[++n] = $1; began[n] = $2; ended[n] = $3; next }
    {
      inside = touches = 0
      for (i = 1; i <= n; ++i) {
        if (kind[i] == "moving" && $1 >= began[i] && $2 <= ended[i]) inside = 1
        if ($2 > began[i] && $1 < ended[i]) touches = 1
      }
      if (inside) { during += $2 - $1; ++durings }
      if (!touches) { alone += $2 - $1; ++alones }
    }
    END {
      if (durings < 3 || alones < 3) { print "too few pieces of work: " durings + 0 " and " alones + 0; exit 1 }
      a = alone / alones; d = during / durings
      printf "%-34s %10.3f ms  floor %10.3f ms  ratio %.3f  goal 0.95\n", name, d * 1e3, a * 1e3, a / d
      printf "pieces of work: %d while bytes moved, %d beside all updates\n", durings, alones
    }' "$work/windows" "$work/load.times" || fail "no figure of the compute loop"
  echo "computed beside updates, store=$store: $chosen, $(bytes_of trainer) bytes$instead"
}

case "$what" in
  move | register | kill) "check_$what" ;;
  publish | load)
    [[ "${2:-}" == device || "${2:-}" == host ]] || fail "$what device, or $what host"
    "check_$what" "$2"
    ;;
  *)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
