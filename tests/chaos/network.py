"""Hosts on one machine: network namespaces on a bridge, with links that can be cut, shaped and made
lossy. The same as tests/bench/netns.sh makes, for a program that holds many processes."""

import ctypes
import os
import subprocess

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000


def _run(*command, check=True):
    return subprocess.run(
        command, check=check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ).returncode


def available():
    """Whether this user may make network namespaces."""
    if os.geteuid() != 0:
        return False
    name = f"wsprobe{os.getpid()}"
    try:
        if _run("ip", "netns", "add", name, check=False) != 0:
            return False
        return _run("ip", "netns", "del", name, check=False) == 0
    except FileNotFoundError:
        return False


class Network:
    """One bridge in a namespace of its own; node i is PREFIXni with address 10.231.88.(i+1)."""

    def __init__(self, prefix):
        self._prefix = prefix
        self._switch = prefix + "sw"
        self._nodes = {}
        # Where something was done, ever.
        self._broken = set()
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")

    def _name(self, node):
        return f"{self._prefix}n{node}"

    def address(self, node):
        return f"10.231.88.{node + 1}"

    def add(self, node):
        name = self._name(node)
        _run("ip", "netns", "add", name)
        self._nodes[node] = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        port = f"port{node}"
        _run(
            *("ip", "-n", self._switch, "link", "add", port, "type", "veth"),
            *("peer", "name", "eth0", "netns", name),
        )
        _run("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up")
        _run("ip", "-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up")

    def enter(self, node):
        """In a child before exec: become a process of that host."""
        if _LIBC.setns(self._nodes[node], _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")

    def cut(self, node):
        self._broken.add(node)
        _run("ip", "-n", self._switch, "link", "set", f"port{node}", "down")

    def heal_link(self, node):
        _run("ip", "-n", self._switch, "link", "set", f"port{node}", "up")

    def slow(self, node, rate):
        self._broken.add(node)
        for name, device in ((self._name(node), "eth0"), (self._switch, f"port{node}")):
            _run(
                *("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root"),
                *("tbf", "rate", rate, "burst", "64k", "latency", "50ms"),
            )

    def heal_slow(self, node):
        for name, device in ((self._name(node), "eth0"), (self._switch, f"port{node}")):
            _run(
                *("ip", "netns", "exec", name, "tc", "qdisc", "del", "dev", device, "root"),
                check=False,
            )

    def _drop(self, node, table, rule):
        self._broken.add(node)
        hook = "type filter hook input priority 0;"
        script = f"table inet {table} {{ chain incoming {{ {hook} {rule}; }}; }}"
        _run("ip", "netns", "exec", self._name(node), "nft", script)

    def lossy(self, node, percent):
        self._drop(node, "loss", f'iif "eth0" numgen random mod 100 < {percent} drop')

    def cut_edge(self, node, peer):
        """Neither hears the other any more; everybody else hears both."""
        for a, b in ((node, peer), (peer, node)):
            self._drop(a, "edge", f"ip saddr {self.address(b)} drop")

    def redirect(self, node, host, other, port):
        """From now on that node reaches `other` at the address of `host`, at that port."""
        address = self.address(host)
        self._broken.add(node)
        script = (
            "table ip another { chain outgoing { type nat hook output priority -100; "
            f"ip daddr {address} tcp dport {port} dnat to {self.address(other)}; }}; "
            # Connections that are there already end.
            "chain ending { type filter hook output priority 0; "
            f"ip daddr {address} tcp dport {port} reject with tcp reset; }}; }}"
        )
        _run("ip", "netns", "exec", self._name(node), "nft", script)

    def heal_rules(self, node):
        _run("ip", "netns", "exec", self._name(node), "nft", "flush ruleset", check=False)

    def heal(self):
        """Undoes whatever was done to any link."""
        for node in self._broken:
            self.heal_link(node)
            self.heal_slow(node)
            self.heal_rules(node)
        self._broken.clear()

    def destroy(self):
        for node, fd in self._nodes.items():
            os.close(fd)
            _run("ip", "netns", "del", self._name(node), check=False)
        _run("ip", "netns", "del", self._switch, check=False)
        self._nodes = {}
