"""What hooks return: waited for, with a deadline, whatever kind of promise it is."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import time
from typing import Any, Callable, Optional

from .errors import CancelledError, DeadlineExceededError, FailedPreconditionError, invalid


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
        """What `result`, or what it is a promise of, is in the end; HOOK_TIMEOUT, and it is cancelled."""
        promise = self.promise(result)
        try:
            return promise.wait(timeout)
        except DeadlineExceededError:
            if not promise.done():
                promise.cancel()
            raise

    def promise(self, result: Any) -> "Promise":
        """The same, to be waited for more than once."""
        if isinstance(result, concurrent.futures.Future):
            return _Future(result)
        if inspect.isawaitable(result):
            return _Awaitable(result, self._loop)
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise invalid(
                "HOOK_INVALID",
                f"A hook returned the generator {getattr(result, '__name__', '')}: a function with `yield` in it "
                "does nothing when it is called; return a value, a future or a coroutine.",
            )
        done = getattr(result, "done", None) or getattr(result, "ready", None)
        value = getattr(result, "result", None) or getattr(result, "value", None) or getattr(result, "get", None)
        if isinstance(result, type) or not callable(done) or not callable(value):
            return Promise(result)
        return _Other(done, value)


class Promise:
    """A value that is there, and what its subclasses wait for."""

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def wait(self, timeout: float) -> Any:
        """What it ends with. HOOK_TIMEOUT where it has not (done() is false then): it goes on."""
        del timeout
        return self._value

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        """Asks it to end."""

    def forget(self) -> None:
        """Ends it if nothing of it has begun."""


class _Future(Promise):
    def __init__(self, future: "concurrent.futures.Future[Any]") -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: float) -> Any:
        try:
            return self._future.result(timeout)
        except concurrent.futures.TimeoutError:
            if not self._future.done():
                raise _late(timeout) from None
            return self._future.result(0)
        except concurrent.futures.CancelledError as error:
            raise _cancelled(error) from error

    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        self._future.cancel()


class _Awaitable(Promise):
    """Begins when it is first waited for."""

    def __init__(self, awaitable: Any, loop: Optional[asyncio.AbstractEventLoop]) -> None:
        super().__init__()
        self._awaitable = awaitable
        self._loop = loop
        self._task: Optional["asyncio.Task[Any]"] = None
        # Ends with the task, and not when that is asked to end.
        self._end: "concurrent.futures.Future[Any]" = concurrent.futures.Future()
        self._begun = False

    def wait(self, timeout: float) -> Any:
        if not self._begun:
            self._begun = True
            if self._loop is None or self._loop.is_closed():
                self._run(timeout)
            else:
                self._loop.call_soon_threadsafe(self._start)
        elif not self._end.done() and self._loop is not None and self._loop.is_closed():
            self._end.set_exception(_cancelled(RuntimeError("its event loop was closed")))
        try:
            return self._end.result(timeout)
        except concurrent.futures.TimeoutError:
            if not self._end.done():
                raise _late(timeout) from None
            return self._end.result(0)

    def done(self) -> bool:
        return self._end.done()

    def cancel(self) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        # After _start, where that is on its way.
        self._loop.call_soon_threadsafe(lambda: None if self._task is None else self._task.cancel())

    def forget(self) -> None:
        if not self._begun and inspect.iscoroutine(self._awaitable):
            self._begun = True
            self._awaitable.close()
            self._end.set_exception(_cancelled(RuntimeError("it was not begun")))

    async def _ended(self) -> Any:
        return await self._awaitable

    def _start(self) -> None:
        self._task = asyncio.ensure_future(self._ended())
        self._task.add_done_callback(self._finish)

    def _finish(self, task: "asyncio.Task[Any]") -> None:
        if self._end.done():
            return
        try:
            self._end.set_result(task.result())
        except asyncio.CancelledError as error:
            self._end.set_exception(_cancelled(error))
        except BaseException as error:  # noqa: BLE001  whoever waits raises it
            self._end.set_exception(error)

    def _run(self, timeout: float) -> None:
        """Without a loop: runs it here, to its end or to the deadline."""
        if isinstance(self._awaitable, asyncio.Future):
            raise FailedPreconditionError(
                "LOOP_MISSING", "A hook returned an asyncio future; say with `loop` which loop it is of."
            )

        async def bounded() -> bool:
            task = asyncio.ensure_future(self._ended())
            done, _ = await asyncio.wait({task}, timeout=timeout)
            if done:
                self._finish(task)
                return True
            task.cancel()
            return False

        if not asyncio.run(bounded()):
            # run() has waited for what was cancelled.
            self._end.set_exception(_cancelled(RuntimeError("it did not end in time")))
            raise _late(timeout)


class _Other(Promise):
    """A future of another library (torch.futures, multiprocessing): it must not be taken for done."""

    def __init__(self, done: Callable[[], Any], value: Callable[[], Any]) -> None:
        super().__init__()
        self._is_done = done
        self._get = value

    def wait(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        pause = 0.0002
        while not self._is_done():
            if time.monotonic() >= deadline:
                raise _late(timeout)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return self._get()

    def done(self) -> bool:
        return bool(self._is_done())


def _cancelled(error: BaseException) -> CancelledError:
    why = f": {error}" if str(error) else "."
    return CancelledError("HOOK_CANCELLED", f"What a hook has returned was cancelled{why}")


def _late(timeout: float) -> DeadlineExceededError:
    return DeadlineExceededError("HOOK_TIMEOUT", f"A hook did not end in {timeout:.0f} s.")
