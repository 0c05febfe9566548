"""What hooks return: waited for, with a deadline, whatever kind of promise it is."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import time
from typing import Any, Optional

from .errors import CancelledError, DeadlineExceededError, FailedPreconditionError


class Loop:
    """Runs hooks of either kind on the library's threads, coroutines on the engine's event loop."""

    def __init__(self, loop: Optional[asyncio.AbstractEventLoop]) -> None:
        if loop is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                pass
        self._loop = loop

    def wait(self, result: Any, timeout: float) -> Any:
        """What `result`, or what it is a promise of, is in the end."""
        if isinstance(result, concurrent.futures.Future):
            return self._result(result, timeout)
        if not inspect.isawaitable(result):
            return self._result_of_another(result, timeout)

        async def wait_for() -> Any:
            return await result

        if self._loop is None or self._loop.is_closed():
            if isinstance(result, asyncio.Future):
                raise FailedPreconditionError(
                    "LOOP_MISSING", "A hook returned an asyncio future; say with `loop` which loop it is of."
                )

            async def bounded() -> Any:
                task = asyncio.ensure_future(wait_for())
                done, _ = await asyncio.wait({task}, timeout=timeout)
                if not done:
                    task.cancel()
                    raise _late(timeout)
                return task.result()

            try:
                return asyncio.run(bounded())
            except asyncio.CancelledError as error:
                raise _cancelled(error) from error
        return self._result(asyncio.run_coroutine_threadsafe(wait_for(), self._loop), timeout)

    @staticmethod
    def _result(future: "concurrent.futures.Future[Any]", timeout: float) -> Any:
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise _late(timeout) from None
        except concurrent.futures.CancelledError as error:
            raise _cancelled(error) from error

    @staticmethod
    def _result_of_another(result: Any, timeout: float) -> Any:
        """Of a future of another library (torch.futures, multiprocessing): it must not be taken for done."""
        done = getattr(result, "done", None) or getattr(result, "ready", None)
        value = getattr(result, "result", None) or getattr(result, "value", None) or getattr(result, "get", None)
        if isinstance(result, type) or not callable(done) or not callable(value):
            return result
        deadline = time.monotonic() + timeout
        pause = 0.0002
        while not done():
            if time.monotonic() >= deadline:
                raise _late(timeout)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return value()


def _cancelled(error: BaseException) -> CancelledError:
    why = f": {error}" if str(error) else "."
    return CancelledError("HOOK_CANCELLED", f"What a hook has returned was cancelled{why}")


def _late(timeout: float) -> DeadlineExceededError:
    return DeadlineExceededError("HOOK_TIMEOUT", f"A hook did not end in {timeout:.0f} s.")
