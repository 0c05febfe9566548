"""SGLang as a replica.

Start the server with our loader in its allow-list, and a controller beside it:

    python -m sglang.launch_server --model-path … --custom-weight-loader weightsync.sglang.load
    weightsync.sglang.Controller("http://127.0.0.1:30000", "policy", "replica-0", workers=tp_size).start()

The loader runs in every scheduler process. Its first call starts a weightsync worker there, whose versions go
through the model's load_weights while the controller has the server paused.

Written for SGLang 0.5 with --custom-weight-loader, pause_generation and continue_generation. No release of it
could be run where this was written: the tests are against the interface as it is documented.

How pauses map. ABORT is SGLang's "abort". It has no DRAIN: let the router in front of it drain and publish
with ABORT. KEEP is "retract", only where the server has no prefix cache (radix_cache=False here and
--disable-radix-cache there): retracted requests wait in the queue, and then the cache cannot be flushed, so
that prefixes which older weights made would live on. Other modes are refused with PAUSE_MODE_UNIMPLEMENTED
before anything is paused. After ABORT the cache is flushed before generation goes on, and a flush that fails
leaves the server paused (PREFIX_CACHE_IN_USE).

A loader of this kind does not run the model's post-processing of quantised weights (post_load_weights): serve
unquantised weights, or engines whose load_weights does it.
"""

from __future__ import annotations

import base64
import json
import pickle
import time
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from . import _capi
from ._http import call_http
from ._loading import device_of, loading
from .enums import PauseMode
from .errors import FailedPreconditionError, UnimplementedError
from .worker import PauseRequest, Replica, ResumeInfo, Worker

LOADER = "weightsync.sglang.load"
# The name under which a command comes instead of a weight.
COMMAND = "weightsync.command"
# What a command may take beyond the deadline that the server's workers have for it.
_MARGIN_SECONDS = 10.0

_worker: Optional[Worker] = None


def command_tensor(command: Dict[str, Any]) -> Any:
    """A command as a tensor of bytes, which is what the server lets through to a loader."""
    import torch

    return torch.tensor(list(json.dumps(command).encode()), dtype=torch.uint8)


def _tensor_parallel_rank() -> int:
    try:
        from sglang.srt.distributed import get_tensor_model_parallel_rank
    except ImportError:
        return 0
    return int(get_tensor_model_parallel_rank())


def load(model: Any, named_tensors: Iterable[Tuple[str, Any]]) -> None:
    """The loader that SGLang calls; not for others. `named_tensors` is one command."""
    global _worker
    for name, tensor in named_tensors:
        if name != COMMAND:
            raise ValueError(f"{LOADER} takes commands of weightsync.sglang.Controller, not {name}")
        command = json.loads(bytes(tensor.cpu().tolist()))
        what = command.pop("what")
        if what == "start":
            _stop()
            timeout = command.pop("worker_timeout")
            deadline = time.monotonic() + timeout
            device = device_of(model)

            def load_weights(pairs: Iterable[Tuple[str, Any]]) -> None:
                with loading(device):
                    model.load_weights(pairs)

            _worker = Worker(
                load_weights=load_weights,
                views="torch",
                index=_tensor_parallel_rank(),
                client="sglang",
                catalog_timeout=timeout,
                **command,
            )
            try:
                _worker.wait_registered(max(deadline - time.monotonic(), 1.0))
            except BaseException:
                _stop()
                raise
        elif what == "check":
            # Every rank has it, or the server says which has not.
            if _worker is None:
                raise RuntimeError("weightsync was not started in this process")
            _worker.wait_installed(command["version"], command["worker_timeout"])
        elif what == "stop":
            _stop()
        else:
            raise ValueError(f"{LOADER} does not know {what}")


def _stop() -> None:
    global _worker
    if _worker is not None:
        _worker.close()
        _worker = None


def serialize(named_tensors: List[Tuple[str, Any]]) -> str:
    """As SGLang's MultiprocessingSerializer for HTTP: a pickle in base64."""
    try:
        from sglang.srt.utils import MultiprocessingSerializer
    except ImportError:
        return base64.b64encode(pickle.dumps(named_tensors)).decode()
    return MultiprocessingSerializer.serialize(named_tensors, output_str=True)


