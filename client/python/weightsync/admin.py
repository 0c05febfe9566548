"""Looking at a cluster: AdminService with our errors."""

from __future__ import annotations

from typing import Any, Iterator, Optional, Tuple

from . import _capi
from .errors import WeightsyncError, make_error


def target_of(address: Optional[str]) -> str:
    """What gRPC understands of "host:port", "unix:/path" or "/path"; None: this machine's daemon."""
    if not address:
        return _capi.default_address()
    return f"unix:{address}" if address.startswith("/") else address


class Admin:
    """A channel to a daemon, and `stub`, its AdminService.

        with weightsync.Admin() as admin:
            for replica in admin.call("ListReplicas", parent="models/-").replicas:
                print(replica.name, replica.version)

    Thread-safe. Messages are those of proto/weightsync/v1/admin.proto (`weightsync.v1.admin_pb2`).
    """

    def __init__(self, address: Optional[str] = None, timeout: float = 10.0) -> None:
        import grpc

        from .v1 import admin_pb2, admin_pb2_grpc

        self.messages = admin_pb2
        self.timeout = timeout
        self.channel = grpc.insecure_channel(
            target_of(address), options=[("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]
        )
        self.stub = admin_pb2_grpc.AdminServiceStub(self.channel)

    def call(self, method: str, /, timeout: Optional[float] = None, **fields: Any) -> Any:
        """Calls a method with the fields of its request; raises WeightsyncError."""
        import grpc

        request = getattr(self.messages, f"{method}Request")(**fields)
        try:
            return getattr(self.stub, method)(
                request, timeout=self.timeout if timeout is None else timeout, wait_for_ready=True
            )
        except grpc.RpcError as error:
            raise to_error(error) from None

    def watch(self, name: str, timeout: Optional[float] = None) -> Iterator[Any]:
        """Yields a version ("models/{model}/versions/{version}") whenever it changes, until it has ended."""
        import grpc

        stream = self.stub.WatchVersion(self.messages.WatchVersionRequest(name=name), timeout=timeout)
        try:
            yield from stream
        except grpc.RpcError as error:
            raise to_error(error) from None
        finally:
            stream.cancel()

    def close(self) -> None:
        """Ends the connection."""
        self.channel.close()

    def __enter__(self) -> "Admin":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def to_error(error: Any) -> WeightsyncError:
    """WeightsyncError of a grpc.RpcError, with the reason of its ErrorInfo."""
    code = error.code()
    reason = ""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            reason = _reason(value)
    return make_error(code.value[0], reason or code.name, error.details() or "")


def _fields(data: bytes) -> Iterator[Tuple[int, bytes]]:
    """Length-delimited fields of a message; google.rpc need not be installed for three of them."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = varint()
        kind = tag & 7
        if kind == 2:
            length = varint()
            yield tag >> 3, data[at : at + length]
            at += length
        elif kind == 0:
            varint()
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            return


def _reason(status: bytes) -> str:
    try:
        for number, detail in _fields(status):
            if number != 3:
                continue
            any_message = dict(_fields(detail))
            if any_message.get(1, b"").endswith(b"/google.rpc.ErrorInfo"):
                return dict(_fields(any_message.get(2, b""))).get(1, b"").decode(errors="replace")
    except IndexError:
        pass
    return ""
