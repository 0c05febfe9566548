"""Loads that go on after they were given up, and loaders that do not take what they are given."""

import asyncio
import concurrent.futures
import contextlib
import threading
import time

import numpy
import pytest
import weightsync
from weightsync import InstalledState, WeightsyncError

import cluster


@pytest.fixture(scope="module")
def address():
    with cluster.Cluster() as here:
        yield here.nodes[0].socket


_count = iter(range(1_000_000))


@pytest.fixture
def model():
    return f"l{next(_count)}"


NAMES = ("a", "b", "c")


def weights(value):
    return {name: numpy.full((16, 8), value + i, numpy.float32) for i, name in enumerate(NAMES)}


def same(taken, value):
    expected = weights(value)
    return taken.keys() == expected.keys() and all(numpy.array_equal(taken[n], expected[n]) for n in expected)


@contextlib.contextmanager
def served(address, model, **options):
    """A trainer that has registered, the worker, and what came of its attempts."""
    applied = []
    with weightsync.Trainer(model, address=address) as trainer, weightsync.Worker(
        model,
        "r",
        {name: ((16, 8), "f32") for name in NAMES},
        views="numpy",
        address=address,
        on_applied=applied.append,
        **options,
    ) as worker:
        trainer.register(weights(0))
        worker.wait_registered()
        yield trainer, worker, applied


@pytest.mark.parametrize("mode", ["stage", "stream"])
def test_weights_that_are_asked_for_too_late_are_not_read(address, model, mode):
    """What they would be read from is gone then; whoever asks hears it, and the next update is whole."""
    taken, release, heard = {}, threading.Event(), []

    def first(pairs):
        pairs = iter(pairs)
        next(pairs)
        assert release.wait(60)
        try:
            heard.append(next(pairs))
        except WeightsyncError as error:
            heard.append(error)
            raise

    def rest(pairs):
        taken.update((name, tensor.copy()) for name, tensor in pairs)

    jobs = iter([first])
    with concurrent.futures.ThreadPoolExecutor(4) as pool, served(
        address,
        model,
        load_weights=lambda pairs: pool.submit(next(jobs, rest), pairs),
        load_timeout=0.1,
    ) as (trainer, worker, applied):
        trainer.publish(update_mode=mode, tensors=weights(1))
        try:
            cluster.wait_until(lambda: applied, "nothing was applied", 60)
            assert applied[0].failure[0] == "LOAD_TIMEOUT"
        finally:
            release.set()
        cluster.wait_until(lambda: heard, "it still waits", 60)
        assert isinstance(heard[0], WeightsyncError) and heard[0].reason == "LOAD_ENDED", heard
        # A stream that has failed is not sent again by itself.
        if mode == "stream":
            trainer.publish(tensors=weights(1))
        worker.wait_installed(0, 60)
        assert same(taken, 1)


class LateCopies:
    """An engine whose first load ends when it is told to, long after its deadline: what it copies comes last."""

    def __init__(self, kind):
        self.kind = kind
        self.taken = {}
        self.release = threading.Event()
        self.ended = threading.Event()
        self._first = True
        self._pool = concurrent.futures.ThreadPoolExecutor(2)

    def _copy(self, pairs, wait):
        if wait:
            assert self.release.wait(60)
        self.taken.update(pairs)
        if wait:
            time.sleep(0.05)
            self.ended.set()

    def _handed(self, pairs):
        pairs = {name: tensor.copy() for name, tensor in pairs}
        wait, self._first = self._first, False
        if self.kind == "by hand":
            # Nobody says that it runs: it looks as if it had not begun.
            future = concurrent.futures.Future()

            def run():
                self._copy(pairs, wait)
                future.set_result(None)

            threading.Thread(target=run, daemon=True).start()
            return future
        if self.kind == "coroutine":

            async def run():
                # Cancelling it would not end what its thread does.
                await asyncio.get_running_loop().run_in_executor(self._pool, self._copy, pairs, wait)

            return run()
        return self._pool.submit(self._copy, pairs, wait)

    def load(self, name, tensor):
        return self._handed([(name, tensor)])

    def load_weights(self, pairs):
        return self._handed(pairs)


@pytest.mark.parametrize("how", ["load", "load_weights"])
@pytest.mark.parametrize("kind", ["by a pool", "by hand", "coroutine"])
def test_a_late_copy_never_comes_after_a_newer_version(address, model, kind, how):
    """Version 2 is not installed before the load of version 1, which was given up, has ended."""
    engine = LateCopies(kind)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        with served(
            address, model, load_timeout=0.2, loop=loop, **{how: getattr(engine, how)}
        ) as (trainer, worker, applied):
            trainer.publish(tensors=weights(1))
            cluster.wait_until(lambda: applied, "nothing was applied", 60)
            assert applied[0].failure[0] == "LOAD_TIMEOUT"
            trainer.publish(tensors=weights(2))
            cluster.wait_until(lambda: len(applied) >= 3, "it is not tried again", 60)
            assert all(one.failure and one.failure[0] == "LOAD_TIMEOUT" for one in applied), applied
            assert worker.installed.state == InstalledState.WRITING and worker.version == 0
            assert not engine.ended.is_set()
            engine.release.set()
            worker.wait_installed(2, 60)
            assert engine.ended.is_set()
            assert same(engine.taken, 2)
    finally:
        engine.release.set()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def generator(pairs):
    for _ in pairs:
        yield


@pytest.mark.parametrize("mode", ["stage", "stream"])
@pytest.mark.parametrize(
    "load_weights, reason, word",
    [
        (lambda pairs: next(iter(pairs)), "LOAD_INCOMPLETE", "without b"),
        (lambda pairs: None, "LOAD_INCOMPLETE", "without a"),
        (generator, "HOOK_INVALID", "yield"),
    ],
)
def test_a_loader_that_leaves_tensors_has_not_loaded(address, model, load_weights, reason, word, mode):
    with served(address, model, load_weights=load_weights) as (trainer, worker, applied):
        result = trainer.publish(update_mode=mode).wait(60)
        assert worker.version == 0 and worker.installed.state == InstalledState.WRITING
        assert applied and all(one.failure is not None for one in applied)
        assert str(result).startswith("no replica serves") and word in str(result), result
        if mode == "stage":
            assert {one.failure[0] for one in applied} == {reason} and reason in str(result)


def test_a_load_callback_that_is_a_generator_has_not_loaded(address, model):
    def load(name, tensor):
        yield name

    with served(address, model, load=load) as (trainer, worker, applied):
        result = trainer.publish().wait(60)
        assert worker.version == 0 and "HOOK_INVALID" in str(result), result
