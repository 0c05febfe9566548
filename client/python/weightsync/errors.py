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


class FailedPreconditionError(WeightsyncError):
    """Something must be mended first; trying again does not help before."""

    code = Code.FAILED_PRECONDITION


class NotFoundError(WeightsyncError, LookupError):
    code = Code.NOT_FOUND


class AlreadyExistsError(WeightsyncError):
    code = Code.ALREADY_EXISTS


class PermissionDeniedError(WeightsyncError, PermissionError):
    code = Code.PERMISSION_DENIED

    # OSError prints its own arguments.
    __str__ = Exception.__str__


class DeadlineExceededError(WeightsyncError, TimeoutError):
    code = Code.DEADLINE_EXCEEDED

    __str__ = Exception.__str__


class UnavailableError(WeightsyncError, ConnectionError):
    """The daemon cannot be reached now: try again."""

    code = Code.UNAVAILABLE

    __str__ = Exception.__str__


class ResourceExhaustedError(WeightsyncError):
    code = Code.RESOURCE_EXHAUSTED


class AbortedError(WeightsyncError):
    """The update was given up; the old one stands everywhere."""

    code = Code.ABORTED


class UnimplementedError(WeightsyncError, NotImplementedError):
    code = Code.UNIMPLEMENTED


class CancelledError(WeightsyncError):
    code = Code.CANCELLED


_BY_CODE: Dict[int, Type[WeightsyncError]] = {
    int(kind.code): kind
    for kind in (
        InvalidArgumentError,
        FailedPreconditionError,
        NotFoundError,
        AlreadyExistsError,
        PermissionDeniedError,
        DeadlineExceededError,
        UnavailableError,
        ResourceExhaustedError,
        AbortedError,
        UnimplementedError,
        CancelledError,
    )
}


def make_error(
    code: int, reason: str, message: str, metadata: Optional[Mapping[str, str]] = None
) -> WeightsyncError:
    """The exception of the class that belongs to `code`."""
    return _BY_CODE.get(code, WeightsyncError)(reason, message, code, metadata)


def invalid(reason: str, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(reason, message)
