# Hosts on one machine: network namespaces on a bridge, each with a link of its
# own that can be shaped and cut. Needs root. Source this file, then
#
#   netns_create 3 1gbit      # namespaces 0, 1, 2; links unshaped without a rate
#   netns_exec 1 COMMAND...   # run in namespace 1
#   netns_address 1           # its address
#   netns_limit 1 100mbit     # shape its link, both ways; no rate: unshaped
#   netns_cut 1; netns_heal 1 # take its link down and up
#   netns_destroy             # all of it; netns_create also sets a trap for it
#
# What runs in a namespace is ended by netns_destroy.

NETNS_PREFIX=${NETNS_PREFIX:-wsb$$}
NETNS_SUBNET=${NETNS_SUBNET:-10.231.77}
NETNS_COUNT=0

netns_available() {
  [ "$(id -u)" = 0 ] && ip netns add "${NETNS_PREFIX}probe" 2>/dev/null &&
    ip netns del "${NETNS_PREFIX}probe"
}

netns_name() { echo "${NETNS_PREFIX}n$1"; }
netns_address() { echo "${NETNS_SUBNET}.$(($1 + 1))"; }
netns_exec() {
  local node=$1
  shift
  ip netns exec "$(netns_name "$node")" "$@"
}

netns_create() {
  local count=$1 rate=${2:-} switch="${NETNS_PREFIX}sw" i
  trap netns_destroy EXIT
  trap 'exit 130' INT TERM
  # The bridge has a namespace too: rules of the machine's own firewall and its
  # other bridges do not reach it.
  ip netns add "$switch" || return 1
  NETNS_COUNT=$count
  ip -n "$switch" link add br0 type bridge || return 1
  ip -n "$switch" link set br0 up
  for ((i = 0; i < count; i++)); do
    local name
    name=$(netns_name "$i")
    ip netns add "$name" || return 1
    ip -n "$name" link set lo up
    ip -n "$switch" link add "port$i" type veth peer name eth0 netns "$name" ||
      return 1
    ip -n "$switch" link set "port$i" master br0 up
    ip -n "$name" addr add "$(netns_address "$i")/24" dev eth0
    ip -n "$name" link set eth0 up
    if [ -n "$rate" ]; then netns_limit "$i" "$rate" || return 1; fi
  done
}

netns_limit() {
  local node=$1 rate=${2:-} name switch="${NETNS_PREFIX}sw"
  name=$(netns_name "$node")
  ip netns exec "$name" tc qdisc del dev eth0 root 2>/dev/null
  ip netns exec "$switch" tc qdisc del dev "port$node" root 2>/dev/null
  [ -n "$rate" ] || return 0
  ip netns exec "$name" tc qdisc add dev eth0 root tbf rate "$rate" \
    burst 256k latency 50ms &&
    ip netns exec "$switch" tc qdisc add dev "port$node" root tbf \
      rate "$rate" burst 256k latency 50ms
}

netns_cut() { ip -n "${NETNS_PREFIX}sw" link set "port$1" down; }
netns_heal() { ip -n "${NETNS_PREFIX}sw" link set "port$1" up; }

netns_destroy() {
  local i name pid
  for ((i = 0; i < NETNS_COUNT; i++)); do
    name=$(netns_name "$i")
    for pid in $(ip netns pids "$name" 2>/dev/null); do kill -9 "$pid"; done
    ip netns del "$name" 2>/dev/null
  done
  ip netns del "${NETNS_PREFIX}sw" 2>/dev/null
  NETNS_COUNT=0
}
