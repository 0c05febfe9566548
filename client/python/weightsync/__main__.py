"""Shows what rules make of a trainer's names, and what is left over on either side.

  python -m weightsync names TRAINER ENGINE [--rules RULES.json] [--address ADDRESS] [--json]

TRAINER and ENGINE are each a safetensors file, a model.safetensors.index.json (its files beside it), or
"models/NAME": what a daemon knows of that model. RULES.json is a list of rules, in their order:

  [{"rename": ["^transformer\\.h\\.", "model.layers."]},
   {"drop": "inv_freq$"},
   {"split": {"pattern": "qkv_proj", "names": ["q_proj", "k_proj", "v_proj"], "sizes": [4096, 1024, 1024]}},
   {"split_qkv": {"pattern": "qkv_proj", "heads": 32, "kv_heads": 8, "head_dim": 128}},
   {"split_gate_up": "gate_up_proj"},
   {"fuse": {"pattern": "(gate|up)_proj", "parts": ["gate", "up"], "name": "gate_up_proj", "sizes": [8, 8]}}]

`weightsyncctl names` does the same without Python. Prints old and new name of every tensor, then names that only one side has and those whose shape or type differs.
Exit code: 0 when nothing is left over and nothing differs, 1 otherwise, 2 when something is wrong.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import struct
import sys
from typing import Any, Dict, List, Optional, Tuple

import numpy

from . import names
from .admin import Admin
from .enums import DType
from .errors import WeightsyncError, invalid
from .tensors import Part

# A header is at most this long in any reader of the format.
_LONGEST_HEADER = 100_000_000

Entry = Tuple[Tuple[int, ...], DType]


def read_header(path: pathlib.Path) -> Dict[str, Entry]:
    """name -> (shape, type) of a safetensors file; its data is not read."""
    with open(path, "rb") as file:
        first = file.read(8)
        size = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= size <= min(_LONGEST_HEADER, path.stat().st_size - 8):
            raise invalid("FILE_INVALID", f"{path} is no safetensors file.")
        try:
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            # In the order of their data; what has no elements is not moved.
            ordered = sorted(header.items(), key=lambda item: (*item[1]["data_offsets"], item[0]))
            return {
                name: (tuple(entry["shape"]), DType["F8_E4M3" if entry["dtype"] == "F8_E4M3FN" else entry["dtype"]])
                for name, entry in ordered
                if 0 not in entry["shape"]
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise invalid("FILE_INVALID", f"{path}: its header cannot be read ({error!r}).") from None


def read(source: str, address: Optional[str]) -> Dict[str, Entry]:
    if source.startswith("models/"):
        with Admin(address) as admin:
            found = admin.call("GetModel", name=source).parameters
            return {p.name: (tuple(p.shape), DType(p.dtype)) for p in found}
    path = pathlib.Path(source)
    if path.suffix != ".json":
        return read_header(path)
    files = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    merged: Dict[str, Entry] = {}
    for name in files:
        if pathlib.PurePath(name).name != name:
            raise invalid("FILE_INVALID", f"{path} names {name!r}, which does not lie beside it.")
        merged.update(read_header(path.parent / name))
    return merged


# Kind of rule -> what makes it, and the kinds of what it takes, in their order.
_KINDS: Dict[str, Tuple[Any, Dict[str, str]]] = {
    "rename": (names.Rename, dict(pattern="text", replacement="text")),
    "drop": (names.Drop, dict(pattern="text")),
    "split": (names.Split, dict(pattern="text", names="texts", sizes="numbers", groups="number", dim="number")),
    "split_qkv": (
        names.split_qkv,
        dict(pattern="text", heads="number", kv_heads="number", head_dim="number", names="texts", interleaved="flag"),
    ),
    "split_gate_up": (names.split_gate_up, dict(pattern="text", names="texts")),
    "fuse": (
        names.Fuse,
        dict(pattern="text", parts="texts", name="text", sizes="numbers", groups="number", dim="number"),
    ),
}
_MOST = {"sizes": 1 << 31, "dim": 8}


def _is_number(value: Any, name: str) -> bool:
    return type(value) is int and abs(value) <= _MOST.get(name, 1 << 20)


def _fits(value: Any, kind: str, name: str) -> bool:
    if kind == "texts":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind == "numbers":
        return isinstance(value, list) and all(_is_number(item, name) for item in value)
    if kind == "number":
        return _is_number(value, name)
    return isinstance(value, bool if kind == "flag" else str)


def make_rule(entry: Any) -> names.Rule:
    """A rule of its JSON."""
    if not isinstance(entry, dict) or len(entry) != 1 or next(iter(entry)) not in _KINDS:
        raise invalid("PATTERN_INVALID", f"{entry!r} is no rule: one of {', '.join(_KINDS)} and what it takes.")
    kind, given = next(iter(entry.items()))
    make, takes = _KINDS[kind]
    if not isinstance(given, dict):
        listed = given if isinstance(given, list) else [given]
        if len(listed) > len(takes):
            raise invalid("PATTERN_INVALID", f"{entry!r} is no rule: it takes {', '.join(takes)}.")
        given = dict(zip(takes, listed))
    for name, value in given.items():
        if name not in takes or not _fits(value, takes[name], name):
            raise invalid("PATTERN_INVALID", f"{entry!r} is no rule: {name} cannot be {value!r}.")
    try:
        return make(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    except TypeError as error:
        raise invalid("PATTERN_INVALID", f"{entry!r}: {error}.") from None


def compare(ours: Dict[str, Entry], theirs: Dict[str, Entry], rules: List[names.Rule]) -> Dict[str, Any]:
    """The mapping, and what does not fit."""
    mapping: List[Tuple[str, str]] = []
    shapes: Dict[str, Entry] = {}
    parts = []
    for name, (shape, dtype) in ours.items():
        # A view of one byte: only shapes matter. The component says where a part came from.
        array = numpy.broadcast_to(numpy.uint8(0), shape)
        parts.append(Part(name, dtype, shape, None, None, array, component=name))
    for part in names.apply(rules, parts):
        if (part.component, part.name) not in mapping:
            mapping.append((part.component, part.name))
        shapes[part.name] = (part.shape, part.dtype)
    gone = [name for name in ours if name not in {old for old, _ in mapping}]
    left, right = names.leftovers(list(shapes), list(theirs))
    differ = [
        f"{name}: {shapes[name][1].name} {list(shapes[name][0])} and {theirs[name][1].name} {list(theirs[name][0])}"
        for name in sorted(shapes)
        if name in theirs and shapes[name] != theirs[name]
    ]
    return dict(mapping=mapping, dropped=gone, only_trainer=left, only_engine=right, differ=differ)


def render(found: Dict[str, Any]) -> str:
    """For people."""
    width = max((len(old) for old, _ in found["mapping"]), default=0)
    text = "".join(f"{old.ljust(width)}  {new if new != old else '='}\n" for old, new in found["mapping"])
    for title, key in (
        ("dropped by a rule", "dropped"),
        ("only the trainer has", "only_trainer"),
        ("only the engine has", "only_engine"),
        ("differ in shape or type (trainer and engine)", "differ"),
    ):
        if found[key]:
            text += f"\n{title}: {len(found[key])}\n" + "".join(f"  {line}\n" for line in found[key])
    return text


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m weightsync", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["names"])
    parser.add_argument("trainer")
    parser.add_argument("engine")
    parser.add_argument("--rules")
    parser.add_argument("--address")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        rules: List[names.Rule] = []
        if arguments.rules:
            listed = json.loads(pathlib.Path(arguments.rules).read_text())
            if not isinstance(listed, list):
                raise invalid("PATTERN_INVALID", f"{arguments.rules} is no JSON list of rules.")
            rules = [make_rule(entry) for entry in listed]
        found = compare(read(arguments.trainer, arguments.address), read(arguments.engine, arguments.address), rules)
    except (WeightsyncError, OSError, ValueError, KeyError) as error:
        print(f"weightsync names: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=2) if arguments.json else render(found), end="\n" if arguments.json else "")
    return 1 if found["only_trainer"] or found["only_engine"] or found["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
