"""A gate between an engine's steps and its pauses."""

from __future__ import annotations

import threading
import time
from typing import Any, Optional

from .errors import DeadlineExceededError
from .worker import PauseRequest, ResumeInfo


class Gate:
    """Lets steps through while the replica is not paused; its pause and resume are hooks.

        gate = weightsync.Gate()
        worker = weightsync.Worker("policy", "replica-0", model, on_pause=gate.pause, on_resume=gate.resume)
        while True:
            with gate:              # waits while the replica is paused
                engine.step()       # all of it with the weights of one version, gate.version

    pause() returns when the steps that run have ended. Any number of threads may be in a step. A request that
    takes several steps goes on with other weights after a pause in its middle: that is PauseMode.KEEP; engines
    that drain or abort requests have hooks of their own.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps = 0
        self._done = 0
        self._paused = False
        # What the steps run with; 0: what the engine came with.
        self.version = 0

    def __enter__(self) -> "Gate":
        with self._changed:
            self._changed.wait_for(lambda: not self._paused)
            self._steps += 1
        return self

    def __exit__(self, *_: Any) -> None:
        with self._changed:
            self._steps -= 1
            self._done += 1
            self._changed.notify_all()

    @property
    def paused(self) -> bool:
        return self._paused

    def pause(self, request: Optional[PauseRequest] = None) -> str:
        start = time.monotonic()
        with self._changed:
            self._paused = True
            if not self._changed.wait_for(lambda: self._steps == 0, request.timeout if request else None):
                raise DeadlineExceededError("STEP_TOO_LONG", f"{self._steps} steps have not ended yet.")
            return f"after {self._done} steps, waited {(time.monotonic() - start) * 1e3:.0f} ms"

    def resume(self, info: Optional[ResumeInfo] = None) -> None:
        with self._changed:
            if info is not None:
                self.version = info.version
            self._paused = False
            self._changed.notify_all()
