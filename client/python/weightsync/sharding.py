"""Which part of a parameter a shard is: boxes from DTensor placements and from FSDP's flat runs.

Pure functions of numbers: no torch here. A box is (offset, extent) in the whole tensor, and comes with
where the same elements lie in the local tensor.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import List, Optional, Sequence, Tuple

from .errors import UnimplementedError, invalid

# A stretch of indices of one dimension: first, length.
Run = Tuple[int, int]


@dataclasses.dataclass(frozen=True)
class LocalBox:
    """A box of the whole tensor, and where it begins in the local one (its extent is the same)."""

    offset: Tuple[int, ...]
    extent: Tuple[int, ...]
    local_offset: Tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """One dimension of a mesh: how a tensor is laid over it.

    kind: "shard", "replicate" or "strided" (torch's _StridedShard: `dim` was cut into `split_factor`
    pieces before, by mesh dimensions to the right of this one).
    """

    kind: str
    dim: int = 0
    split_factor: int = 1


def chunk(length: int, parts: int, index: int) -> Run:
    """The index-th of `parts` chunks as torch.chunk makes them: the last ones short, or empty."""
    size = -(-length // parts)
    begin = min(index * size, length)
    return begin, min(size, length - begin)


def _take(runs: List[Run], begin: int, length: int) -> List[Run]:
    """Elements begin, …, begin + length - 1 of what the runs are, one after the other."""
    taken: List[Run] = []
    for first, count in runs:
        start = max(begin, 0)
        stop = min(begin + length, count)
        if start < stop:
            # Neighbours grow together.
            if taken and taken[-1][0] + taken[-1][1] == first + start:
                taken[-1] = (taken[-1][0], taken[-1][1] + stop - start)
            else:
                taken.append((first + start, stop - start))
        begin -= count
    return taken


def _total(runs: List[Run]) -> int:
    return sum(count for _, count in runs)


def _dim_runs(
    length: int, cuts: Sequence[Tuple[Placement, int, int]]
) -> List[Run]:
    """Which indices of one dimension a rank holds, in local order; `cuts`: placement, size, coordinate."""
    runs: List[Run] = [(0, length)]
    done = [False] * len(cuts)
    for i, (placement, size, index) in enumerate(cuts):
        if done[i]:
            continue
        if placement.kind == "strided":
            later = [j for j in range(i + 1, len(cuts)) if not done[j]]
            factor = math.prod(cuts[j][1] for j in later)
            if placement.split_factor == factor and all(cuts[j][0].kind == "shard" for j in later):
                # FSDP over TP: the later mesh dimensions cut first, in their order. For lengths that
                # do not divide only this order is what FSDP did.
                for j in later:
                    done[j] = True
                    runs = _take(runs, *chunk(_total(runs), cuts[j][1], cuts[j][2]))
                runs = _take(runs, *chunk(_total(runs), size, index))
            else:
                whole = _total(runs)
                pieces: List[Run] = []
                for piece in range(placement.split_factor):
                    begin, count = chunk(whole, placement.split_factor, piece)
                    at, taken = chunk(count, size, index)
                    pieces += _take(runs, begin + at, taken)
                runs = pieces
        else:
            runs = _take(runs, *chunk(_total(runs), size, index))
        done[i] = True
    return runs


def placement_boxes(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Optional[Sequence[int]],
    placements: Sequence[Placement],
) -> List[LocalBox]:
    """The boxes that the rank at `coordinate` holds; none when it is outside the mesh or got nothing."""
    if coordinate is None:
        return []
    runs_of: List[List[Run]] = []
    for dim, length in enumerate(shape):
        cuts = [
            (placement, mesh_shape[i], coordinate[i])
            for i, placement in enumerate(placements)
            if placement.kind != "replicate" and placement.dim % max(len(shape), 1) == dim
        ]
        runs_of.append(_dim_runs(length, cuts))
    located = []
    for runs in runs_of:
        at, found = 0, []
        for first, count in runs:
            found.append((first, count, at))
            at += count
        located.append(found)
    return [
        LocalBox(
            tuple(first for first, _, _ in choice),
            tuple(count for _, count, _ in choice),
            tuple(at for _, _, at in choice),
        )
        for choice in itertools.product(*located)
    ]


def flat_boxes(shape: Sequence[int], begin: int, length: int) -> List[Tuple[Tuple[int, ...], Tuple[int, ...], int]]:
    """Elements begin, …, begin + length - 1 of a tensor's row-major order as boxes (FSDP1's flat shards).

    Returns (offset, extent, position in the run); each box is one stretch of the run.
    """
    if length <= 0:
        return []
    if not shape:
        return [((), (), 0)]
    if begin < 0 or begin + length > math.prod(shape):
        raise invalid("BOX_OUT_OF_RANGE", f"elements {begin} to {begin + length} of the shape {tuple(shape)}")
    row = math.prod(shape[1:])
    found: List[Tuple[Tuple[int, ...], Tuple[int, ...], int]] = []
    at = 0
    while at < length:
        first, within = divmod(begin + at, row)
        left = length - at
        if within == 0 and left >= row:
            rows = left // row
            found.append(((first, *[0] * (len(shape) - 1)), (rows, *shape[1:]), at))
            at += rows * row
        else:
            part = min(left, row - within)
            for offset, extent, position in flat_boxes(shape[1:], within, part):
                found.append(((first, *offset), (1, *extent), at + position))
            at += part
    return found


def refuse_partial(name: str) -> None:
    raise UnimplementedError(
        "PARTIAL_PLACEMENT",
        f"{name}: its placement is Partial: every rank holds a summand, and nobody the value. "
        "Redistribute it (to Shard or Replicate) before publishing.",
    )
