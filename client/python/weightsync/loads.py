"""Tensors that an engine takes over one by one: what is read for it, and when its memory is used again."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import mmap
import sys
import time
import warnings
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy

from . import _capi, names as name_rules, tensors
from .errors import DeadlineExceededError, WeightsyncError

_ALIGNMENT = 64
_UINTS = {1: numpy.uint8, 2: numpy.uint16, 4: numpy.uint32, 8: numpy.uint64}

# What waits for a result, or for what it is a promise of.
Wait = Callable[[Any, float], Any]


@dataclasses.dataclass
class _Target:
    """A tensor of the engine. It comes in pieces where a rule splits it."""

    part: tensors.Part
    # In the addresses of Loads.parts.
    start: int
    # Which registered tensors they are, where each lies in this one, and the bytes that it spans.
    pieces: List[Tuple[int, int, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Wanted:
    """What _capi.tensors takes: a tensor without memory."""

    name: str
    dtype: int
    shape: Tuple[int, ...]
    offset: Optional[Tuple[int, ...]]
    extent: Optional[Tuple[int, ...]]
    strides: Optional[Tuple[int, ...]]
    component: str
    address: Optional[int] = None
    on_gpu: bool = False


class Loads:
    """Reads the tensors of an update for `load`, or for `load_weights` as it asks for them.

    `load(part, view)` may return a promise. No more than `buffer_bytes` of tensors are on their way at once
    (one, where one is larger). Memory is used again when nobody refers to it any more.
    """

    def __init__(
        self,
        wanted: Sequence[tensors.Part],
        views: str,
        load: Callable[[tensors.Part, Any], Any],
        load_weights: Optional[Callable[[Iterator[Tuple[str, Any]]], Any]],
        buffer_bytes: int,
    ) -> None:
        self._views = views
        self._load = load
        self._load_weights = load_weights
        self._buffer_bytes = buffer_bytes
        self._targets: List[_Target] = []
        for part in wanted:
            self._targets.append(_Target(part, 0))
        # Of the update that comes: tensors whose pieces are not all there, and those to be taken as one.
        self._building: Dict[int, Tuple[numpy.ndarray, int]] = {}
        self._gathered: List[Tuple[int, numpy.ndarray]] = []
        self._done: List[numpy.ndarray] = []
        self._pending: Deque[Tuple[str, Any, numpy.ndarray]] = collections.deque()
        self._outstanding = 0
        # All that was made; what only this list refers to is used again.
        self._buffers: List[numpy.ndarray] = []

    # ---- What is registered ----

    def parts(self, names: Sequence[name_rules.Rule]) -> List[tensors.Part]:
        """The tensors by the model's names. Their arrays have addresses, and no memory."""
        sizes = [-(-target.part.size_bytes // _ALIGNMENT) * _ALIGNMENT for target in self._targets]
        space = mmap.mmap(-1, sum(sizes) + _ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
        memory = numpy.frombuffer(space, dtype=numpy.uint8)
        base = memory.__array_interface__["data"][0]
        at = 0
        found = []
        for target, size in zip(self._targets, sizes):
            part = target.part
            flat = memory[at : at + part.size_bytes]
            target.start = base + at
            # Of the type only the size matters here.
            array = flat.view(_UINTS[part.dtype.itemsize]).reshape(part.box_extent)
            found.append(dataclasses.replace(part, array=array))
            at += size
        return name_rules.apply(names, found)

    def registered(self, parts: Sequence[tensors.Part]) -> List[_Wanted]:
        """Of what parts() gave, what is registered, in this order."""
        starts = [target.start for target in self._targets]
        covered = [0] * len(starts)
        of = []
        for part in parts:
            index = bisect.bisect_right(starts, part.address) - 1
            covered[index] += part.size_bytes
            of.append(index)
        whole = [done == target.part.size_bytes for done, target in zip(covered, self._targets)]
        halves = [target.part.name for target, ok, done in zip(self._targets, whole, covered) if done and not ok]
        if halves:
            warnings.warn(
                f"Only parts of {len(halves)} tensors would be loaded ({', '.join(halves[:5])}…); they are left out.",
                name_rules.PatternWarning,
                stacklevel=4,
            )
        kept: List[_Wanted] = []
        for part, index in zip(parts, of):
            if not whole[index]:
                continue
            target = self._targets[index]
            target.pieces.append((len(kept), part.address - target.start, part.span_bytes()))
            kept.append(
                _Wanted(
                    part.name, int(part.dtype), part.shape, part.offset, part.extent, part.strides, part.component
                )
            )
        self._targets = [target for target, ok in zip(self._targets, whole) if ok]
        self._target_of = {piece[0]: i for i, target in enumerate(self._targets) for piece in target.pieces}
        return kept

    # ---- An update ----

    def take(self, given: Any, wait: Wait, timeout: float) -> None:
        """Some or all tensors of an update can be read (_capi.Take)."""
        deadline = time.monotonic() + timeout
        if given.first:
            self._begin(wait, deadline)
        available = given.tensors[: given.tensor_count]
        try:
            if self._load_weights is None:
                for index in self._complete(given.reader, available):
                    self._hand_over(index, wait, deadline)
                while given.last and self._pending:
                    self._settle(wait, deadline)
            elif given.first and given.last:
                self._wait(wait, deadline, "the weights", self._load_weights(self._each(given.reader, available)))
            else:
                self._gathered += [(i, self._done.pop()) for i in self._complete(given.reader, available)]
                if given.last:
                    self._wait(wait, deadline, "the weights", self._load_weights(self._all_gathered()))
        finally:
            if given.last:
                self._building.clear()
                self._gathered.clear()
                self._done.clear()
                self._buffers.clear()

    def _begin(self, wait: Wait, deadline: float) -> None:
        # Of an update that was given up: nothing of it may be written over the next one.
        while self._pending:
            try:
                self._settle(wait, deadline)
            except WeightsyncError as error:
                if error.reason == "LOAD_TIMEOUT":
                    raise
            except Exception:  # noqa: BLE001  whatever it was, it has ended
                pass
        self._building.clear()
        self._gathered.clear()

    def _complete(self, reader: int, available: Sequence[int]) -> Iterator[int]:
        """Reads what is there. The tensors that have all of their pieces now; each is in `_done` then."""
        here = set(available)
        if len(here) == sum(len(target.pieces) for target in self._targets):
            order: Sequence[int] = range(len(self._targets))
        else:
            order = sorted({self._target_of[piece] for piece in here})
        for index in order:
            target = self._targets[index]
            buffer, lacking = self._building.pop(index, (None, len(target.pieces)))
            if buffer is None:
                buffer = self._memory(target.part.size_bytes)
            at = buffer.__array_interface__["data"][0]
            for piece, offset, size in target.pieces:
                if piece in here:
                    _capi.check("reader_read", reader, piece, at + offset, size)
                    lacking -= 1
            if lacking:
                self._building[index] = (buffer, lacking)
            else:
                self._done.append(buffer)
            # Whoever refers to it keeps it from being used again.
            del buffer
            if not lacking:
                yield index

    def _each(self, reader: int, available: Sequence[int]) -> Iterator[Tuple[str, Any]]:
        for index in self._complete(reader, available):
            yield self._targets[index].part.name, self._view(index, self._done.pop())

    def _all_gathered(self) -> Iterator[Tuple[str, Any]]:
        self._gathered.sort(key=lambda entry: -entry[0])
        while self._gathered:
            index, buffer = self._gathered.pop()
            yield self._targets[index].part.name, self._view(index, buffer)

    def _hand_over(self, index: int, wait: Wait, deadline: float) -> None:
        buffer = self._done.pop()
        while self._pending and self._outstanding + buffer.size > self._buffer_bytes:
            self._settle(wait, deadline)
        part = self._targets[index].part
        result = self._load(part, self._view(index, buffer))
        if result is not None:
            self._pending.append((part.name, result, buffer))
            self._outstanding += buffer.size

    def _settle(self, wait: Wait, deadline: float) -> None:
        """Waits for the oldest that was handed over."""
        name, result, buffer = self._pending.popleft()
        self._outstanding -= buffer.size
        self._wait(wait, deadline, name, result)

    @staticmethod
    def _wait(wait: Wait, deadline: float, name: str, result: Any) -> None:
        start = time.monotonic()
        try:
            wait(result, max(deadline - start, 0.0))
        except DeadlineExceededError as error:
            if error.reason != "HOOK_TIMEOUT":
                raise  # the engine's own
            raise DeadlineExceededError(
                "LOAD_TIMEOUT", f"The engine has not taken {name} in the time that loading has."
            ) from None

    # ---- Memory ----

    def _memory(self, size: int) -> numpy.ndarray:
        # The list and the argument: nobody else has it, or a view of it.
        free = [i for i in range(len(self._buffers)) if sys.getrefcount(self._buffers[i]) <= 2]
        fitting = [i for i in free if size <= self._buffers[i].size <= 2 * size]
        if fitting:
            return self._buffers[min(fitting, key=lambda i: self._buffers[i].size)]
        # Another is made: what is too small or far too large for this one is not kept beside it.
        for i in reversed(free):
            del self._buffers[i]
        self._buffers.append(numpy.empty(size, dtype=numpy.uint8))
        return self._buffers[-1]

    def _view(self, index: int, buffer: numpy.ndarray) -> Any:
        part = self._targets[index].part
        flat = buffer[: part.size_bytes]
        if self._views == "torch":
            import torch

            return torch.from_numpy(flat).view(tensors.torch_dtype(part.dtype)).view(part.box_extent)
        return flat.view(tensors.numpy_dtype(part.dtype)).reshape(part.box_extent)
