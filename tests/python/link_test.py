"""A node whose connection to its coordinator goes silent, as behind a cut cable, and one that ends meanwhile."""

import contextlib
import socket
import threading
import time

import grpc
import numpy
import pytest
import weightsync
from weightsync.v1 import admin_pb2, trainer_pb2, trainer_pb2_grpc

import cluster


class Proxy:
    """Passes connections on. One that was cut stays open and says nothing more; new ones pass."""

    def __init__(self, to):
        host, port = to.rsplit(":", 1)
        self._to = (host, int(port))
        self._cut = 0
        self._made = 0
        self._lock = threading.Lock()
        self._sockets = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                with self._lock:
                    self._made += 1
                    number = self._made
                    self._sockets += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(one, other, number), daemon=True).start()

    def _pass(self, one, other, number):
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                with self._lock:
                    cut = number <= self._cut
                # What was acknowledged and is lost is all that a cut is to its ends.
                if not cut:
                    other.sendall(data)
        with self._lock:
            cut = number <= self._cut
        if not cut:
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_WR)

    def cut(self):
        with self._lock:
            self._cut = self._made

    def close(self):
        self._listener.close()
        for one in self._sockets:
            one.close()


@pytest.fixture
def pair():
    """A coordinator, and a node that reaches it through a proxy."""
    with cluster.Cluster(1) as here:
        proxy = Proxy(here.nodes[0].listen)
        ready = here.directory / "far.ready"
        far = here.start(
            "far",
            cluster.DAEMON,
            "--node=far",
            f"--unix_socket={here.directory}/far.sock",
            f"--state_dir={here.directory}/far",
            f"--ready_file={ready}",
            "--listen=127.0.0.1:0",
            "--store_budget_bytes=1000000000",
            f"--coordinator_address={proxy.address}",
        )
        cluster.wait_until(ready.exists, "the node did not start", processes=[far])
        yield here, proxy, far
        proxy.close()


def is_in(here, state):
    with weightsync.Admin(here.nodes[0].socket) as admin:
        nodes = admin.call("ListNodes").nodes
    return any(node.name == "nodes/far" and node.state == state for node in nodes)


def test_a_connection_that_went_silent_is_made_anew(pair):
    here, proxy, far = pair
    there, lost = admin_pb2.Node.STATE_CONNECTED, admin_pb2.Node.STATE_LOST
    cluster.wait_until(lambda: is_in(here, there), "the node is not there", processes=[far])
    proxy.cut()
    cluster.wait_until(lambda: is_in(here, lost), "the node is not missed", 30, [far])
    # By itself the connection would last as long as the kernel is patient: a quarter of an hour.
    cluster.wait_until(lambda: is_in(here, there), "the node did not come back", 40, [far])


def test_a_node_that_ends_does_not_wait_for_answers_of_others(pair):
    here, _, far = pair
    address = here.nodes[0].socket
    tensors = {"w": numpy.zeros((64, 64), numpy.float32)}
    with weightsync.Trainer("m", rank=0, world_size=2, address=address) as trainer, weightsync.Trainer(
        "m", rank=1, world_size=2, address=address
    ) as other:
        trainer.register(tensors)
        other.register(tensors)

        # The other rank does not publish: whoever waits for the version waits for long.
        def publish():
            with contextlib.suppress(weightsync.WeightsyncError):
                trainer.publish()

        publishing = threading.Thread(target=publish)
        publishing.start()
        with grpc.insecure_channel(f"unix:{here.directory}/far.sock") as channel:
            stub = trainer_pb2_grpc.TrainerServiceStub(channel)
            request = trainer_pb2.WaitVersionRequest(name="models/m/versions/latest")
            end = time.monotonic() + 30
            while True:
                call = stub.WaitVersion.future(request)
                try:
                    call.exception(timeout=2)
                except grpc.FutureTimeoutError:
                    break
                assert time.monotonic() < end, call.details()
            start = time.monotonic()
            far.terminate()
            assert far.wait(25) == 0
            # --shutdown_timeout is 3 s, and nobody waits for more than that and what it takes to end.
            assert time.monotonic() - start < 15
            assert call.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE), call.details()
    publishing.join(60)
