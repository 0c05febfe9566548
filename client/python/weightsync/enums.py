"""The API's enumerations. Wherever one is asked for, its name in any case does as well: "stream"."""

from __future__ import annotations

import enum
from typing import Type, TypeVar, Union

from .errors import invalid


class DType(enum.IntEnum):
    """Element types, named as safetensors names them."""

    BOOL = 1
    U8 = 2
    I8 = 3
    F8_E5M2 = 4
    F8_E4M3 = 5
    I16 = 6
    U16 = 7
    F16 = 8
    BF16 = 9
    I32 = 10
    U32 = 11
    F32 = 12
    I64 = 13
    U64 = 14
    F64 = 15

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return (0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8)[self]

    @property
    def floating(self) -> bool:
        """Whether it is a floating-point type."""
        return self.name.startswith(("F", "BF"))


class UpdateMode(enum.IntEnum):
    """Whether a version is gathered beside the one that serves, or written over it while replicas are paused."""

    STAGE = 1
    STREAM = 2


class PublishMode(enum.IntEnum):
    """Whether publish() copies the trainer's tensors, or they are read where they lie until the update ends."""

    SNAPSHOT = 1
    IN_PLACE = 2


class PauseMode(enum.IntEnum):
    """What becomes of requests that run when a replica is paused: ended, finished, frozen; or nothing is paused."""

    ABORT = 1
    DRAIN = 2
    KEEP = 3
    NONE = 4


class TransferPolicy(enum.IntEnum):
    """Which way bytes take between nodes."""

    AUTO = 1
    SHARDED = 2
    PAIRED = 3
    BROADCAST = 4


class TransferMedium(enum.IntEnum):
    """How bytes come from the trainers' nodes to the workers'."""

    NETWORK = 1
    DISK = 2
    NETWORK_OR_DISK = 3


class DeliveryPolicy(enum.IntEnum):
    """Whether every version is delivered, or waiting ones give way to newer ones (SUPERSEDED)."""

    QUEUE = 1
    LATEST = 2


class OnStraggler(enum.IntEnum):
    """What becomes of an update for which a replica is too late: it is aborted, or goes on without."""

    ABORT = 1
    EVICT = 2


class State(enum.IntEnum):
    """Where an update stands."""

    UNKNOWN = 0
    GATHERING = 1
    PREPARING = 2
    MOVING = 3
    VERIFIED = 4
    PAUSING = 5
    COMMITTED = 6
    APPLYING = 7
    RESUMING = 8
    ACTIVE = 9
    ABORTED = 10
    SUPERSEDED = 11
    LOST = 12


class InstalledState(enum.IntEnum):
    """What lies in a worker's memory."""

    # What the engine loaded by itself.
    ORIGINAL = 0
    # Exactly one update.
    INSTALLED = 1
    # A mix: an update whose writing began and did not end.
    WRITING = 2
    # The engine dropped its weights.
    NOTHING = 3


E = TypeVar("E", bound=enum.IntEnum)


def pick(kind: Type[E], value: Union[E, str, int, None]) -> int:
    """The number of `value`; 0, the default, for None."""
    if value is None:
        return 0
    try:
        return kind[value.upper()] if isinstance(value, str) else kind(value)
    except (KeyError, ValueError):
        names = ", ".join(member.name.lower() for member in kind)
        raise invalid(
            "OPTION_UNKNOWN", f"{value!r} is no {kind.__name__}; it is one of {names}."
        ) from None
