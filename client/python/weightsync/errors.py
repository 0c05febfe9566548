"""Errors: what a failed call says, as exceptions."""

from __future__ import annotations

import enum
from typing import Dict, Mapping, Optional, Type


class Code(enum.IntEnum):
    """google.rpc.Code."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class WeightsyncError(Exception):
    """What failed, by `reason` (UPPER_SNAKE: the contract) and a sentence that says what to do.

    A hook that raises one passes its reason on to the daemon.
    """

    code: Code = Code.UNKNOWN

    # Those that are an OSError too would print its errno and file.
    __str__ = Exception.__str__

    def __init__(
        self,
        reason: str,
        message: str,
        code: Optional[int] = None,
        metadata: Optional[Mapping[str, str]] = None,
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        if code is not None:
            try:
                self.code = Code(code)
            except ValueError:
                self.code = Code.UNKNOWN
        self.metadata: Dict[str, str] = dict(metadata or {})

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return make_error, (int(self.code), self.reason, self.message, self.metadata)


class InvalidArgumentError(WeightsyncError, ValueError):
    """The request is wrong: mend it."""

    code = Code.INVALID_ARGUMENT


class FailedPreconditionError(WeightsyncError, RuntimeError):
    """Something must be mended first; trying again does not help before."""

    code = Code.FAILED_PRECONDITION


class NotFoundError(WeightsyncError, LookupError):
    """What was named is not there."""

    code = Code.NOT_FOUND


class CheckpointNotFoundError(NotFoundError, FileNotFoundError):
    """There is no checkpoint."""


class AlreadyExistsError(WeightsyncError, RuntimeError):
    """Somebody else has it, or it is there: take another name."""

    code = Code.ALREADY_EXISTS


class CheckpointExistsError(AlreadyExistsError, FileExistsError):
    """There is something already."""


class PermissionDeniedError(WeightsyncError, PermissionError):
    """The daemon, or the machine, does not let this user."""

    code = Code.PERMISSION_DENIED


class UnauthenticatedError(WeightsyncError, PermissionError):
    """The daemon wants to know who is calling."""

    code = Code.UNAUTHENTICATED


class DeadlineExceededError(WeightsyncError, TimeoutError):
    """It took longer than was given; what it was may still happen."""

    code = Code.DEADLINE_EXCEEDED


class UnavailableError(WeightsyncError, ConnectionError):
    """The daemon cannot be reached now: try again."""

    code = Code.UNAVAILABLE


class ResourceExhaustedError(WeightsyncError, RuntimeError):
    """There is no room for it, or too much is going on."""

    code = Code.RESOURCE_EXHAUSTED


class MemoryExhaustedError(ResourceExhaustedError, MemoryError):
    """There is not that much memory."""


class DiskFullError(ResourceExhaustedError, OSError):
    """There is no room on a disk."""


class AbortedError(WeightsyncError, RuntimeError):
    """The update was given up; the old one stands everywhere."""

    code = Code.ABORTED


class UnimplementedError(WeightsyncError, NotImplementedError):
    """This release, or this engine, cannot do it."""

    code = Code.UNIMPLEMENTED


class CancelledError(WeightsyncError, RuntimeError):
    """It was called off."""

    code = Code.CANCELLED


class OutOfRangeError(WeightsyncError, ValueError):
    """Beyond what there is, for example a page."""

    code = Code.OUT_OF_RANGE


class DataLossError(WeightsyncError, OSError):
    """Bytes went away or are not what they were: memory that vanished, a damaged file or link."""

    code = Code.DATA_LOSS


class InternalError(WeightsyncError, RuntimeError):
    """The fault is weightsync's, or of the machine under it."""

    code = Code.INTERNAL


class StorageError(InternalError, OSError):
    """A disk that cannot be read or written."""


class UnknownError(WeightsyncError, RuntimeError):
    """Something that is no error of weightsync: the sentence is all that is known."""

    code = Code.UNKNOWN


_BY_CODE: Dict[int, Type[WeightsyncError]] = {
    int(kind.code): kind
    for kind in (
        InvalidArgumentError,
        FailedPreconditionError,
        NotFoundError,
        AlreadyExistsError,
        PermissionDeniedError,
        UnauthenticatedError,
        DeadlineExceededError,
        UnavailableError,
        ResourceExhaustedError,
        AbortedError,
        UnimplementedError,
        CancelledError,
        OutOfRangeError,
        DataLossError,
        InternalError,
        UnknownError,
    )
}

# Where the code alone does not say which exception of Python's it is.
_BY_REASON: Dict[str, Type[WeightsyncError]] = {
    "CHECKPOINT_EXISTS": CheckpointExistsError,
    "CHECKPOINT_IO": StorageError,
    "CHECKPOINT_NOT_FOUND": CheckpointNotFoundError,
    "DISK_FULL": DiskFullError,
    "HOST_MAP_FAILED": MemoryExhaustedError,
    "JOURNAL_IO": StorageError,
    "MEMORY_EXHAUSTED": MemoryExhaustedError,
    "NO_ADDRESS_SPACE": MemoryExhaustedError,
    "NO_DEVICE_MEMORY": MemoryExhaustedError,
    "NO_MEMORY_FOR_ARENA": MemoryExhaustedError,
    "NO_MEMORY_FOR_BUFFER": MemoryExhaustedError,
    "NO_STORE_ROOM": MemoryExhaustedError,
}


def make_error(
    code: int, reason: str, message: str, metadata: Optional[Mapping[str, str]] = None
) -> WeightsyncError:
    """The exception of the class that belongs to `code` and `reason`."""
    kind = _BY_CODE.get(code, UnknownError)
    # An update that was aborted has its own reason, and is an AbortedError all the same.
    exact = _BY_REASON.get(reason, kind)
    return (exact if issubclass(exact, kind) else kind)(reason, message, code, metadata)


def invalid(reason: str, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(reason, message)
