"""The pages that a daemon serves over plain HTTP: figures for Prometheus, and a probe."""

import os
import re
import signal
import time
import urllib.error
import urllib.request

import pytest

import cluster
import raw_client

SAMPLE = re.compile(r"^(weightsync_\w+)(\{.*\})? (-?[0-9.e+]+|[Nn]an)$")


def read(node, path, timeout=30):
    with urllib.request.urlopen(f"http://{node.http}{path}", timeout=timeout) as page:
        return page.headers["Content-Type"], page.read().decode()


def samples(text):
    """Name and labels -> value; every other line must be a comment of the format's."""
    found = {}
    for line in text.splitlines():
        if re.match(r"^# (HELP|TYPE) weightsync_\w+ ", line):
            continue
        match = SAMPLE.match(line)
        assert match, line
        found[match.group(1) + (match.group(2) or "")] = float(match.group(3))
    return found


@pytest.fixture(scope="module")
def running():
    flags = ["--store_budget_bytes=67108864", "--http_address=127.0.0.1:0", "--call_timeout=2s"]
    with cluster.Cluster(1, flags) as one:
        yield one


def test_figures_are_those_of_get_node(running):
    kind, text = read(running.nodes[0], "/metrics")
    assert kind.startswith("text/plain; version=0.0.4")
    figures = samples(text)
    assert figures['weightsync_build_info{node="node0",version="0.1.0"}'] == 1
    client = raw_client.Client(running.nodes[0].socket)

    def shown():
        memory = client.call("AdminService.GetNode", name="nodes/node0").memory
        return memory if memory.store_budget_bytes else None

    memory = cluster.wait_until(shown, "the node says what memory it has")
    assert figures["weightsync_store_budget_bytes"] == memory.store_budget_bytes == 67108864
    assert figures["weightsync_store_used_bytes"] == memory.store_used_bytes == 0
    assert figures["weightsync_resident_bytes"] > 1 << 20
    assert not [name for name in figures if "gpu" in name], "there is none"


def test_a_daemon_that_stands_still_is_not_healthy(running):
    node = running.nodes[0]
    assert read(node, "/healthz") == ("text/plain; charset=utf-8", "ok\n")
    os.kill(node.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises((TimeoutError, urllib.error.URLError)):
            read(node, "/healthz", timeout=1)
    finally:
        os.kill(node.process.pid, signal.SIGCONT)
    assert read(node, "/healthz")[1] == "ok\n"


def test_there_is_nothing_else(running):
    node = running.nodes[0]
    with pytest.raises(urllib.error.HTTPError) as nowhere:
        read(node, "/etc/passwd")
    assert nowhere.value.code == 404 and "/metrics /healthz" in nowhere.value.read().decode()
    with pytest.raises(urllib.error.HTTPError) as changed:
        urllib.request.urlopen(f"http://{node.http}/metrics", data=b"x=1", timeout=30)
    assert changed.value.code == 405


def test_many_who_look_at_once_and_one_who_says_nothing(running):
    """A caller that opens a connection and is silent does not keep the others out."""
    import socket

    host, port = running.nodes[0].http.rsplit(":", 1)
    silent = [socket.create_connection((host, int(port)), timeout=30) for _ in range(8)]
    try:
        begin = time.monotonic()
        assert read(running.nodes[0], "/healthz", timeout=60)[1] == "ok\n"
        assert time.monotonic() - begin < 60
    finally:
        for one in silent:
            one.close()
