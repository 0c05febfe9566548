"""weightsync: moves a model's weights from the programs that train it to the programs that serve it.

Trainer offers versions; Worker (and Replica, for engines of several workers) receives them; Admin looks at
a cluster. weightsync.names has rules for parameter names; weightsync.vllm and weightsync.sglang are adapters.
All of them talk to the daemon of their machine, weightsyncd. Errors are WeightsyncError: `reason` is a word
that programs can test, the message a sentence that says what to do.
"""

from . import names
from ._capi import random_id
from .admin import Admin
from .enums import (
    DeliveryPolicy,
    DType,
    InstalledState,
    OnStraggler,
    PauseMode,
    PublishMode,
    State,
    TransferMedium,
    TransferPolicy,
    UpdateMode,
)
from .errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    Code,
    DataLossError,
    DeadlineExceededError,
    DiskFullError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    MemoryExhaustedError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    StorageError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    UnknownError,
    WeightsyncError,
)
from .gate import Gate, GatePart
from .tensors import Component, Shard
from .trainer import Progress, Publication, Result, Trainer
from .worker import Applied, Installed, PauseRequest, Replica, ResumeInfo, Worker

__version__ = "0.1.0"


def set_log_level(level: int) -> None:
    """What the library writes to stderr: 0 all, 1 warnings, 2 errors (the default), 3 next to nothing."""
    from . import _capi

    _capi.call("set_log_level", level)


__all__ = [
    "AbortedError",
    "Admin",
    "AlreadyExistsError",
    "Applied",
    "CancelledError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "Code",
    "Component",
    "DType",
    "DataLossError",
    "DeadlineExceededError",
    "DeliveryPolicy",
    "DiskFullError",
    "FailedPreconditionError",
    "Gate",
    "GatePart",
    "Installed",
    "InstalledState",
    "InternalError",
    "InvalidArgumentError",
    "MemoryExhaustedError",
    "NotFoundError",
    "OnStraggler",
    "OutOfRangeError",
    "PauseMode",
    "PauseRequest",
    "PermissionDeniedError",
    "Progress",
    "Publication",
    "PublishMode",
    "Replica",
    "ResourceExhaustedError",
    "Result",
    "ResumeInfo",
    "Shard",
    "State",
    "StorageError",
    "Trainer",
    "TransferMedium",
    "TransferPolicy",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
    "UpdateMode",
    "WeightsyncError",
    "Worker",
    "names",
    "random_id",
    "set_log_level",
]
