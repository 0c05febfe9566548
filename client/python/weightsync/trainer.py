"""The trainer's side: offers a model's weights as versions."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import threading
import time
import warnings
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple, Union

import numpy

from . import _capi, names as name_rules, tensors
from .enums import (
    DeliveryPolicy,
    OnStraggler,
    PauseMode,
    PublishMode,
    State,
    TransferMedium,
    TransferPolicy,
    UpdateMode,
    pick,
)
from .errors import FailedPreconditionError, UnimplementedError, WeightsyncError, invalid
from .shared import SharedMappings

_ALIGNMENT = 64


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where an update stands. Times are seconds; a phase that was not measured yet is missing."""

    version_name: str
    version: int
    update_id: str
    step: int
    state: State
    # Of the model; to cross the network for all receivers together, and of these moved so far.
    total_bytes: int
    wire_bytes: int
    moved_bytes: int
    # Replicas that had a part in it so far.
    replica_count: int
    transfer_policy: Optional[TransferPolicy]
    # "gather", "snapshot", "prepare", "transfer", "pause", "commit", "apply", "resume", "total".
    phases: Dict[str, float]
    # Why it was given up: reason and sentence.
    failure: Optional[Tuple[str, str]]
    # Replicas that run with it.
    serving_count: int
    # Known replicas that were not whole (away, or not all of their workers had come) when it began: they do
    # not serve it yet, and get it when they come. "models/{model}/replicas/{replica}".
    absent_replicas: Tuple[str, ...]
    # Who serves it and who does not yet, or what it is: a sentence, which str() gives.
    summary: str

    def __str__(self) -> str:
        return self.summary


@dataclasses.dataclass(frozen=True)
class Result(Progress):
    """How an update went, when every replica that had a part in it serves it, with what it cost this rank.

    str() says how many these are, and names those that do not serve it yet.
    """

    # How long publish() kept this rank from its work, and of that the daemon's copy of its tensors.
    stall_seconds: float = 0.0
    copy_seconds: float = 0.0
    # What was copied out for this rank.
    copied_bytes: int = 0

    @property
    def transfer_seconds(self) -> float:
        """Of the bytes between nodes."""
        return self.phases.get("transfer", 0.0)

    @property
    def pause_seconds(self) -> float:
        """From the first replica's pause to the last one's resume."""
        return sum(self.phases.get(phase, 0.0) for phase in ("pause", "commit", "apply", "resume"))

    @property
    def total_seconds(self) -> float:
        """From the first rank's publish to the last replica's resume."""
        return self.phases.get("total", 0.0)

    def as_dict(self) -> Dict[str, Any]:
        """For logs: plain values under the names of the fields."""
        return dataclasses.asdict(self)


def _progress_fields(found: _capi.Version) -> Dict[str, Any]:
    reason = _capi.text(found.failure_reason)
    return dict(
        version_name=_capi.text(found.version_name),
        version=found.version,
        update_id=_capi.text(found.update_id),
        step=found.step,
        state=State(found.state),
        total_bytes=found.total_bytes,
        wire_bytes=found.wire_bytes,
        moved_bytes=found.moved_bytes,
        replica_count=found.replica_count,
        transfer_policy=TransferPolicy(found.transfer_policy) if found.transfer_policy else None,
        phases={p: getattr(found, p) for p in _capi.PHASES if getattr(found, p) >= 0},
        failure=(reason, _capi.text(found.failure_message)) if reason else None,
        serving_count=found.serving_count,
        absent_replicas=tuple(_capi.text(found.absent_replicas).split()),
        summary=_capi.text(found.summary),
    )


