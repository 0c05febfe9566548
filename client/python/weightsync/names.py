r"""Names: from those of the trainer to those of the engine (mostly Hugging Face's).

A list of rules, applied in order, each to what the one before it left:

    rules = [
        Rename(r"^transformer\.h\.(\d+)\.", r"model.layers.\1."),
        Drop(r"\.rotary_emb\.inv_freq$"),
        split_qkv(r"\.qkv_proj\.", heads=32, kv_heads=8, head_dim=128),
        split_gate_up(r"\.gate_up_proj\."),
    ]
    trainer.register(module, names=rules)

Patterns are of RE2 (no look-around, no back references in the pattern; `\w` is of ASCII), searched anywhere in the name;
`\1` to `\9` in a replacement are the pattern's groups, `\\` is a backslash. `weightsyncctl names` reads the same
rules (client/ctl/mapping.h; client/ctl/testdata/names_cases.json holds the two together). Each rule is checked when tensors are registered:
one that matches nothing is an error (RULE_UNUSED), as are two tensors that end with one name
(DUPLICATE_NAME) and a tensor that cannot be split as it says (SPLIT_INVALID).

Nothing is copied: a split gives views, of the part of the tensor that this rank holds.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Dict, List, Sequence, Tuple, Union

from ._patterns import compile_pattern
from .errors import invalid
from .tensors import Part


class PatternWarning(UserWarning):
    """Something about names that may be meant so."""


def _check_template(pattern: str, text: str) -> None:
    """`text` takes the place of a match: \\1 to \\9, \\\\, and nothing else behind a backslash."""
    groups = compile_pattern(pattern).groups
    for escaped in re.findall(r"\\(.?)", text, re.DOTALL):
        if escaped == "\\":
            continue
        if not escaped or escaped not in "123456789":
            raise invalid("PATTERN_INVALID", f"{text!r}: a backslash stands before a group, 1 to 9, or another one.")
        if int(escaped) > groups:
            raise invalid("PATTERN_INVALID", f"{text!r}: {pattern!r} has no group {escaped}.")


def _expand(text: str, match: "re.Match[str]") -> str:
    return re.sub(r"\\(.)", lambda m: m[1] if m[1] == "\\" else match[int(m[1])] or "", text, flags=re.DOTALL)


def _substitute(pattern: "re.Pattern[str]", text: str, name: str) -> str:
    """Every match. Written out, so that both languages agree about empty ones."""
    out = ""
    at = 0
    while at <= len(name):
        match = pattern.search(name, at)
        if match is None:
            break
        out += name[at : match.start()] + _expand(text, match)
        at = match.end()
        if match.start() == match.end():
            out += name[at : at + 1]
            at += 1
    return out + name[at:]


@dataclasses.dataclass(frozen=True)
class Rename:
    """Replaces every match of `pattern` in a name."""

    pattern: str
    replacement: str

    def __post_init__(self) -> None:
        _check_template(self.pattern, self.replacement)


@dataclasses.dataclass(frozen=True)
class Drop:
    """Leaves tensors out whose name matches."""

    pattern: str

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows `start` to `start + length - 1` of the fused tensor are rows `at`, … of tensor `index`."""

    index: int
    start: int
    length: int
    at: int


