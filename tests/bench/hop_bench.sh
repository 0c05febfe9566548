#!/bin/bash
# hop_bench.sh BINARY NAME...: runs one_hop, fanout_1, fanout_2 or fanout_4 in
# network namespaces (root) and prints one JSON object a line. Without root
# one_hop runs over loopback, and the others are left out, saying so.
# Environment: RUNS.
set -u
here=$(cd "$(dirname "$0")" && pwd)
. "$here/netns.sh"

binary=$1
shift

# run_chain NAME MEMBERS RATE ARGS...
run_chain() {
  local name=$1 members=$2 rate=$3 hosts= i pids=() status
  shift 3
  local spaces=1
  if netns_available; then
    netns_create "$members" "$rate" || return 1
  elif [ -z "$rate" ]; then
    spaces=0
  else
    echo "$name: needs root for shaped links, left out" >&2
    return 0
  fi
  for ((i = 0; i < members; i++)); do
    if [ $spaces = 1 ]; then
      hosts+=${hosts:+,}$(netns_address "$i")
    else
      hosts+=${hosts:+,}127.0.0.1
    fi
  done
  for ((i = members - 1; i >= 0; i--)); do
    local command=("$binary" "--name=$name" "--index=$i" "--hosts=$hosts" "$@")
    if [ $i = 0 ]; then
      if [ $spaces = 1 ]; then
        netns_exec 0 timeout 300 "${command[@]}"
      else
        timeout 300 "${command[@]}"
      fi
      status=$?
    elif [ $spaces = 1 ]; then
      netns_exec "$i" timeout 300 "${command[@]}" &
      pids+=($!)
    else
      timeout 300 "${command[@]}" &
      pids+=($!)
    fi
  done
  for i in "${pids[@]}"; do wait "$i" || status=1; done
  if [ $spaces = 1 ]; then netns_destroy; fi
  return $status
}

result=0
for name in "$@"; do
  case $name in
    one_hop)
      run_chain one_hop 2 "" --bench=one_hop --runs="${RUNS:-9}" || result=1
      ;;
    fanout_*)
      run_chain "$name" $((${name#fanout_} + 1)) 1gbit --bench=fanout \
        --bytes=$((256 << 20)) --bucket_bytes=$((64 << 20)) \
        --runs="${RUNS:-5}" || result=1
      ;;
    *)
      echo "unknown bench: $name" >&2
      result=1
      ;;
  esac
done
exit $result