class Publication:
    """A version that was offered. The tensors it was made of may be changed by now."""

    def __init__(self, handle: _capi.Handle, published: _capi.Published, stall: float) -> None:
        self._handle = handle
        self._published = published
        # "models/{model}/versions/{version}".
        self.version_name: str = _capi.text(published.version_name)
        self.version: int = published.version
        self.update_id: str = _capi.text(published.update_id)
        self.stall_seconds: float = stall
        self.copy_seconds: float = published.copy_duration
        self.copied_bytes: int = published.copied_bytes
        # Set by wait().
        self.result: Optional[Result] = None

    def wait(self, timeout: float = 600.0) -> Result:
        """Waits until every replica that had a part in it serves it; the result names those that do not yet.

        AbortedError with the update's own reason when it was given up; DeadlineExceededError
        (WAIT_TIMEOUT) while it goes on.
        """
        found = _capi.Version()
        self._handle.check("wait", ctypes.byref(self._published), timeout, ctypes.byref(found))
        self.result = Result(
            stall_seconds=self.stall_seconds,
            copy_seconds=self.copy_seconds,
            copied_bytes=self.copied_bytes,
            **_progress_fields(found),
        )
        return self.result

    def progress(self, timeout: float = 10.0) -> Progress:
        """Where it stands now, whatever its state."""
        found = _capi.Version()
        self._handle.check("progress", ctypes.byref(self._published), timeout, ctypes.byref(found))
        return Progress(**_progress_fields(found))

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.progress().state >= State.ACTIVE

    def __repr__(self) -> str:
        return f"<Publication {self.version_name} {self.update_id}>"


@dataclasses.dataclass
class _Shard:
    """What is registered for a part: where the daemon finds it."""

    name: str
    dtype: int
    shape: Tuple[int, ...]
    offset: Optional[Tuple[int, ...]]
    extent: Optional[Tuple[int, ...]]
    strides: Optional[Tuple[int, ...]]
    address: int
    component: str
    on_gpu: bool = False
    # How the elements lie there.
    held_dtype: int = 0
    # Where the part is copied before each publish; None when it lies where the daemon reads it.
    target: Optional[numpy.ndarray] = None
    # The same on the part's own GPU, where the daemon reads it: a tensor of the type in which it is moved.
    shadow: Any = None


@dataclasses.dataclass
class _Arena:
    array: numpy.ndarray
    address: int


def _copied(shard: _Shard, part: tensors.Part) -> bool:
    """Copies a part to where the daemon reads it, unless it lies there."""
    if shard.target is not None:
        tensors.copy_into(part, shard.target)
    elif shard.shadow is not None:
        shard.shadow.copy_(part.array)
    return shard.target is not None or shard.shadow is not None


