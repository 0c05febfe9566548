"""The pages that a daemon serves over plain HTTP: figures for Prometheus, and a probe."""

import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request

import numpy
import pytest
import weightsync

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


def test_a_daemon_whose_own_work_stands_still_says_so(tmp_path):
    """Its HTTP threads run, and what they ask does not answer: 503 when a call would give up, and not later."""
    program = cluster.BIN / "tests/chaos/weightsyncd_faulty"
    flags = [
        "--store_budget_bytes=67108864",
        "--http_address=127.0.0.1:0",
        "--call_timeout=1s",
        f"--chaos_socket={tmp_path}/node",
        f"--chaos_run_socket={tmp_path}/run",
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as run, cluster.Cluster(1, flags, daemon=program) as one:
        run.bind(f"{tmp_path}/run")
        run.settimeout(60)
        node = one.nodes[0]
        assert read(node, "/healthz")[1] == "ok\n"

        def publish():
            with weightsync.Trainer("held", address=node.socket) as trainer:
                trainer.register({"w": numpy.zeros(8, numpy.float32)})
                try:
                    trainer.publish()
                except weightsync.WeightsyncError:
                    pass  # its calls have a second, too

        # On the one thread that everything else of the node waits for, for three seconds.
        run.sendto(json.dumps({"cmd": "arm", "id": 1, "point": "node:command:*"}).encode(), f"{tmp_path}/node")
        publisher = threading.Thread(target=publish)
        publisher.start()
        try:
            hit = json.loads(run.recv(8192))
            begin = time.monotonic()
            assert hit["hit"] == 1
            with pytest.raises(urllib.error.HTTPError) as busy:
                read(node, "/healthz")
            assert busy.value.code == 503 and busy.value.read().decode().startswith("NODE_BUSY: node node0")
            assert 0.9 < time.monotonic() - begin < 3
        finally:
            run.sendto(json.dumps({"cmd": "go", "id": 1}).encode(), f"{tmp_path}/node")
            publisher.join()
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
    """Callers that open connections and are silent do not keep the others out: each has a second."""
    host, port = running.nodes[0].http.rsplit(":", 1)
    silent = [socket.create_connection((host, int(port)), timeout=30) for _ in range(32)]
    try:
        begin = time.monotonic()
        assert read(running.nodes[0], "/healthz", timeout=60)[1] == "ok\n"
        assert time.monotonic() - begin < 10
    finally:
        for one in silent:
            one.close()
