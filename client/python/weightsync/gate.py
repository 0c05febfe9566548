"""A gate between an engine's steps and its pauses."""

from __future__ import annotations

import threading
import time
from typing import Any, Dict, Optional, Set

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

    An engine that serves several models (a base and adapters), each a replica of its own, has one gate for all:
    part(model) has the hooks of each. Steps go through while no model pauses the engine.

        base, adapter = gate.part("base"), gate.part("adapter-1")
        weightsync.Worker("base", "replica-0", model, on_pause=base.pause, on_resume=base.resume)
        weightsync.Worker("adapter-1", "replica-0", lora, on_pause=adapter.pause, on_resume=adapter.resume,
                          removable=True)
        with gate:
            if not adapter.removed:
                ...                 # adapter.version
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps = 0
        self._done = 0
        # The parts that pause the engine.
        self._pausing: Set[str] = set()
        self._parts: Dict[str, GatePart] = {}
        self._own = self.part("")

    def part(self, model: str) -> GatePart:
        """The hooks of one of several models; the same for the same name."""
        with self._changed:
            return self._parts.setdefault(model, GatePart(self, model))

    def __enter__(self) -> Gate:
        with self._changed:
            self._changed.wait_for(lambda: not self._pausing)
            self._steps += 1
        return self

    def __exit__(self, *_: Any) -> None:
        with self._changed:
            self._steps -= 1
            self._done += 1
            self._changed.notify_all()

    @property
    def paused(self) -> bool:
        """Whether some model pauses the engine."""
        return bool(self._pausing)

    @property
    def version(self) -> int:
        """What the steps of a gate of one model run with; 0: what the engine came with."""
        return self._own.version

    def pause(self, request: Optional[PauseRequest] = None) -> str:
        """The hook on_pause: no step begins any more; returns when none runs. STEP_TOO_LONG at the deadline."""
        return self._own.pause(request)

    def resume(self, info: Optional[ResumeInfo] = None) -> None:
        """The hook on_resume: steps begin again."""
        self._own.resume(info)


class GatePart:
    """What one of several models has of an engine's gate: see Gate. Read `version` and `removed` in a step."""

    def __init__(self, gate: Gate, model: str) -> None:
        self._gate = gate
        self._model = model
        # What the steps run with; 0: what the engine came with, or nothing.
        self.version = 0
        # The model was removed, and was not published since.
        self.removed = False

    def pause(self, request: Optional[PauseRequest] = None) -> str:
        """The hook on_pause: no step begins any more; returns when none runs. STEP_TOO_LONG at the deadline."""
        gate = self._gate
        start = time.monotonic()
        with gate._changed:
            gate._pausing.add(self._model)
            if not gate._changed.wait_for(lambda: gate._steps == 0, request.timeout if request else None):
                raise DeadlineExceededError("STEP_TOO_LONG", f"{gate._steps} steps have not ended yet.")
            return f"after {gate._done} steps, waited {(time.monotonic() - start) * 1e3:.0f} ms"

    def resume(self, info: Optional[ResumeInfo] = None) -> None:
        """The hook on_resume: steps begin again."""
        gate = self._gate
        with gate._changed:
            if info is not None:
                self.version = info.version
                self.removed = info.removed
            gate._pausing.discard(self._model)
            gate._changed.notify_all()
