"""The inference side: engines whose weights are replaced while they are paused."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import time
import warnings
from typing import Any, Awaitable, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import numpy

from . import _capi, names as name_rules, tensors
from ._waiting import Loop
from .enums import DType, InstalledState, PauseMode
from .errors import DeadlineExceededError, UnimplementedError, WeightsyncError, invalid
from .loads import Loads


@dataclasses.dataclass(frozen=True)
class PauseRequest:
    """Stop generating."""

    # What the pause is for; empty: an operator asked for it.
    update_id: str
    version: int
    # What becomes of the requests that the engine is working on.
    mode: PauseMode
    # Seconds after which the daemon gives up waiting.
    timeout: float


@dataclasses.dataclass(frozen=True)
class ResumeInfo:
    """Generate again, with what all workers of the replica hold now."""

    # Empty, 0: what they came with.
    update_id: str
    version: int
    step: int
    # Caches made with older weights (prefix, KV) must go.
    weights_changed: bool
    # How the pause before it was asked for: with KEEP, frozen requests go on.
    mode: PauseMode
    # The model, an adapter, was removed: generate without it.
    removed: bool = False


@dataclasses.dataclass(frozen=True)
class Applied:
    """One update that was written into a worker's tensors, or was not."""

    update_id: str
    version: int
    step: int
    copied_bytes: int
    copy_seconds: float
    # Reason and sentence; None: the tensors hold the update.
    failure: Optional[Tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Installed:
    """What lies in a worker's tensors."""

    state: InstalledState
    update_id: str
    version: int


PauseHook = Callable[[PauseRequest], Union[None, str, Awaitable[Optional[str]]]]
ResumeHook = Callable[[ResumeInfo], Union[None, Awaitable[None]]]


class Replica:
    """One engine instance: is paused and resumed around the installation of an update.

        replica = weightsync.Replica("policy", "replica-0", workers=2, on_pause=engine.pause,
                                     on_resume=engine.resume)
        workers = [replica.worker(shard, index=i) for i, shard in enumerate(engine.shards)]

    Its workers may be objects of other processes (weightsync.Worker with the same `incarnation`). It serves
    when it and all of them are registered.

    Hooks are called one at a time on a thread of the library; they may be coroutine functions, which run on
    `loop` (default: the loop that is running when this is made). What they raise goes to the daemon, with its
    reason where it is a WeightsyncError: HOOK_FAILED otherwise.

    Args:
      model, name: 1 to 63 of [a-z0-9._-] each.
      workers: how many it has.
      on_pause: stops generating, and returns when no worker reads weights any more; what it returns is shown
        to people ("drained 3 requests"). After an error the engine counts as neither paused nor running.
      on_resume: generates again. Where `weights_changed`, caches made with older weights must go first.
      on_version: called before on_resume when the weights are others than before; once for each version, but
        again after it has raised.
      on_remove: the engine can go on without the model, an adapter, which may so be removed
        (`weightsyncctl remove`): called before on_resume when it was; drops what the engine made of it. The
        next version that is published brings the model back.
      removable: the same, without a hook.
      incarnation: the same for the replica and its workers, another after every start of the engine. None:
        made up here.
      partial: its workers may leave parameters of the model out.
      atomic_swap: all workers have a spare set of tensors (see Worker).
      paused: the engine stands paused now.
    """

    def __init__(
        self,
        model: str,
        name: str,
        *,
        workers: int = 1,
        address: Optional[str] = None,
        on_pause: Optional[PauseHook] = None,
        on_resume: Optional[ResumeHook] = None,
        on_version: Optional[ResumeHook] = None,
        on_remove: Optional[ResumeHook] = None,
        removable: bool = False,
        incarnation: Optional[str] = None,
        partial: bool = False,
        atomic_swap: bool = False,
        paused: bool = False,
        client: str = "",
        loop: Optional[asyncio.AbstractEventLoop] = None,
        resume_timeout: float = 300.0,
        register_timeout: float = 20.0,
    ) -> None:
        self.model = model
        self.name = name
        self.workers = workers
        self.address = address
        self.incarnation = incarnation or _capi.random_id()
        self._on_pause = on_pause
        self._on_resume = on_resume
        self._on_version = on_version
        self._on_remove = on_remove
        self._hooks = Loop(loop)
        self._resume_timeout = resume_timeout
        self._served: Tuple[str, int] = ("", 0)
        self._told = ""
        pause = _capi.ON_PAUSE(_capi.guarded(self._pause))
        resume = _capi.ON_RESUME(_capi.guarded(self._resume))
        options = _capi.ReplicaOptions(
            address=_capi.raw(address),
            model=model.encode(),
            replica=name.encode(),
            incarnation=self.incarnation.encode(),
            worker_count=workers,
            client=f"python {client}".strip().encode(),
            partial=partial,
            atomic_swap=atomic_swap,
            paused=paused,
            on_pause=pause,
            on_resume=resume,
            register_timeout=register_timeout,
            removable=removable or on_remove is not None,
        )
        self._handle = _capi.start("replica", "start", ctypes.byref(options), keep=(pause, resume))

    def _pause(self, given: Any, answer: int) -> None:
        found = given.contents
        request = PauseRequest(
            _capi.text(found.update_id), found.version, PauseMode(found.mode or PauseMode.DRAIN), found.timeout
        )
        if self._on_pause is None:
            return
        detail = self._hooks.wait(self._on_pause(request), request.timeout)
        if detail is not None:
            _capi.call("answer_detail", answer, str(detail).encode())

    def _resume(self, given: Any, _answer: int) -> None:
        found = given.contents
        info = ResumeInfo(
            _capi.text(found.update_id),
            found.version,
            found.step,
            bool(found.weights_changed),
            PauseMode(found.mode or PauseMode.DRAIN),
            bool(found.removed),
        )
        if info.removed and self._on_remove is not None:
            self._hooks.wait(self._on_remove(info), self._resume_timeout)
        if self._on_version is not None and info.update_id and info.update_id != self._told:
            self._hooks.wait(self._on_version(info), self._resume_timeout)
            # Once for each, also when on_resume has to be called again.
            self._told = info.update_id
        if self._on_resume is not None:
            self._hooks.wait(self._on_resume(info), self._resume_timeout)
        self._served = (info.update_id, info.version)

    @property
    def version(self) -> int:
        """What it was resumed with last; 0: what it came with."""
        return self._served[1]

    def worker(self, weights: Optional[tensors.Weights] = None, **options: Any) -> "Worker":
        """A worker of this replica in this process; see Worker for the options."""
        return Worker(
            self.model,
            self.name,
            weights,
            workers=self.workers,
            incarnation=self.incarnation,
            **{"address": self.address, **options},
        )

    def wait_registered(self, timeout: float = 30.0) -> None:
        """REGISTER_TIMEOUT, or the daemon's error when it has refused for good (REPLICA_TAKEN, …)."""
        self._handle.check("wait_registered", timeout)

    @property
    def paused(self) -> bool:
        """Whether its engine stands paused."""
        return bool(self._handle.call("paused"))

    def check(self) -> None:
        """Raises why it is not registered now."""
        self._handle.check("status")

    def close(self) -> None:
        """Ends the registration; not from a hook. An engine that stands paused is left so."""
        self._handle.close()

    def __enter__(self) -> "Replica":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


# Shape and type of a parameter that a load callback wants.
Spec = Tuple[Sequence[int], tensors.DTypeLike]


class Worker:
    """One worker of a replica: receives versions of a model's weights.

    In place: `weights` (a torch module, a state_dict, or pairs of name and tensor) are the engine's live
    tensors, whose addresses never change; updates are written into them while the replica is paused.

        worker = weightsync.Worker("policy", "replica-0", model, on_pause=engine.pause, on_resume=engine.resume)

    With a load callback: the engine takes each tensor over by itself, under the names of the model.

        worker = weightsync.Worker("policy", "replica-0", load=engine.load_weight, on_pause=…, on_resume=…)

    `load(name, tensor)` is called for every parameter of an update, while the replica is paused, and may
    return a future (of concurrent.futures, torch.futures or multiprocessing, or an awaitable) that ends when the
    engine has taken it; the update counts as installed when all have. What a future ends with is as if the
    callback had raised it: `str(result)` of the update says so to who published it. The tensor may be used until
    then; its memory is used again for the next ones. What has not ended `load_timeout` seconds after the update came
    fails it (LOAD_TIMEOUT), but is not cancelled: no other update begins before it has ended, so that a late copy is
    never written over a newer version. What it raises leaves a mix: the update is applied again, and the replica
    stays paused until one is whole. The model is not held once more: tensors come one by one, as many at a time as
    `load_buffer_bytes` holds (at least one); those that the engine has not taken yet are waited for.

    With hooks, or without any replica of that name elsewhere, a worker alone is its own replica; where an
    engine has several, make a Replica, and its workers with `index` (in other processes also `workers`,
    `incarnation`).

    Args:
      weights: what to fill. With `load`: names with (shape, type), or None for all of the model, which is then
        asked for at the daemon for up to `catalog_timeout` seconds.
      load: see above. `views`: "numpy" or "torch".
      load_weights: the same for loaders that take everything at once: called once per update with an iterable of
        (name, tensor), each of which may be used until the next one is asked for; may return a future. It must
        ask for all of them (LOAD_INCOMPLETE), and by `load_timeout`: later ones are refused (LOAD_ENDED). Tensors
        are read as they are asked for. An update by STREAM is gathered first: it takes memory for all of them.
      load_buffer_bytes: of tensors that were handed to `load` and not taken yet.
      load_timeout: how many seconds the engine has for all of an update.
      index, workers, incarnation: of a replica of several workers.
      names: rules from the engine's names to the model's (weightsync.names).
      policy: "strict": the daemon refuses a worker that wants what the trainers do not have
        (PARAMETER_UNKNOWN), and a replica that leaves something out (REPLICA_INCOMPLETE). "warn": both are
        allowed, with a warning; needs the trainers to be there.
      bounce: fill tensors on GPUs through host memory of this process. Without it CUDA tensors are filled where
        they are, and other devices refused (CUDA_MEMORY).
      spare, swap: a second set of the same tensors, tied alike (SWAP_INVALID); updates are written into the set
        that does not serve, and `swap(set, update_id)` says which one holds a whole update now (see
        client/cc/worker.h). For updates with pause_mode "none".
      may_write: raises where the memory is not there now (starting, asleep).
      on_applied: called after every attempt, with an Applied; must return soon.
      on_remove: of a worker alone as of Replica. Of one of several: called in it, while the replica is paused,
        before its Replica is resumed; the Replica must be `removable`.
      on_pause, on_resume, on_version, removable, partial, loop: as of Replica.
    """

    def __init__(
        self,
        model: str,
        replica: str,
        weights: Optional[Union[tensors.Weights, Mapping[str, Spec], Iterable[Tuple[str, Spec]]]] = None,
        *,
        load: Optional[Callable[[str, Any], Any]] = None,
        load_weights: Optional[Callable[[Iterable[Tuple[str, Any]]], Any]] = None,
        views: Optional[str] = None,
        index: int = 0,
        workers: int = 1,
        incarnation: Optional[str] = None,
        address: Optional[str] = None,
        names: Sequence[name_rules.Rule] = (),
        policy: str = "strict",
        bounce: bool = False,
        spare: Optional[tensors.Weights] = None,
        swap: Optional[Callable[[int, str], None]] = None,
        may_write: Optional[Callable[[], None]] = None,
        on_applied: Optional[Callable[[Applied], None]] = None,
        on_pause: Optional[PauseHook] = None,
        on_resume: Optional[ResumeHook] = None,
        on_version: Optional[ResumeHook] = None,
        on_remove: Optional[Callable[..., Any]] = None,
        removable: bool = False,
        partial: bool = False,
        client: str = "",
        loop: Optional[asyncio.AbstractEventLoop] = None,
        load_buffer_bytes: int = 256 << 20,
        copy_threads: int = 0,
        load_timeout: float = 120.0,
        catalog_timeout: float = 60.0,
        register_timeout: float = 20.0,
    ) -> None:
        if policy not in ("strict", "warn"):
            raise invalid("OPTION_UNKNOWN", f"policy={policy!r} is neither 'strict' nor 'warn'.")
        if views not in (None, "numpy", "torch"):
            raise invalid("OPTION_UNKNOWN", f"views={views!r} is neither 'numpy' nor 'torch'.")
        alone = incarnation is None
        if alone and workers != 1:
            raise invalid(
                "INCARNATION_MISSING",
                f"A replica of {workers} workers: make a Replica, and give each worker its incarnation.",
            )
        if not alone and (on_pause or on_resume or on_version or removable):
            raise invalid("HOOKS_MISPLACED", "Hooks of a replica of several workers belong to the Replica.")
        self.model = model
        self.index = index
        self.replica: Optional[Replica] = None
        self._address = address
        self._hooks = Loop(loop)
        if load is not None and load_weights is not None:
            raise invalid("OPTION_UNKNOWN", "Give load or load_weights, not both.")
        self._load_weights = load_weights
        self._load = load if load_weights is None else (lambda _name, _view: None)
        self._load_timeout = load_timeout
        self._loads: Optional[Loads] = None
        self._on_remove = on_remove
        self._on_applied = on_applied
        self._swap = swap
        self._may_write = may_write
        self.incarnation = incarnation or _capi.random_id()

        catalog: Optional[Dict[str, Any]] = None
        if policy == "warn" or (self._load is not None and weights is None):
            catalog = self._catalog(catalog_timeout)
        parts = self._targets(weights, catalog, views, names, bounce, load_buffer_bytes)
        spares = None if spare is None else self._spares(spare, parts, names)
        if policy == "warn":
            assert catalog is not None
            parts = self._agree(parts, catalog)
            partial = True
        if self._loads is not None:
            parts = self._loads.registered(parts)
        if spares is not None:
            # What no trainer has (policy="warn") is in neither.
            left = {part.name for part in parts}
            spares = [part for part in spares if part.name in left]
        for part in [*([] if self._loads is not None else parts), *(spares or ())]:
            self._check(part)

        callbacks: Dict[str, Any] = {"on_applied": _capi.ON_APPLIED(self._applied)}
        if self._loads is not None:
            callbacks["take"] = _capi.TAKE(_capi.guarded(self._take))
        if on_remove is not None and not alone:
            callbacks["on_remove"] = _capi.ON_REMOVE(_capi.guarded(self._removed))
        if swap is not None:
            callbacks["swap"] = _capi.SWAP(_capi.guarded(self._swapped))
        if may_write is not None:
            callbacks["may_write"] = _capi.MAY_WRITE(_capi.guarded(self._asked))
        options = _capi.WorkerOptions(
            address=_capi.raw(address),
            model=model.encode(),
            replica=replica.encode(),
            incarnation=self.incarnation.encode(),
            worker_index=index,
            worker_count=workers,
            client=f"python {client}".strip().encode(),
            copy_threads=copy_threads,
            register_timeout=register_timeout,
            **callbacks,
        )
        self._handle = _capi.start(
            "worker",
            "start",
            ctypes.byref(options),
            _capi.tensors(parts),
            None if spares is None else _capi.tensors(spares),
            len(parts),
            keep=(callbacks, parts, spares),
        )
        if alone:
            try:
                self.replica = Replica(
                    model,
                    replica,
                    address=address,
                    on_pause=on_pause,
                    on_resume=on_resume,
                    on_version=on_version,
                    on_remove=on_remove,
                    removable=removable,
                    incarnation=self.incarnation,
                    partial=partial,
                    atomic_swap=spare is not None,
                    client=client,
                    loop=loop,
                    register_timeout=register_timeout,
                )
            except BaseException:
                self._handle.close()
                raise

    # ---- What is filled ----

    def _catalog(self, timeout: float) -> Dict[str, Any]:
        """name -> Parameter, once the trainers have said it."""
        from .admin import Admin

        deadline = time.monotonic() + timeout
        name = self.model if self.model.startswith("models/") else f"models/{self.model}"
        with Admin(self._address, timeout=timeout) as admin:
            while True:
                reason = "no trainer has registered it yet"
                try:
                    found = admin.call("GetModel", name=name)
                    if found.parameters:
                        return {parameter.name: parameter for parameter in found.parameters}
                except WeightsyncError as error:
                    if error.reason != "MODEL_UNKNOWN":
                        raise
                if time.monotonic() > deadline:
                    raise DeadlineExceededError(
                        "CATALOG_UNKNOWN", f"The parameters of {name} are not known: {reason}."
                    )
                time.sleep(0.1)

    def _targets(
        self,
        weights: Any,
        catalog: Optional[Dict[str, Any]],
        views: Optional[str],
        names: Sequence[name_rules.Rule],
        bounce: bool,
        buffer_bytes: int,
    ) -> List[tensors.Part]:
        """What the library fills: the engine's tensors, or what is handed to it one by one."""
        if self._load is None:
            if weights is None:
                raise invalid("TENSOR_UNKNOWN", "A worker needs tensors to fill, or a load callback.")
            parts, _ = tensors.drop_tied(tensors.all_parts(weights))
            parts = name_rules.apply(names, parts)
            if not any(part.on_device() for part in parts):
                return parts
            if not bounce:
                device = next((part for part in parts if part.on_device() and not part.on_gpu), None)
                if device is None:
                    return parts
                raise UnimplementedError(
                    "CUDA_MEMORY",
                    f"{device.name} is on {device.array.device}, which is no kind of memory that can be "
                    "filled from here: pass bounce=True to have it filled through the host.",
                )
            targets = {(part.name, part.offset): part.array for part in parts}

            def fill(part: tensors.Part, view: Any) -> None:
                targets[part.name, part.offset].copy_(view)

            self._loads = Loads(parts, "torch", fill, None, buffer_bytes)
            return self._loads.parts(())
        load = self._load
        if weights is None:
            assert catalog is not None
            pairs: List[Tuple[str, Any]] = [
                (p.name, (tuple(p.shape), DType(p.dtype))) for p in catalog.values()
            ]
        elif hasattr(weights, "state_dict"):
            pairs = list(tensors.named_tensors(weights))
        else:
            pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
        parts = []
        for name, spec in pairs:
            if not isinstance(spec, tuple):
                spec = (tuple(spec.shape), spec.dtype)
            parts.append(
                tensors.Part(name, tensors.to_dtype(spec[1], name), tuple(spec[0]), None, None, None)
            )
        if views is None:
            views = "torch" if tensors.torch() is not None else "numpy"
        self._loads = Loads(parts, views, lambda part, view: load(part.name, view), self._load_weights, buffer_bytes)
        return self._loads.parts(names)

    def _spares(
        self, spare: tensors.Weights, parts: Sequence[tensors.Part], names: Sequence[name_rules.Rule]
    ) -> List[tensors.Part]:
        """The tensors of the spare set, in the order of those that serve; SWAP_INVALID where they are others."""
        if self._loads is not None:
            raise invalid("SWAP_INVALID", "A worker swaps its weights or loads them, not both.")
        others = {part.describe(): part for part in name_rules.apply(names, tensors.all_parts(spare))}
        taken = [others.pop(part.describe(), None) for part in parts]
        found = [part for part in taken if part is not None]
        # Of tied names one is there, the same in both sets.
        kept, tied = tensors.drop_tied([*found, *others.values()])
        alone = [part.name for part, other in zip(parts, taken) if other is None]
        alone += [part.name for part in found if part.name in tied]
        alone += [part.name for part in kept[len(found) :]]
        if alone:
            raise invalid(
                "SWAP_INVALID",
                f"A worker that swaps its weights has the same tensors in both sets, tied alike; {alone[0]} is in one "
                "only, or of another shape or type there.",
            )
        return found

    def _agree(self, parts: List[tensors.Part], catalog: Dict[str, Any]) -> List[tensors.Part]:
        """policy="warn": without what the trainers do not have."""
        missing, extra = name_rules.leftovers([part.name for part in parts], list(catalog))
        if missing:
            warnings.warn(
                f"The trainers of {self.model} do not have {len(missing)} of this worker's parameters "
                f"({', '.join(missing[:5])}…); they stay as they are.",
                name_rules.PatternWarning,
                stacklevel=3,
            )
        if extra:
            warnings.warn(
                f"{self.model} has {len(extra)} parameters that this worker does not take "
                f"({', '.join(extra[:5])}…).",
                name_rules.PatternWarning,
                stacklevel=3,
            )
        gone = set(missing)
        return [part for part in parts if part.name not in gone]

    @staticmethod
    def _check(part: tensors.Part) -> None:
        if not part.in_place():
            raise invalid(
                "STRIDES_INVALID", f"{part.name}: it cannot be filled in place; give a tensor of the CPU."
            )
        if isinstance(part.array, numpy.ndarray) and not part.array.flags.writeable:
            raise invalid("READ_ONLY", f"{part.name}: the array is read-only; a worker writes into it.")
        if any(n > 1 and s == 0 for n, s in zip(part.box_extent, part.strides)):
            raise invalid("STRIDES_INVALID", f"{part.name}: elements of it share memory (an expanded tensor).")

    # ---- Callbacks ----

    def _take(self, given: Any, _answer: int) -> None:
        assert self._loads is not None
        self._loads.take(given.contents, self._hooks, self._load_timeout)

    def _removed(self, _answer: int) -> None:
        assert self._on_remove is not None
        self._hooks.wait(self._on_remove(), self._load_timeout)

    def _swapped(self, number: int, update_id: bytes, _answer: int) -> None:
        assert self._swap is not None
        self._swap(number, _capi.text(update_id))

    def _asked(self, _answer: int) -> None:
        assert self._may_write is not None
        self._may_write()

    def _applied(self, _user: Any, given: Any) -> None:
        if self._on_applied is None:
            return
        found = given.contents
        failure = (_capi.text(found.reason), _capi.text(found.message)) if found.code else None
        try:
            self._on_applied(
                Applied(
                    _capi.text(found.update_id),
                    found.version,
                    found.step,
                    found.copied_bytes,
                    found.copy_duration,
                    failure,
                )
            )
        except Exception as error:  # noqa: BLE001  it cannot change what happened
            warnings.warn(f"on_applied raised {error!r}", RuntimeWarning, stacklevel=1)

    # ---- Life ----

    def wait_registered(self, timeout: float = 30.0) -> None:
        """Waits until the daemon knows this worker, and its replica where it is its own.

        Raises the daemon's error when it has refused for good (PARAMETER_UNKNOWN, DTYPE_MISMATCH,
        SHAPE_MISMATCH, WORKER_TAKEN, …), REGISTER_TIMEOUT otherwise: it goes on trying.
        """
        deadline = time.monotonic() + timeout
        self._handle.check("wait_registered", timeout)
        if self.replica is not None:
            self.replica.wait_registered(max(deadline - time.monotonic(), 0.01))

    @property
    def installed(self) -> Installed:
        """What lies in its tensors now."""
        found = _capi.Installed()
        self._handle.call("installed", ctypes.byref(found))
        return Installed(InstalledState(found.state), _capi.text(found.update_id), found.version)

    def wait_installed(self, version: int = 0, timeout: float = 60.0) -> Installed:
        """Waits until a version of at least `version` is in the tensors; INSTALL_TIMEOUT otherwise.

        Whether the replica serves it is known to on_version and Replica.version.
        """
        self._handle.check("wait_installed", version, timeout)
        return self.installed

    @property
    def version(self) -> int:
        """What is installed; 0: nothing of weightsync, or a mix."""
        found = self.installed
        return found.version if found.state == InstalledState.INSTALLED else 0

    def mark_dropped(self) -> None:
        """The engine has dropped its weights: the newest version is installed again."""
        self._handle.check("mark_dropped")

    def sleep(self, timeout: float = 30.0) -> None:
        """The engine's memory goes: nothing is written until wake(). Waits for a copy that runs."""
        self._handle.check("sleep", timeout)

    def wake(self) -> None:
        """The memory is there again, without its contents: the newest version is installed."""
        self._handle.check("wake")

    def check(self) -> None:
        """Raises why it is not registered now."""
        self._handle.check("status")

    @property
    def ended(self) -> bool:
        """No further attempt to register will be made: closed, or refused for good."""
        return bool(self._handle.call("ended"))

    def close(self) -> None:
        """Ends the registration; the tensors are not touched after it. Not from a callback."""
        if self.replica is not None:
            self.replica.close()
        self._handle.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


__all__ = ["Applied", "Installed", "PauseRequest", "Replica", "ResumeInfo", "Worker"]
