"""vLLM's own interface for weight transfer: the backend "weightsync" (weightsync.vllm.register makes it one).

vLLM's factory imports this when an engine is made with that backend; see weightsync.vllm for the rest.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Dict, Optional

from .errors import UnimplementedError
from .vllm import load_into
from .worker import Worker

_Engine: Any = object
_Init: Any = object
_Update: Any = object
try:
    from vllm.distributed.weight_transfer import base as _base
except ImportError:
    pass  # a release without the interface, or no vLLM
else:
    _Engine, _Init = _base.WeightTransferEngine, _base.WeightTransferInitInfo
    _Update = _base.WeightTransferUpdateInfo


@dataclasses.dataclass
class InitInfo(_Init):
    """What POST /init_weight_transfer_engine gives, as `init_info`."""

    model: str
    replica: str
    incarnation: str
    workers: int
    address: Optional[str] = None
    # By then the model's trainers must have registered (CATALOG_UNKNOWN), and the daemon know the worker.
    timeout: float = 60.0


@dataclasses.dataclass
class UpdateInfo(_Update):
    """What POST /update_weights gives, as `update_info`: which version must be there."""

    version: int
    timeout: float = 120.0


class TransferEngine(_Engine):
    """A weight transfer engine of vLLM (0.25 and newer): `--weight-transfer-config '{"backend": "weightsync"}'`.

    The bytes come through the daemon; the replica is a weightsync.Replica without on_pause, anywhere, and whoever
    drives vLLM's session pauses the engine, as for vLLM's own backends:

        await engine.pause_generation(mode="wait")
        await engine.start_weight_update()
        update = trainer.publish(…)
        await engine.update_weights(WeightTransferUpdateRequest(update_info={"version": update.version}))
        await engine.finish_weight_update()
        await engine.reset_prefix_cache()
        await engine.resume_generation()

    receive_weights waits until the version that it names is installed, so that vLLM's own session and version
    label end after it and never before. vLLM waits for it in the loop of its engine: a hook that would pause the
    engine meanwhile (a Controller's) would wait for its own deadline.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        if _Engine is not object:
            # vLLM sets back what the base keeps (reset_weight_update_target) at the end of every session.
            super().__init__(config, vllm_config, device, model)
        self.config = config
        self._vllm_config = vllm_config
        self._device = device
        self._model = model
        self._worker: Optional[Worker] = None
        self._updating = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Makes this process's worker, and waits until the daemon knows it."""
        self.shutdown()
        deadline = time.monotonic() + init_info.timeout
        parallel = self._vllm_config.parallel_config
        self._worker = Worker(
            init_info.model,
            init_info.replica,
            load_weights=lambda pairs: load_into(self._model, self._vllm_config, self._device, pairs),
            views="torch",
            index=int(parallel.rank),
            workers=init_info.workers,
            incarnation=init_info.incarnation,
            address=init_info.address,
            client="vllm transfer engine",
            catalog_timeout=init_info.timeout,
        )
        try:
            self._worker.wait_registered(max(deadline - time.monotonic(), 1.0))
        except BaseException:
            self.shutdown()
            raise

    def parse_init_info(self, given: Dict[str, Any]) -> InitInfo:
        """What init_info of the request says; TypeError names a field that is missing or unknown."""
        return InitInfo(**given)

    def parse_update_info(self, given: Dict[str, Any]) -> UpdateInfo:
        """As parse_init_info."""
        return UpdateInfo(**given)

    def start_weight_update(self) -> None:
        """Opens a session; one at a time."""
        if self._worker is None:
            raise RuntimeError("init_transfer_engine was not called")
        if self._updating:
            raise RuntimeError("an update is under way")
        self._updating = True

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Returns when that version is installed; INSTALL_TIMEOUT, and no session, when it is not in time."""
        if not self._updating or self._worker is None:
            raise RuntimeError("start_weight_update was not called")
        try:
            self._worker.wait_installed(update_info.version, update_info.timeout)
        except BaseException:
            # vLLM has no session after that, and calls nothing before the next one starts.
            self._updating = False
            raise

    def update_weights(self, update_info: Dict[str, Any]) -> None:
        """receive_weights, of what a request says."""
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        """Ends the session."""
        if not self._updating:
            raise RuntimeError("start_weight_update was not called")
        self._updating = False

    def shutdown(self) -> None:
        """Ends this process's worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._updating = False

    @staticmethod
    def trainer_send_weights(*_args: Any, **_kwargs: Any) -> None:
        """Abstract in vLLM 0.25: trainers of weightsync publish (weightsync.Trainer)."""
        raise UnimplementedError(
            "TRAINER_ELSEWHERE", "vLLM's trainer side sends nothing here: publish with weightsync.Trainer."
        )
