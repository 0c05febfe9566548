"""Tensors that an engine takes over one by one: what is read for it, and when its memory is used again."""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import mmap
import sys
import threading
import time
import warnings
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import numpy

from . import _capi, names as name_rules, tensors
from ._waiting import Loop, Promise
from .errors import DeadlineExceededError, FailedPreconditionError

_ALIGNMENT = 64
_UINTS = {1: numpy.uint8, 2: numpy.uint16, 4: numpy.uint32, 8: numpy.uint64}


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


class _Reader:
    """What the library reads tensors from while it waits for take(); a loader of another thread may ask later."""

    def __init__(self, handle: int) -> None:
        self._handle: Optional[int] = handle
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """It is not closed within; LOAD_ENDED when it is."""
        with self._lock:
            if self._handle is None:
                raise FailedPreconditionError(
                    "LOAD_ENDED",
                    "The update that these weights are of was given up (LOAD_TIMEOUT, for one); nothing more of it "
                    "can be read.",
                )
            yield

    def read(self, tensor: int, address: int, size: int) -> None:
        _capi.check("reader_read", self._handle, tensor, address, size)

    def close(self) -> None:
        with self._lock:
            self._handle = None


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
        # Handed over, and not known to be taken; also of an update that was given up.
        self._pending: Deque[Tuple[str, Promise, numpy.ndarray]] = collections.deque()
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

    def take(self, given: Any, hooks: Loop, timeout: float) -> None:
        """Some or all tensors of an update can be read (_capi.Take)."""
        deadline = time.monotonic() + timeout
        if given.first:
            self._begin(deadline)
        available = given.tensors[: given.tensor_count]
        reader = _Reader(given.reader)
        try:
            if self._load_weights is None:
                for index, whole in self._complete(reader, available):
                    self._hand_over(index, whole.pop(), hooks, deadline)
                while given.last and self._pending:
                    self._settle(deadline)
            elif given.first and given.last:
                self._load_all(self._complete(reader, available), hooks, deadline)
            else:
                self._gathered += [(index, whole.pop()) for index, whole in self._complete(reader, available)]
                if given.last:
                    self._load_all(self._all_gathered(reader), hooks, deadline)
        finally:
            reader.close()
            if given.last:
                self._building.clear()
                self._gathered.clear()
                self._buffers.clear()

    def _begin(self, deadline: float) -> None:
        # Of an update that was given up: nothing of it may be written over the next one.
        for _, promise, _ in self._pending:
            promise.forget()
        while self._pending:
            name, promise, _ = self._pending[0]
            try:
                self._settle(deadline)
            except Exception:  # noqa: BLE001  whatever it was, it may have ended
                if self._pending and self._pending[0][1] is promise:
                    raise DeadlineExceededError(
                        "LOAD_TIMEOUT",
                        f"The engine is still taking {name} of an update that was given up; the next one waits for "
                        "that.",
                    ) from None
        self._building.clear()
        self._gathered.clear()

    def _complete(self, reader: "_Reader", available: Sequence[int]) -> Iterator[Tuple[int, List[numpy.ndarray]]]:
        """Reads what is there: the tensors that have all of their pieces now, each with a list of its memory.

        Whoever refers to that memory keeps it from being used again: it is to be popped from the list.
        """
        here = set(available)
        if len(here) == sum(len(target.pieces) for target in self._targets):
            order: Sequence[int] = range(len(self._targets))
        else:
            order = sorted({self._target_of[piece] for piece in here})
        for index in order:
            with reader.open():
                whole = self._read(reader, index, here)
            if whole:
                yield index, whole

    def _read(self, reader: "_Reader", index: int, here: Set[int]) -> List[numpy.ndarray]:
        target = self._targets[index]
        buffer, lacking = self._building.pop(index, (None, len(target.pieces)))
        if buffer is None:
            buffer = self._memory(target.part.size_bytes)
        at = buffer.__array_interface__["data"][0]
        for piece, offset, size in target.pieces:
            if piece in here:
                reader.read(piece, at + offset, size)
                lacking -= 1
        if not lacking:
            return [buffer]
        self._building[index] = (buffer, lacking)
        return []

    def _all_gathered(self, reader: "_Reader") -> Iterator[Tuple[int, List[numpy.ndarray]]]:
        self._gathered.sort(key=lambda entry: -entry[0])
        while True:
            with reader.open():
                if not self._gathered:
                    return
                index, buffer = self._gathered.pop()
            whole = [buffer]
            del buffer
            yield index, whole

    def _load_all(self, given: Iterator[Tuple[int, List[numpy.ndarray]]], hooks: Loop, deadline: float) -> None:
        assert self._load_weights is not None
        asked = 0

        def pairs() -> Iterator[Tuple[str, Any]]:
            nonlocal asked
            for index, whole in given:
                asked += 1
                yield self._targets[index].part.name, self._view(index, whole.pop())

        promise = hooks.promise(self._load_weights(pairs()))
        self._pending.append(("the weights", promise, numpy.empty(0, dtype=numpy.uint8)))
        self._settle(deadline)
        if asked < len(self._targets):
            raise FailedPreconditionError(
                "LOAD_INCOMPLETE",
                f"load_weights returned after {asked} of {len(self._targets)} tensors, without "
                f"{self._targets[asked].part.name}: it must take every pair that it is given (it may ignore what it "
                "does not need).",
            )

    def _hand_over(self, index: int, buffer: numpy.ndarray, hooks: Loop, deadline: float) -> None:
        while self._pending and self._outstanding + buffer.size > self._buffer_bytes:
            self._settle(deadline)
        part = self._targets[index].part
        result = self._load(part, self._view(index, buffer))
        if result is not None:
            self._pending.append((part.name, hooks.promise(result), buffer))
            self._outstanding += buffer.size

    def _settle(self, deadline: float) -> None:
        """Waits for the oldest that was handed over. What does not end in time stays: it may still be copying."""
        name, promise, buffer = self._pending[0]
        try:
            promise.wait(max(deadline - time.monotonic(), 0.0))
        except DeadlineExceededError as error:
            if error.reason != "HOOK_TIMEOUT":
                raise  # the engine's own
            raise DeadlineExceededError(
                "LOAD_TIMEOUT", f"The engine has not taken {name} in the time that loading has."
            ) from None
        finally:
            if promise.done():
                self._pending.popleft()
                self._outstanding -= buffer.size

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
