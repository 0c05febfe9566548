"""The C ABI of client/cc/c_api.h, as ctypes sees it. Not for use outside this package."""

from __future__ import annotations

import atexit
import ctypes
import os
import pathlib
import sys
import weakref
from ctypes import POINTER, c_char, c_char_p, c_double, c_int32, c_int64, c_size_t, c_void_p
from typing import Any, Callable, List, Optional

from .errors import FailedPreconditionError, WeightsyncError, make_error

ABI_VERSION = 2


# Added to dtype, shifted by so many bits: how the elements lie where the daemon reads them.
STORED_AS = 8
# Added to dtype: the address is one of GPU memory of this process.
ON_GPU = 0x10000


class Tensor(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("dtype", c_int32),
        ("dimensions", c_int32),
        ("shape", POINTER(c_int64)),
        ("offset", POINTER(c_int64)),
        ("extent", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("data", c_void_p),
        ("component", c_char_p),
    ]


class Sized(ctypes.Structure):
    """A struct that begins with its size."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(ctypes.sizeof(type(self)), **fields)


class TrainerOptions(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("address", c_char_p),
        ("model", c_char_p),
        ("rank", c_int32),
        ("world_size", c_int32),
        ("client", c_char_p),
        ("connect_timeout", c_double),
        ("no_reconnect", c_int32),
    ]


class Arena(ctypes.Structure):
    _fields_ = [
        ("arena_id", c_char * 64),
        ("data", c_void_p),
        ("size_bytes", c_int64),
        ("warm_up", c_double),
    ]


class SharedMemory(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("fd", c_int32),
        ("data", c_void_p),
        ("size_bytes", c_int64),
    ]


class Registered(ctypes.Structure):
    _fields_ = [("registered_rank_count", c_int32), ("world_size", c_int32), ("shard_bytes", c_int64)]


class PublishOptions(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("version", c_int64),
        ("step", c_int64),
        ("request_id", c_char_p),
        ("timeout", c_double),
        ("publish_mode", c_int32),
        ("update_mode", c_int32),
        ("pause_mode", c_int32),
        ("transfer_policy", c_int32),
        ("delivery_policy", c_int32),
        ("rolling_max_unavailable", c_int32),
        ("on_straggler", c_int32),
        ("allow_no_recovery", c_int32),
        ("verify_source", c_int32),
        ("transfer_medium", c_int32),
    ]


class Published(ctypes.Structure):
    _fields_ = [
        ("version_name", c_char * 192),
        ("update_id", c_char * 64),
        ("version", c_int64),
        ("copied_bytes", c_int64),
        ("copy_duration", c_double),
        ("stall", c_double),
    ]


PHASES = ("gather", "snapshot", "prepare", "transfer", "pause", "commit", "apply", "resume", "total")


class Version(ctypes.Structure):
    _fields_ = (
        [
            ("version_name", c_char * 192),
            ("update_id", c_char * 64),
            ("version", c_int64),
            ("step", c_int64),
            ("state", c_int32),
            ("bucket_count", c_int32),
            ("total_bytes", c_int64),
            ("wire_bytes", c_int64),
            ("moved_bytes", c_int64),
            ("replica_count", c_int32),
            ("transfer_policy", c_int32),
        ]
        + [(phase, c_double) for phase in PHASES]
        + [("failure_code", c_int32), ("failure_reason", c_char * 64), ("failure_message", c_char * 1024)]
        + [("serving_count", c_int32), ("absent_count", c_int32)]
        + [("absent_replicas", c_char * 4096), ("summary", c_char * 1024)]
    )


class Prepared(ctypes.Structure):
    _fields_ = [
        ("layout_id", c_char * 64),
        ("bucket_count", c_int32),
        ("wire_bytes", c_int64),
        ("prepare_duration", c_double),
    ]


class Installed(ctypes.Structure):
    _fields_ = [("state", c_int32), ("update_id", c_char * 64), ("version", c_int64)]


class Applied(ctypes.Structure):
    _fields_ = [
        ("update_id", c_char_p),
        ("version", c_int64),
        ("step", c_int64),
        ("copied_bytes", c_int64),
        ("copy_duration", c_double),
        ("code", c_int32),
        ("reason", c_char_p),
        ("message", c_char_p),
    ]


class Pause(ctypes.Structure):
    _fields_ = [("update_id", c_char_p), ("version", c_int64), ("mode", c_int32), ("timeout", c_double)]


class Resume(ctypes.Structure):
    _fields_ = [
        ("update_id", c_char_p),
        ("version", c_int64),
        ("step", c_int64),
        ("weights_changed", c_int32),
        ("mode", c_int32),
        ("removed", c_int32),
    ]


class Take(ctypes.Structure):
    _fields_ = [
        ("update_id", c_char_p),
        ("version", c_int64),
        ("first", c_int32),
        ("last", c_int32),
        ("tensors", POINTER(c_int32)),
        ("tensor_count", c_size_t),
        ("reader", c_void_p),
    ]


MAY_WRITE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
LOAD = ctypes.CFUNCTYPE(None, c_void_p, c_char_p, c_int64, c_void_p)
TAKE = ctypes.CFUNCTYPE(None, c_void_p, POINTER(Take), c_void_p)
ON_REMOVE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
SWAP = ctypes.CFUNCTYPE(None, c_void_p, c_int32, c_char_p, c_void_p)
ON_WRITING = ctypes.CFUNCTYPE(None, c_void_p, c_char_p)
ON_APPLIED = ctypes.CFUNCTYPE(None, c_void_p, POINTER(Applied))
ON_PAUSE = ctypes.CFUNCTYPE(None, c_void_p, POINTER(Pause), c_void_p)
ON_RESUME = ctypes.CFUNCTYPE(None, c_void_p, POINTER(Resume), c_void_p)


class WorkerOptions(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("address", c_char_p),
        ("model", c_char_p),
        ("replica", c_char_p),
        ("incarnation", c_char_p),
        ("worker_index", c_int32),
        ("worker_count", c_int32),
        ("client", c_char_p),
        ("copy_threads", c_int32),
        ("installed", POINTER(Installed)),
        ("user", c_void_p),
        ("may_write", MAY_WRITE),
        ("load", LOAD),
        ("swap", SWAP),
        ("on_writing", ON_WRITING),
        ("on_applied", ON_APPLIED),
        ("register_timeout", c_double),
        ("max_backoff", c_double),
        ("on_remove", ON_REMOVE),
        ("take", TAKE),
    ]


class ReplicaOptions(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("address", c_char_p),
        ("model", c_char_p),
        ("replica", c_char_p),
        ("incarnation", c_char_p),
        ("worker_count", c_int32),
        ("client", c_char_p),
        ("partial", c_int32),
        ("atomic_swap", c_int32),
        ("paused", c_int32),
        ("user", c_void_p),
        ("on_pause", ON_PAUSE),
        ("on_resume", ON_RESUME),
        ("register_timeout", c_double),
        ("max_backoff", c_double),
        ("removable", c_int32),
    ]


_ERROR = c_void_p

# name -> (result, arguments); without the prefix "weightsync_".
_FUNCTIONS = {
    "abi_version": (c_int32, []),
    "error_code": (c_int32, [_ERROR]),
    "error_reason": (c_char_p, [_ERROR]),
    "error_message": (c_char_p, [_ERROR]),
    "error_metadata_count": (c_size_t, [_ERROR]),
    "error_metadata_key": (c_char_p, [_ERROR, c_size_t]),
    "error_metadata_value": (c_char_p, [_ERROR, c_size_t]),
    "error_free": (None, [_ERROR]),
    "answer_fail": (None, [c_void_p, c_int32, c_char_p, c_char_p]),
    "answer_detail": (None, [c_void_p, c_char_p]),
    "set_log_level": (None, [c_int32]),
    "random_id": (None, [c_char * 33]),
    "default_address": (None, [c_char * 256]),
    "trainer_open": (_ERROR, [POINTER(TrainerOptions), POINTER(c_void_p)]),
    "trainer_allocate": (_ERROR, [c_void_p, c_int64, c_double, POINTER(Arena)]),
    "trainer_use_shared_memory": (_ERROR, [c_void_p, POINTER(SharedMemory)]),
    "trainer_forget_shared_memory": (None, [c_void_p, c_void_p]),
    "trainer_register": (_ERROR, [c_void_p, POINTER(Tensor), c_size_t, c_double, POINTER(Registered)]),
    "trainer_publish": (_ERROR, [c_void_p, POINTER(PublishOptions), POINTER(Published)]),
    "trainer_wait": (_ERROR, [c_void_p, POINTER(Published), c_double, POINTER(Version)]),
    "trainer_progress": (_ERROR, [c_void_p, POINTER(Published), c_double, POINTER(Version)]),
    "trainer_prepare": (_ERROR, [c_void_p, c_double, POINTER(Prepared)]),
    "trainer_status": (_ERROR, [c_void_p]),
    "trainer_node": (None, [c_void_p, c_char * 128]),
    "trainer_close": (None, [c_void_p]),
    "trainer_free": (None, [c_void_p]),
    "reader_read": (_ERROR, [c_void_p, c_int32, c_void_p, c_int64]),
    "worker_start": (
        _ERROR,
        [POINTER(WorkerOptions), POINTER(Tensor), POINTER(Tensor), c_size_t, POINTER(c_void_p)],
    ),
    "worker_wait_registered": (_ERROR, [c_void_p, c_double]),
    "worker_installed": (None, [c_void_p, POINTER(Installed)]),
    "worker_wait_installed": (_ERROR, [c_void_p, c_int64, c_double]),
    "worker_mark_dropped": (_ERROR, [c_void_p]),
    "worker_sleep": (_ERROR, [c_void_p, c_double]),
    "worker_wake": (_ERROR, [c_void_p]),
    "worker_status": (_ERROR, [c_void_p]),
    "worker_ended": (c_int32, [c_void_p]),
    "worker_close": (None, [c_void_p]),
    "worker_free": (None, [c_void_p]),
    "replica_start": (_ERROR, [POINTER(ReplicaOptions), POINTER(c_void_p)]),
    "replica_wait_registered": (_ERROR, [c_void_p, c_double]),
    "replica_paused": (c_int32, [c_void_p]),
    "replica_status": (_ERROR, [c_void_p]),
    "replica_ended": (c_int32, [c_void_p]),
    "replica_close": (None, [c_void_p]),
    "replica_free": (None, [c_void_p]),
}

_library: Optional[ctypes.CDLL] = None


def library() -> ctypes.CDLL:
    """libweightsync.so, loaded when it is first needed."""
    global _library
    if _library is None:
        path = pathlib.Path(__file__).parent / "_lib" / "libweightsync.so"
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise FailedPreconditionError(
                "LIBRARY_MISSING",
                f"libweightsync.so cannot be loaded ({error}): install the package with "
                "`pip install ./client/python` in the repository, and the libraries of "
                "deploy/install_deps.sh.",
            ) from None
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, f"weightsync_{name}")
            function.restype = result
            function.argtypes = arguments
        if loaded.weightsync_abi_version() != ABI_VERSION:
            raise FailedPreconditionError(
                "ABI_MISMATCH", f"{path} is of another release than this package; install it anew."
            )
        _library = loaded
    return _library


def call(name: str, *arguments: Any) -> Any:
    """A function of the library that returns no error."""
    return getattr(library(), f"weightsync_{name}")(*arguments)


def check(name: str, *arguments: Any) -> None:
    """A function that returns an error: raises it."""
    error = call(name, *arguments)
    if not error:
        return
    try:
        count = call("error_metadata_count", error)
        metadata = {
            text(call("error_metadata_key", error, i)): text(call("error_metadata_value", error, i))
            for i in range(count)
        }
        raised = make_error(
            call("error_code", error),
            text(call("error_reason", error)),
            text(call("error_message", error)),
            metadata,
        )
    finally:
        call("error_free", error)
    raise raised


def text(raw: Optional[bytes]) -> str:
    return raw.decode(errors="replace") if raw else ""


def raw(value: Optional[str]) -> Optional[bytes]:
    return value.encode() if value else None


def random_id() -> str:
    """A new identity, for example an incarnation: 32 hexadecimal digits."""
    buffer = ctypes.create_string_buffer(33)
    call("random_id", buffer)
    return text(buffer.value)


def default_address() -> str:
    buffer = ctypes.create_string_buffer(256)
    call("default_address", buffer)
    return text(buffer.value)


# Closed before the interpreter ends: their threads call back into it.
_open: "weakref.WeakSet[Handle]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for handle in list(_open):
        if not handle.forked():
            handle.close()


class Handle:
    """A weightsync_trainer, _worker or _replica; freed when nobody has it any more."""

    def __init__(self, kind: str, pointer: int, keep: Any = None) -> None:
        self._kind = kind
        self._pointer = pointer
        self._pid = os.getpid()
        self._closed = False
        # Callbacks, and memory that the library uses.
        self._keep = keep
        _open.add(self)

    def forked(self) -> bool:
        return os.getpid() != self._pid

    def pointer(self) -> int:
        if self.forked():
            raise FailedPreconditionError(
                "FORKED_PROCESS",
                f"This {self._kind} was made by process {self._pid}, and its connection and threads stayed "
                f"there; make one in this process ({os.getpid()}), or start processes with spawn.",
            )
        return self._pointer

    def check(self, name: str, *arguments: Any) -> None:
        check(f"{self._kind}_{name}", self.pointer(), *arguments)

    def call(self, name: str, *arguments: Any) -> Any:
        return call(f"{self._kind}_{name}", self.pointer(), *arguments)

    def close(self) -> None:
        self._closed = True
        self.call("close")

    def __del__(self) -> None:
        # In a child of fork() the library must not be touched; at the end of the interpreter modules
        # may be gone.
        if sys is None or sys.is_finalizing() or self.forked():
            return
        try:
            call(f"{self._kind}_free", self._pointer)
        except Exception:  # noqa: BLE001
            pass


def start(kind: str, name: str, *arguments: Any, keep: Any = None) -> Handle:
    """Calls a function whose last argument receives the handle."""
    pointer = c_void_p()
    check(f"{kind}_{name}", *arguments, ctypes.byref(pointer))
    assert pointer.value is not None
    return Handle(kind, pointer.value, keep)


def fail(answer: int, error: BaseException) -> None:
    """Answers that a callback failed."""
    if isinstance(error, WeightsyncError):
        call("answer_fail", answer, int(error.code), raw(error.reason), error.message.encode())
    elif isinstance(error, TimeoutError):
        call("answer_fail", answer, 4, b"HOOK_TIMEOUT", _sentence(error).encode())
    else:
        call("answer_fail", answer, 2, b"HOOK_FAILED", _sentence(error).encode())


def _sentence(error: BaseException) -> str:
    sentence = str(error)
    return f"{type(error).__name__}: {sentence}" if sentence else type(error).__name__


def guarded(function: Callable[..., None]) -> Callable[..., None]:
    """A callback whose last argument is an answer: what it raises becomes the answer's failure."""

    def callback(_user: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001  nothing may pass into C
            fail(arguments[-1], error)

    return callback


def int64s(values: Any) -> Any:
    return (c_int64 * len(values))(*values)


def tensors(parts: List[Any]) -> Any:
    """An array of Tensor from objects with name, dtype, shape, offset, extent, strides, address and on_gpu.

    Those of trainers have held_dtype, too: how their elements lie there.
    """
    made = (Tensor * max(len(parts), 1))()
    for slot, part in zip(made, parts):
        slot.name = part.name.encode()
        slot.dtype = int(part.dtype) | (ON_GPU if part.on_gpu else 0)
        held = getattr(part, "held_dtype", part.dtype)
        if held != part.dtype:
            slot.dtype |= int(held) << STORED_AS
        slot.dimensions = len(part.shape)
        slot.shape = int64s(part.shape)
        if part.offset is not None:
            slot.offset = int64s(part.offset)
            slot.extent = int64s(part.extent)
        if part.strides is not None:
            slot.strides = int64s(part.strides)
        slot.data = part.address
        slot.component = raw(part.component)
    return made
