"""Every reason that weightsync has is an exception that Python programs know how to catch."""

import builtins
import pathlib
import pickle
import re

import pytest
import weightsync
from weightsync import errors

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

# MakeError(absl::StatusCode::kNotFound, "REASON", ErrorStatus(…), Fault(…): code and reason side by side.
CPP = re.compile(r'StatusCode::k(\w+),\s*"([A-Z][A-Z0-9_]+)"')
# "//   NOT_FOUND  REASON, REASON: …" of the protos' comments.
PROTO = re.compile(r"^\s*//\s+([A-Z_]+)  ([A-Z][A-Z0-9_]+(?:, [A-Z][A-Z0-9_]+)*)", re.MULTILINE)


def reasons():
    found = set()
    for room in ("client", "daemon", "schedule", "transport"):
        for path in (ROOT / room).rglob("*.cc"):
            if not path.name.endswith("_test.cc"):
                for code, reason in CPP.findall(path.read_text(encoding="utf-8")):
                    found.add((re.sub(r"(?<!^)([A-Z])", r"_\1", code).upper(), reason))
    for path in (ROOT / "proto/weightsync/v1").glob("*.proto"):
        for code, names in PROTO.findall(path.read_text(encoding="utf-8")):
            if code in errors.Code.__members__:
                found.update((code, reason) for reason in names.split(", "))
    return sorted(found)


def python_kinds(error):
    """What of Python's own it is, beside Exception."""
    return {
        kind
        for kind in type(error).__mro__
        if kind.__module__ == builtins.__name__ and kind not in (object, BaseException, Exception)
    }


def test_there_are_reasons():
    known = reasons()
    assert len(known) > 150
    assert ("DATA_LOSS", "SOURCE_MEMORY_LOST") in known and ("INVALID_ARGUMENT", "OPTION_UNKNOWN") in known
    assert {code for code, _ in known} <= set(errors.Code.__members__)


@pytest.mark.parametrize("code", [code for code in errors.Code if code], ids=lambda code: code.name)
def test_every_code_has_a_class(code):
    error = errors.make_error(int(code), "ANY", "What to do.")
    assert type(error).code == code and error.code == code
    assert python_kinds(error), f"{type(error).__name__} is nothing that Python knows"
    assert getattr(weightsync, type(error).__name__) is type(error), "it is not exported"


def test_every_reason_is_something_of_pythons():
    for code, reason in reasons():
        error = errors.make_error(int(errors.Code[code]), reason, "What to do.")
        assert python_kinds(error), f"{code} {reason}"
        assert error.reason == reason and error.code == errors.Code[code]
        assert str(error) == f"{reason}: What to do."
        assert getattr(weightsync, type(error).__name__) is type(error)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), again.reason, str(again)) == (type(error), reason, str(error))


@pytest.mark.parametrize(
    "code, reason, kind",
    [
        ("DATA_LOSS", "SOURCE_MEMORY_LOST", OSError),
        ("RESOURCE_EXHAUSTED", "DISK_FULL", OSError),
        ("RESOURCE_EXHAUSTED", "NO_STORE_ROOM", MemoryError),
        ("RESOURCE_EXHAUSTED", "PLAN_BUSY", RuntimeError),
        ("NOT_FOUND", "CHECKPOINT_NOT_FOUND", FileNotFoundError),
        ("NOT_FOUND", "MODEL_UNKNOWN", LookupError),
        ("ALREADY_EXISTS", "CHECKPOINT_EXISTS", FileExistsError),
        ("ALREADY_EXISTS", "RANK_TAKEN", RuntimeError),
        ("INTERNAL", "CHECKPOINT_IO", OSError),
        ("INTERNAL", "SLOT_MISSING", RuntimeError),
        ("FAILED_PRECONDITION", "CHECKPOINT_PATH_TAKEN", RuntimeError),
        ("INVALID_ARGUMENT", "NAME_INVALID", ValueError),
        ("DEADLINE_EXCEEDED", "WAIT_TIMEOUT", TimeoutError),
        ("UNAVAILABLE", "LEASE_LOST", ConnectionError),
        ("PERMISSION_DENIED", "FILE_DENIED", PermissionError),
        ("UNIMPLEMENTED", "CUDA_MEMORY", NotImplementedError),
    ],
)
def test_the_kind_that_fits(code, reason, kind):
    assert isinstance(errors.make_error(int(errors.Code[code]), reason, "What."), kind)


def test_an_update_that_was_given_up_is_aborted_whatever_the_reason():
    error = errors.make_error(int(errors.Code.ABORTED), "DISK_FULL", "It is full.")
    assert type(error) is weightsync.AbortedError and error.reason == "DISK_FULL"


def test_a_code_of_tomorrow():
    error = errors.make_error(99, "NEW", "What.")
    assert isinstance(error, weightsync.UnknownError) and error.code == errors.Code.UNKNOWN