class Controller:
    """The replica of an SGLang server, over its HTTP interface.

    Args:
      url: of the server. Reached directly, without any proxy.
      workers: its tensor parallel size.
      radix_cache: False where the server runs with --disable-radix-cache: allows KEEP.
      on_version: called while the server is paused and holds another version.
      timeout: of start(), and of each of the other calls.
    """

    def __init__(
        self,
        url: str,
        model: str,
        replica: str,
        *,
        workers: int = 1,
        address: Optional[str] = None,
        radix_cache: bool = True,
        on_version: Optional[Callable[[ResumeInfo], Any]] = None,
        incarnation: Optional[str] = None,
        timeout: float = 60.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self.name = replica
        self.workers = workers
        self.address = address
        self.radix_cache = radix_cache
        self.incarnation = incarnation or _capi.random_id()
        self.timeout = timeout
        self.replica: Optional[Replica] = None
        self._on_version = on_version

    def _post(self, path: str, body: Optional[Dict[str, Any]] = None, timeout: Optional[float] = None) -> Dict[str, Any]:
        answer = call_http(self.url, "POST", path, None, body or {}, timeout or self.timeout)
        if answer.get("success") is False:
            raise FailedPreconditionError("ENGINE_REFUSED", f"{path}: {answer.get('message', 'success is false')}")
        return answer

    def _command(self, timeout: Optional[float] = None, **command: Any) -> None:
        payload = serialize([(COMMAND, command_tensor(command))])
        answer = self._post(
            "/update_weights_from_tensor",
            # A flush in here would kill the scheduler while its queue is not empty; we flush ourselves.
            dict(serialized_named_tensors=[payload] * self.workers, load_format=LOADER, flush_cache=False),
            timeout,
        )
        if answer.get("success") is not True:
            raise FailedPreconditionError(
                "ENGINE_REFUSED", f"/update_weights_from_tensor did not say that it was done: {answer}"
            )

    def start(self) -> None:
        """Makes the workers and the replica, and waits until the daemon knows them, for up to `timeout` seconds.

        The trainers must have registered by then (CATALOG_UNKNOWN, in the server's answer). After a failure nothing
        of it is left, and it may be called again.
        """
        try:
            self._start()
        except BaseException:
            try:
                self.stop()
            except Exception:  # noqa: BLE001  why it could not start is what is told
                pass
            raise

    def _start(self) -> None:
        deadline = time.monotonic() + self.timeout
        self.replica = Replica(
            self.model,
            self.name,
            workers=self.workers,
            address=self.address,
            on_pause=self.pause,
            on_resume=self.resume,
            on_version=self._on_version,
            incarnation=self.incarnation,
            client="sglang",
        )
        self._command(
            # The server's workers end before this call does.
            self.timeout + _MARGIN_SECONDS,
            what="start",
            model=self.model,
            replica=self.name,
            incarnation=self.incarnation,
            workers=self.workers,
            address=self.address,
            worker_timeout=self.timeout,
        )
        self.replica.wait_registered(max(deadline - time.monotonic(), 1.0))

    def stop(self) -> None:
        """Ends the replica and the workers; the server goes on."""
        replica, self.replica = self.replica, None
        if replica is not None:
            replica.close()
        self._command(what="stop")

    def pause(self, request: PauseRequest) -> str:
        """The hook on_pause."""
        if request.mode == PauseMode.ABORT:
            mode = "abort"
        elif request.mode == PauseMode.KEEP and not self.radix_cache:
            mode = "retract"
        else:
            raise UnimplementedError(
                "PAUSE_MODE_UNIMPLEMENTED",
                f"SGLang cannot pause as {request.mode.name} says without prefixes of older weights living on: "
                "publish with pause_mode=abort (see weightsync.sglang).",
            )
        self._post("/pause_generation", {"mode": mode}, max(request.timeout - 1, 0.1))
        return f"SGLang paused ({mode})"

    def resume(self, info: ResumeInfo) -> None:
        """The hook on_resume: what older weights cached is flushed first."""
        if info.weights_changed:
            self._command(
                self.timeout + _MARGIN_SECONDS, what="check", version=info.version, worker_timeout=self.timeout
            )
            if self.radix_cache:
                try:
                    self._post("/flush_cache")
                except FailedPreconditionError as error:
                    raise FailedPreconditionError(
                        "PREFIX_CACHE_IN_USE",
                        f"SGLang did not flush its cache, which older weights made ({error.message}); it stays "
                        "paused.",
                    ) from None
            self._post(
                "/update_weight_version", {"new_version": str(info.version), "abort_all_requests": False}
            )
        self._post("/continue_generation")