class Trainer:
    """One rank of a trainer.

        trainer = weightsync.Trainer("policy", rank, world_size)
        trainer.register(model)                       # a module, a state_dict or (name, tensor) pairs
        for step in range(steps):
            train()
            update = trainer.publish(step=step)       # from here on the weights may be changed
        update.wait()

    Every rank does so, in its own process or thread; the i-th calls of publish() of all ranks make one
    version. publish() returns when this rank's tensors are copied out; it waits neither for other ranks nor
    for the transfer.

    Tensors: torch on the CPU (parameters of any strides, DTensors, FSDP modules of both versions, CPU-offloaded
    ones) and numpy; bf16 and fp8 of numpy with ml_dtypes. What lies in shared memory that the daemon can open
    is read from there: memory of this object (see `share`), POSIX shared memory that has its name, and memory
    without one of which this process has a descriptor open (what torch shares by default, memfds; the daemon
    opens it by way of /proc, so both must be in one pid namespace). The rest is copied, once a publish, into
    memory of this object, and cast on the way where `dtype` says so.

    CUDA tensors are read where they lie, by CUDA IPC, where the daemon runs with --memory=cuda; a publish waits
    for what this process has given their GPUs to do. What cannot be exported is refused by name
    (NOT_EXPORTABLE: expandable_segments), as is another kind of device (CUDA_MEMORY); `bounce` copies them
    through the host instead.

    Where `dtype` says so the daemon casts what it reads, with no copy here: fp32 to bf16 and fp16, and bf16
    matrices to fp8 (e4m3) with one fp32 scale for each block of 128 x 128 elements, in a tensor beside it that
    workers get by its name ("w_scale_inv" of "w"; w = fp8 x scale). Parts of such a matrix hold whole blocks
    (DTYPE_MISMATCH). All other pairs are cast by torch or numpy, without scales: CUDA tensors on their GPU,
    into memory there that stays as long as they are registered.

    Args:
      model: its name, 1 to 63 of [a-z0-9._-].
      rank, world_size: of this process or thread among the trainer's.
      address: of this machine's daemon: "host:port", "unix:/path" or "/path". None: where it is by default.
      dtype: in which type floating-point tensors are moved, for example torch.bfloat16 for fp32 masters;
        or a dict of names (of the engine) to types, for example torch.float8_e4m3fn for some matrices; or a
        function of the name.
      tied: "first": of names for one tensor only the first is moved; "keep": all of them, each by itself.
      bounce: copy tensors on GPUs through host memory, in this process.
      update: how versions travel, where publish() does not say it: "network", "disk" (by way of a checkpoint
        below the daemons' --checkpoint_root), "network_or_disk" (disk when no group can be made). None: what
        the coordinator's --update says.
      client: what the program calls itself, for people.

    Raises WeightsyncError: REGISTER_TIMEOUT when no daemon answers in `connect_timeout` seconds, RANK_TAKEN,
    PROTOCOL_UNSUPPORTED (the sentence says which versions are spoken), …

    A process that is forked must make its own. Thread-safe, but concurrent publishes have no order.
    """

    def __init__(
        self,
        model: str,
        rank: int = 0,
        world_size: int = 1,
        *,
        address: Optional[str] = None,
        dtype: tensors.Cast = None,
        tied: str = "first",
        bounce: bool = False,
        update: Union[TransferMedium, str, None] = None,
        client: str = "",
        connect_timeout: float = 20.0,
        reconnect: bool = True,
    ) -> None:
        if tied not in ("first", "keep"):
            raise invalid("OPTION_UNKNOWN", f"tied={tied!r} is neither 'first' nor 'keep'.")
        self.model = model
        self.rank = rank
        self.world_size = world_size
        self._dtype = dtype
        self._tied = tied
        self._bounce = bounce
        pick(TransferMedium, update)
        self._update = update
        self._lock = threading.Lock()
        self._weights: Any = None
        self._rules: Sequence[name_rules.Rule] = ()
        self._layout: Optional[List[Tuple[Any, ...]]] = None
        self._shards: List[_Shard] = []
        self._arenas: List[_Arena] = []
        # Where shared memory begins that the library was told of; whether some has no name, and may have none.
        self._named: Set[int] = set()
        self._files_named = False
        self._open_files = True
        # Of these, the ones that parts are copied into.
        self._copies: List[_Arena] = []
        # Where parts are cast on their GPUs, by what and where they are.
        self._shadows: Dict[Tuple[Any, ...], Any] = {}
        # Names that were left out because they are another name for a tensor.
        self.tied_names: Dict[str, str] = {}
        options = _capi.TrainerOptions(
            address=_capi.raw(address),
            model=model.encode(),
            rank=rank,
            world_size=world_size,
            client=f"python {client}".strip().encode(),
            connect_timeout=connect_timeout,
            no_reconnect=not reconnect,
        )
        self._handle = _capi.start("trainer", "open", ctypes.byref(options))

    # ---- Registering ----

    def register(
        self,
        weights: tensors.Weights,
        *,
        names: Sequence[name_rules.Rule] = (),
        share: bool = False,
        timeout: float = 120.0,
    ) -> None:
        """Says what this rank holds: a torch module, a state_dict, or pairs of name and tensor.

        names: rules from these names to the engine's; see weightsync.names.
        share: moves the tensors of a torch module into shared memory, in place (their storage changes, the
          parameters stay the same objects): then publish() copies nothing in this process. What is cast
          here (see `dtype`), sharded, not contiguous or not on the CPU is copied all the same.

        Types, shapes and boxes are checked against the other ranks and the workers that are there:
        CATALOG_MISMATCH, SHARDS_OVERLAP, DUPLICATE_NAME, …: the sentence names the parameter. May be called
        again, with another layout as well.
        """
        with self._lock:
            self._weights = weights = tensors.kept(weights)
            self._rules = tuple(names)
            if share:
                self._share(weights, timeout)
            self._register(self._parts(weights), timeout)

    def _parts(self, weights: tensors.Weights) -> List[tensors.Part]:
        parts = tensors.all_parts(weights)
        if self._tied == "first":
            parts, self.tied_names = tensors.drop_tied(parts)
        parts = name_rules.apply(self._rules, parts)
        tensors.cast(parts, self._dtype)
        for part in parts:
            if part.on_device() and not part.on_gpu and not self._bounce:
                raise UnimplementedError(
                    "CUDA_MEMORY",
                    f"{part.name} is on {part.array.device}, which is no kind of memory that can be read from "
                    "here: pass bounce=True to have it copied (and cast) through the host.",
                )
        return parts

    def _allocate(self, size: int, timeout: float) -> _Arena:
        """Memory that the daemon reads; alive as long as somebody has an array of it."""
        found = _capi.Arena()
        self._handle.check("allocate", size, timeout, ctypes.byref(found))
        buffer = (ctypes.c_char * size).from_address(found.data)
        buffer.owner = self._handle  # type: ignore[attr-defined]
        arena = _Arena(numpy.frombuffer(memoryview(buffer), dtype=numpy.uint8), found.data)
        self._arenas.append(arena)
        return arena

    def _in_arena_at(self, address: int, size: int) -> bool:
        return any(
            arena.address <= address and address + size <= arena.address + arena.array.size
            for arena in self._arenas
        )

    def _share(self, module: Any, timeout: float) -> None:
        """Gives the module's tensors storage in this object's memory."""
        torch = tensors.torch()
        if torch is None or not hasattr(module, "named_parameters"):
            raise invalid("SHARE_UNSUPPORTED", "share=True moves the tensors of a torch module; give the module.")
        owners: Dict[int, List[Any]] = {}
        for tensor in [*module.parameters(), *module.buffers()]:
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
            if plain and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
                owners.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        # What shares its storage with something else stays with it.
        moved = [tensors_of[0] for tensors_of in owners.values() if len(tensors_of) == 1]
        moved = [t for t in moved if not self._in_arena_at(t.data_ptr(), t.nbytes)]
        total = sum(_aligned(tensor.nbytes) for tensor in moved)
        if not total:
            return
        memory = self._allocate(total, timeout)
        at = 0
        for tensor in moved:
            place = torch.from_numpy(memory.array[at : at + tensor.nbytes])
            place = place.view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.data)
            tensor.data = place
            at += _aligned(tensor.nbytes)

    def _register(self, parts: List[tensors.Part], timeout: float) -> None:
        try:
            self._register_once(parts, timeout)
        except WeightsyncError as error:
            if not self._files_named or error.reason not in ("MEMORY_UNKNOWN", "MEMORY_DENIED"):
                raise
            # The daemon is of another user or does not see this process: what has a name or is copied works.
            warnings.warn(
                f"Shared memory without a name is copied at each publish: {error.message}",
                RuntimeWarning,
                stacklevel=4,
            )
            self._open_files = False
            self._register_once(parts, timeout)

    def _register_once(self, parts: List[tensors.Part], timeout: float) -> None:
        shared = SharedMappings(self._open_files)
        named_before, self._named = self._named, set()
        self._files_named = False
        shards: List[_Shard] = []
        copied: List[Tuple[_Shard, tensors.Part]] = []
        for part in parts:
            on_gpu = part.on_gpu and not self._bounce
            shadow = self._shadow(part) if on_gpu and not part.in_place() else None
            direct = part.in_place() and (on_gpu if part.on_device() else self._readable(part, shared))
            shard = _Shard(
                part.name,
                int(part.dtype),
                part.shape,
                part.offset,
                part.extent,
                part.strides if direct else None,
                part.address if direct else 0 if shadow is None else shadow.data_ptr(),
                part.component,
                on_gpu and (direct or shadow is not None),
                int(part.stored_dtype() if direct else part.dtype if shadow is not None else part.copied_dtype()),
                shadow=shadow,
            )
            shards.append(shard)
            if not direct and shadow is None:
                copied.append((shard, part))
        # What has no name would be kept alive for nothing.
        for start in named_before - self._named:
            self._handle.call("forget_shared_memory", start)
        self._place(copied, timeout)
        registered = _capi.Registered()
        self._handle.check(
            "register", _capi.tensors(shards), len(shards), timeout, ctypes.byref(registered)
        )
        self._shards = shards
        self._layout = [part.describe() for part in parts]
        # Those of another layout are closed everywhere now.
        used = {id(shard.shadow) for shard in shards}
        self._shadows = {key: shadow for key, shadow in self._shadows.items() if id(shadow) in used}

    def _shadow(self, part: tensors.Part) -> Any:
        """Memory on the part's GPU in which it is cast: that of the last registration if it is the same."""
        key = (str(part.array.device), *part.describe())
        if key not in self._shadows:
            self._shadows[key] = tensors.empty_like_moved(part)
        return self._shadows[key]

    def _readable(self, part: tensors.Part, shared: SharedMappings) -> bool:
        """Whether the daemon can read the part where it lies."""
        if self._in_arena_at(part.address, part.span_bytes()):
            return True
        found = shared.find(part.address, part.span_bytes())
        if found is None:
            return False
        if found.start not in self._named:
            memory = _capi.SharedMemory(
                name=found.name.encode() or None, fd=found.fd, data=found.start, size_bytes=found.size
            )
            self._handle.check("use_shared_memory", ctypes.byref(memory))
            self._named.add(found.start)
        self._files_named = self._files_named or not found.name
        return True

    def _place(self, copied: List[Tuple[_Shard, tensors.Part]], timeout: float) -> None:
        """Finds memory for the parts that are copied: that of the last registration if it is enough."""
        sizes = [math.prod(part.box_extent) * part.copied_dtype().itemsize for _, part in copied]
        total = sum(_aligned(size) for size in sizes)
        if not total:
            return
        arena = next((a for a in self._copies if a.array.size >= total), None)
        if arena is None:
            arena = self._allocate(total, timeout)
            self._copies.append(arena)
        at = 0
        for (shard, _), size in zip(copied, sizes):
            shard.address = arena.address + at
            shard.target = arena.array[at : at + size]
            at += _aligned(size)

    # ---- Publishing ----

    def publish(
        self,
        version: int = 0,
        tensors: Optional[tensors.Weights] = None,  # noqa: F811
        *,
        step: int = 0,
        update_mode: Union[UpdateMode, str, None] = None,
        publish_mode: Union[PublishMode, str, None] = None,
        pause_mode: Union[PauseMode, str, None] = None,
        transfer_policy: Union[TransferPolicy, str, None] = None,
        delivery_policy: Union[DeliveryPolicy, str, None] = None,
        update: Union[TransferMedium, str, None] = None,
        rolling: int = 0,
        on_straggler: Union[OnStraggler, str, None] = None,
        allow_no_recovery: bool = False,
        verify_source: bool = False,
        request_id: Optional[str] = None,
        timeout: float = 150.0,
    ) -> Publication:
        """Offers the tensors as they are now. When it returns, they may be changed, and not before.

        version: above every one before, or 0: the server counts on.
        tensors: new ones of the layout that was registered, temporaries too: they are copied before this
          returns. None: those that were registered. LAYOUT_CHANGED when they differ in name, type, shape or
          box; where nothing was registered yet, they are now.
        step: the trainer's own label.
        update_mode, publish_mode, pause_mode, transfer_policy, delivery_policy: enumerations of this package
          or their names; None: STAGE, SNAPSHOT, DRAIN, AUTO, QUEUE.
        update: "network", "disk" or "network_or_disk"; None: that of this object.
        rolling: above 0, so many replicas switch at a time; else all at once (LOCKSTEP), with `on_straggler`.
        Every rank gives the same ones.

        A broken connection is tried again, with the same request_id, until `timeout`.
        """
        start = time.monotonic()
        options = _capi.PublishOptions(
            version=version,
            step=step,
            request_id=_capi.raw(request_id),
            timeout=timeout,
            publish_mode=pick(PublishMode, publish_mode),
            update_mode=pick(UpdateMode, update_mode),
            pause_mode=pick(PauseMode, pause_mode),
            transfer_policy=pick(TransferPolicy, transfer_policy),
            delivery_policy=pick(DeliveryPolicy, delivery_policy),
            rolling_max_unavailable=rolling,
            on_straggler=pick(OnStraggler, on_straggler),
            allow_no_recovery=allow_no_recovery,
            verify_source=verify_source,
            transfer_medium=pick(TransferMedium, self._update if update is None else update),
        )
        published = _capi.Published()
        with self._lock:
            self._fill(tensors, timeout)
            self._handle.check("publish", ctypes.byref(options), ctypes.byref(published))
        return Publication(self._handle, published, time.monotonic() - start)

    def _fill(self, given: Any, timeout: float) -> None:
        """Copies what must be copied, and registers again what lies elsewhere now."""
        self._handle.pointer()
        given = None if given is None else tensors.kept(given)
        if self._layout is None:
            if given is None:
                raise FailedPreconditionError(
                    "NOT_REGISTERED", "Call register() before the first publish, or give it tensors."
                )
            self._weights = given
            self._register(self._parts(given), timeout)
        parts = self._parts(self._weights if given is None else given)
        layout = [part.describe() for part in parts]
        if layout != self._layout:
            assert self._layout is not None
            raise invalid("LAYOUT_CHANGED", _difference(self._layout, layout))
        moved = False
        for shard, part in zip(self._shards, parts):
            if shard.target is not None and shard.held_dtype != part.copied_dtype():
                moved = True
            elif not _copied(shard, part):
                here = (part.address, part.strides, part.stored_dtype())
                if (shard.address, shard.strides, shard.held_dtype) != here:
                    moved = True
        if moved:
            # What was read where it lay lies elsewhere now.
            self._register(parts, timeout)
            for shard, part in zip(self._shards, parts):
                _copied(shard, part)

    def prepare(self, timeout: float = 60.0) -> Dict[str, Any]:
        """Joins groups and reserves memory ahead of the first publish, once all ranks have registered.

        Idempotent; every rank may call it. WORLD_INCOMPLETE when some had not registered in time, NO_WORKERS
        when nobody wants the model yet.
        """
        found = _capi.Prepared()
        self._handle.check("prepare", timeout, ctypes.byref(found))
        return dict(
            layout_id=_capi.text(found.layout_id),
            bucket_count=found.bucket_count,
            wire_bytes=found.wire_bytes,
            prepare_seconds=found.prepare_duration,
        )

    @property
    def node(self) -> str:
        """"nodes/{node}" of the daemon."""
        buffer = ctypes.create_string_buffer(128)
        self._handle.call("node", buffer)
        return _capi.text(buffer.value)

    def check(self) -> None:
        """Raises LEASE_LOST or CLOSED when this rank is not registered now."""
        self._handle.check("status")

    def close(self) -> None:
        """Deregisters the rank; calls that run are cancelled. Idempotent."""
        self._handle.close()
        # Nobody reads it any more.
        self._shadows.clear()
        for shard in self._shards:
            shard.shadow = None

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _difference(before: List[Tuple[Any, ...]], after: List[Tuple[Any, ...]]) -> str:
    """A sentence that names the first tensor that differs."""
    old = {entry[0]: entry for entry in before}
    new = {entry[0]: entry for entry in after}
    for name in old:
        if name not in new:
            return f"{name} is missing; call register() with the new layout first."
    for name in new:
        if name not in old:
            return f"{name} was not registered; call register() with the new layout first."
    for name in old:
        if old[name] != new[name]:
            return (
                f"{name} was {old[name][1].name} {list(old[name][2])} and is {new[name][1].name} "
                f"{list(new[name][2])} (or its box differs); call register() with the new layout first."
            )
    return "the tensors come in another order; call register() with the new one first."