@dataclasses.dataclass(frozen=True)
class Split:
    """One tensor whose name matches becomes several, along `dim`.

    `names` replace the match, each as in Rename. `sizes` are the rows of each in every one of `groups`
    equal groups of rows (Megatron's order for GQA: all that belongs to one key/value head lies together);
    with one group they lie one after the other. Empty: equal parts.
    """

    pattern: str
    names: Tuple[str, ...]
    sizes: Tuple[int, ...] = ()
    groups: int = 1
    dim: int = 0

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)
        for name in self.names:
            _check_template(self.pattern, name)
        if self.groups < 1 or not self.names or (self.sizes and len(self.sizes) != len(self.names)):
            raise invalid("SPLIT_INVALID", f"{self.pattern!r}: give each of {self.names} its rows.")
        if any(size < 1 for size in self.sizes):
            raise invalid("SPLIT_INVALID", f"{self.pattern!r}: sizes are at least 1.")

    def pieces(self, name: str, rows: int) -> Tuple[List[int], List[Piece]]:
        """The rows of each tensor that comes out, and what of the fused one is where."""
        sizes = self.sizes or tuple([rows // (len(self.names) * self.groups)] * len(self.names))
        if sum(sizes) * self.groups != rows:
            raise invalid(
                "SPLIT_INVALID",
                f"{name} has {rows} rows, and {self.groups} groups of {' + '.join(map(str, sizes))} rows are "
                f"{sum(sizes) * self.groups}.",
            )
        found = []
        start = 0
        for group in range(self.groups):
            for index, size in enumerate(sizes):
                found.append(Piece(index, start, size, group * size))
                start += size
        return [size * self.groups for size in sizes], found


def split_qkv(
    pattern: str = r"qkv_proj",
    heads: int = 0,
    kv_heads: int = 0,
    head_dim: int = 0,
    names: Tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
    interleaved: bool = False,
) -> Split:
    """Fused query, key and value, with fewer key/value heads than heads (GQA) or as many.

    interleaved: Megatron's order, in which each key/value head follows its query heads; else all queries,
    all keys, all values.
    """
    kv_heads = kv_heads or heads
    if heads < 1 or head_dim < 1 or kv_heads < 1 or heads % kv_heads:
        raise invalid("SPLIT_INVALID", f"{pattern!r}: {heads} heads of {head_dim} with {kv_heads} key/value heads.")
    if interleaved:
        sizes = (heads // kv_heads * head_dim, head_dim, head_dim)
        return Split(pattern, names, sizes, groups=kv_heads)
    return Split(pattern, names, (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim))


def split_gate_up(pattern: str = r"gate_up_proj", names: Tuple[str, str] = ("gate_proj", "up_proj")) -> Split:
    """The fused first matrix of a gated MLP: the gate's rows, then as many of the other."""
    return Split(pattern, names)


@dataclasses.dataclass(frozen=True)
class Fuse:
    r"""Several tensors become one: what Split takes apart, put together.

    `pattern` matches each of them, its first group says which: Fuse(r"\.(q|k|v)_proj\.", ("q", "k", "v"),
    r".qkv_proj.", sizes=…). `sizes` and `groups` as in Split; they must be given.
    """

    pattern: str
    parts: Tuple[str, ...]
    name: str
    sizes: Tuple[int, ...] = ()
    groups: int = 1
    dim: int = 0

    def __post_init__(self) -> None:
        if compile_pattern(self.pattern).groups < 1:
            raise invalid("PATTERN_INVALID", f"{self.pattern!r}: its first group says which part a tensor is.")
        _check_template(self.pattern, self.name)
        if self.groups < 1 or not self.parts or len(self.sizes) != len(self.parts):
            raise invalid("SPLIT_INVALID", f"{self.pattern!r}: give each of {self.parts} its rows.")
        if any(size < 1 for size in self.sizes):
            raise invalid("SPLIT_INVALID", f"{self.pattern!r}: sizes are at least 1.")


Rule = Union[Rename, Drop, Split, Fuse, Tuple[str, str]]


def apply(rules: Sequence[Rule], parts: Sequence[Part]) -> List[Part]:
    """The parts under their new names. See the module."""
    found = list(parts)
    for rule in rules:
        if isinstance(rule, tuple):
            rule = Rename(*rule)
        pattern = compile_pattern(rule.pattern)
        used = False
        after: List[Part] = []
        for part in found:
            if not pattern.search(part.name):
                after.append(part)
                continue
            used = True
            if isinstance(rule, Rename):
                after.append(dataclasses.replace(part, name=_substitute(pattern, rule.replacement, part.name)))
            elif isinstance(rule, Split):
                after += _split(rule, pattern, part)
            elif isinstance(rule, Fuse):
                after += _fuse(rule, pattern, part)
        if not used and found:
            raise invalid(
                "RULE_UNUSED",
                f"{rule}: no name matches; they are like {found[0].name}. Mend the pattern or leave it out.",
            )
        found = after
    _check_unique(parts, found)
    return found


def _check_unique(before: Sequence[Part], after: Sequence[Part]) -> None:
    """Parts of one name must be different boxes of one tensor."""
    shapes: Dict[str, Tuple[Tuple[int, ...], object]] = {}
    boxes = set()
    for part in after:
        known = shapes.setdefault(part.name, (part.shape, part.dtype))
        if known != (part.shape, part.dtype) or (part.name, part.offset) in boxes:
            raise invalid("DUPLICATE_NAME", f"{part.name}: two tensors end with this name.")
        boxes.add((part.name, part.offset))


def _split(rule: Split, pattern: "re.Pattern[str]", part: Part) -> List[Part]:
    dim = rule.dim
    if not -len(part.shape) <= dim < len(part.shape):
        raise invalid("SPLIT_INVALID", f"{part.name}: it has no dimension {dim}.")
    dim %= len(part.shape)
    rows, pieces = rule.pieces(part.name, part.shape[dim])
    box = part.offset or tuple([0] * len(part.shape))
    extent = part.box_extent
    found: List[Part] = []
    for piece in pieces:
        start = max(piece.start, box[dim])
        stop = min(piece.start + piece.length, box[dim] + extent[dim])
        if start >= stop:
            continue
        shape = _with(part.shape, dim, rows[piece.index])
        found.append(
            Part(
                _substitute(pattern, rule.names[piece.index], part.name),
                part.dtype,
                shape,
                _with(box, dim, piece.at + start - piece.start),
                _with(extent, dim, stop - start),
                part.narrowed(dim, start - box[dim], stop - start),
                part.component,
            )
        )
    return [_whole(p) for p in found]


def _fuse(rule: Fuse, pattern: "re.Pattern[str]", part: Part) -> List[Part]:
    match = pattern.search(part.name)
    assert match is not None
    if match.group(1) not in rule.parts:
        raise invalid("SPLIT_INVALID", f"{part.name}: {match.group(1)!r} is none of {rule.parts}.")
    index = rule.parts.index(match.group(1))
    dim = rule.dim % max(len(part.shape), 1)
    if not part.shape or part.shape[dim] != rule.sizes[index] * rule.groups:
        raise invalid(
            "SPLIT_INVALID",
            f"{part.name} is {part.shape}, and {rule.groups} groups of {rule.sizes[index]} rows are meant.",
        )
    total = sum(rule.sizes)
    before = sum(rule.sizes[:index])
    size = rule.sizes[index]
    box = part.offset or tuple([0] * len(part.shape))
    extent = part.box_extent
    name = part.name[: match.start()] + _expand(rule.name, match) + part.name[match.end() :]
    found: List[Part] = []
    for group in range(rule.groups):
        start = max(group * size, box[dim])
        stop = min((group + 1) * size, box[dim] + extent[dim])
        if start >= stop:
            continue
        at = group * total + before + start - group * size
        found.append(
            Part(
                name,
                part.dtype,
                _with(part.shape, dim, total * rule.groups),
                _with(box, dim, at),
                _with(extent, dim, stop - start),
                part.narrowed(dim, start - box[dim], stop - start),
                part.component,
            )
        )
    return found


def _with(values: Sequence[int], dim: int, value: int) -> Tuple[int, ...]:
    return tuple(value if d == dim else v for d, v in enumerate(values))


def _whole(part: Part) -> Part:
    if part.extent == part.shape:
        part.offset = part.extent = None
    return part


def leftovers(ours: Sequence[str], theirs: Sequence[str]) -> Tuple[List[str], List[str]]:
    """Names that only we have, and names that only they have."""
    return sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))


def warn(message: str) -> None:
    """Warns as of the caller's caller."""
    warnings.warn(message, PatternWarning, stacklevel=3)
