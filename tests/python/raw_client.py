"""Talks to a daemon without our client library: what a careless or a hostile client could send.

Messages come from reflection, so that nothing is compiled in. Streams send heartbeats by
themselves until they are closed.
"""

import os
import queue
import socket
import threading

import grpc
from google.protobuf import message_factory

import grpc_cli

TIMEOUT = 30


def error_of(error):
    """(code, reason, sentence) of a grpc.RpcError; the reason from its ErrorInfo."""
    details = {key: value for key, value in error.trailing_metadata() or ()}
    raw = details.get("grpc-status-details-bin", b"")
    return error.code(), reason_of(raw), error.details()


def reason_of(raw):
    """ErrorInfo.reason out of a serialized google.rpc.Status; "" when there is none.

    Field 1 of the Any's value; read by hand, because google.rpc is not installed here.
    """
    marker = b"google.rpc.ErrorInfo"
    at = raw.find(marker)
    if at < 0:
        return ""
    at += len(marker)
    # Any.value: tag 0x12, its length, then ErrorInfo: tag 0x0a, length, reason.
    assert raw[at] == 0x12, raw
    at += 1
    while raw[at] & 0x80:
        at += 1
    at += 1
    assert raw[at] == 0x0A, raw
    return raw[at + 2 : at + 2 + raw[at + 1]].decode()


class Stream:
    """A stream of requests and answers that stays open."""

    def __init__(self, client, method, first, heartbeat):
        self._requests = queue.Queue()
        self._requests.put(first)
        self._heartbeat = heartbeat
        self._closed = threading.Event()
        self._answers = queue.Queue()
        self._call = client.stream(method)(iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._beat, daemon=True).start()

    def _read(self):
        try:
            for answer in self._call:
                self._answers.put(answer)
            self._answers.put(None)
        except grpc.RpcError as error:
            self._answers.put(error)

    def _beat(self):
        while not self._closed.wait(0.5):
            self._requests.put(self._heartbeat)

    def send(self, request):
        self._requests.put(request)

    def next(self, timeout=TIMEOUT):
        """The next answer; None at the end; raises what the server ended the stream with."""
        answer = self._answers.get(timeout=timeout)
        if isinstance(answer, grpc.RpcError):
            raise answer
        return answer

    def next_of(self, kind, timeout=TIMEOUT):
        """The next answer in which the field `kind` is set; others are passed over."""
        while True:
            answer = self.next(timeout)
            assert answer is not None, f"the stream ended before {kind}"
            if answer.HasField(kind):
                return getattr(answer, kind)

    def heard(self):
        """The answers that have come and were not asked for by next(), to the end of the stream."""
        found = []
        while not self._answers.empty():
            answer = self._answers.get()
            if answer is not None and not isinstance(answer, grpc.RpcError):
                found.append(answer)
        return found

    def close(self):
        self._closed.set()
        self._requests.put(None)
        self._call.cancel()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Client:
    def __init__(self, address):
        self._server = grpc_cli.Server(address)

    def close(self):
        self._server.close()

    def message(self, name, /, **fields):
        """A message of weightsync.v1 by its name, with fields as its constructor takes them."""
        descriptor = self._server.message_type(f"weightsync.v1.{name}")
        return message_factory.GetMessageClass(descriptor)(**fields)

    def stream(self, method):
        return self._server.stub(f"weightsync.v1.{method}")

    def call(self, method, /, **fields):
        """A unary call; raises grpc.RpcError."""
        name = f"weightsync.v1.{method}"
        request = message_factory.GetMessageClass(self._server.method(name).input_type)(**fields)
        return self._server.stub(name)(request, timeout=TIMEOUT)

    def trainer(self, model, rank=0, world_size=1, **identity):
        """Opens the lease of a rank; returns (stream, session)."""
        identity = {"pid": os.getpid(), "protocol_version": 1, "client": "raw", **identity}
        first = self.message("TrainerHeartbeat")
        for field, value in identity.items():
            setattr(first.identity, field, value)
        first.identity.model = f"models/{model}"
        first.identity.rank = rank
        first.identity.world_size = world_size
        stream = Stream(
            self, "TrainerService.OpenSession", first, self.message("TrainerHeartbeat")
        )
        return stream, stream.next_of("opened").session

    def replica(self, model, replica, worker_count=1, incarnation="one", **fields):
        """Opens the control stream of a replica; the first answer is not awaited."""
        first = self.message("ReplicaReport")
        register = first.register
        register.model = f"models/{model}"
        register.replica = replica
        register.worker_count = worker_count
        register.incarnation = incarnation
        register.pid = os.getpid()
        register.protocol_version = 1
        for field, value in fields.items():
            setattr(register, field, value)
        heartbeat = self.message("ReplicaReport")
        heartbeat.heartbeat.SetInParent()
        return Stream(self, "ReplicaService.ControlReplica", first, heartbeat)

    def worker(self, model, replica, tensors, worker_index=0, worker_count=1, incarnation="one"):
        """Opens the stream of a worker; the first answer is not awaited."""
        first = self.message("WorkerReport")
        register = first.register
        register.model = f"models/{model}"
        register.replica = replica
        register.worker_index = worker_index
        register.worker_count = worker_count
        register.incarnation = incarnation
        register.pid = os.getpid()
        register.protocol_version = 1
        for tensor in tensors:
            register.tensors.add().CopyFrom(tensor)
        heartbeat = self.message("WorkerReport")
        heartbeat.heartbeat.SetInParent()
        return Stream(self, "ReplicaService.RunWorker", first, heartbeat)


def redeem(path, token):
    """Redeems a token at a descriptor socket (transport/host/fd_socket.h).

    Returns (0, descriptor) or (code, reason).
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(TIMEOUT)
        connection.connect(path)
        connection.send(b"WSFD\x01R" + token.encode())
        answer, descriptors, _, _ = socket.recv_fds(connection, 1024, 1)
    assert answer[:5] == b"WSFD\x01", answer
    if answer[5] == 0:
        return 0, descriptors[0]
    return answer[5], answer[6:].split(b"\0")[0].decode()
