"""Every public callable of the package has a docstring, and every argument and result of it a type."""

import dataclasses
import enum
import importlib
import inspect

import pytest
import weightsync

MODULES = ["weightsync", "weightsync.names", "weightsync.sglang", "weightsync.vllm", "weightsync.vllm_transfer"]


def public(module):
    """(name, callable) of what a module offers, and of the public methods and properties of its classes."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    for name in names:
        value = getattr(module, name)
        if not callable(value) or not hasattr(value, "__module__"):
            continue
        # An alias of typing (names.Rule) is no callable of ours.
        if not inspect.isclass(value) and not inspect.isfunction(value):
            continue
        yield f"{module.__name__}.{name}", value
        if not inspect.isclass(value):
            continue
        for attribute, member in vars(value).items():
            if attribute.startswith("_") and attribute not in ("__init__", "__call__"):
                continue
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            if isinstance(member, property):
                member = member.fget
            if inspect.isfunction(member):
                yield f"{module.__name__}.{name}.{attribute}", member


ALL = sorted({name: value for module in MODULES for name, value in public(importlib.import_module(module))}.items())


def test_there_is_something_to_look_at():
    names = [name for name, _ in ALL]
    assert len(names) > 100
    for name in ("weightsync.Trainer.publish", "weightsync.Worker", "weightsync.names.Split.pieces"):
        assert name in names


@pytest.mark.parametrize("name, value", [pytest.param(*one, id=one[0]) for one in ALL])
def test_documented_and_typed(name, value):
    # What a class says stands for its __init__, and an enum's or exception's base says what a bare one is.
    if not name.endswith(".__init__"):
        said = value.__doc__ or ""
        if dataclasses.is_dataclass(value) and said.startswith(f"{value.__name__}("):
            said = ""  # made up by dataclasses
        assert said.strip(), f"{name} has no docstring"
    if inspect.isclass(value) or issubclass(type(value), enum.EnumMeta):
        return
    # Made by dataclasses or enum, with types or without any source.
    if value.__code__.co_filename == "<string>":
        return
    signature = inspect.signature(value)
    for parameter in signature.parameters.values():
        if parameter.name != "self" and parameter.name != "cls":
            assert parameter.annotation is not inspect.Parameter.empty, f"{name}: {parameter.name} has no type"
    assert signature.return_annotation is not inspect.Signature.empty, f"{name}: its result has no type"
