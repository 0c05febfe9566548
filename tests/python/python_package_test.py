"""The Python package over a real daemon on this machine: numpy, hooks, errors, several ranks and workers."""

import asyncio
import concurrent.futures
import mmap
import multiprocessing.pool
import multiprocessing.shared_memory
import os
import pathlib
import subprocess
import sys
import threading
import time
import warnings

import ml_dtypes
import numpy
import pytest
import weightsync
from weightsync import WeightsyncError

import cluster


@pytest.fixture(scope="module")
def daemon():
    with cluster.Cluster() as here:
        yield here


@pytest.fixture
def address(daemon):
    return daemon.nodes[0].socket


_count = iter(range(1_000_000))


@pytest.fixture
def model():
    """A name that no other test uses."""
    return f"m{next(_count)}"


def bits(array):
    return numpy.ascontiguousarray(array).tobytes()


def weights(seed=0):
    random = numpy.random.default_rng(seed)
    return {
        "a.weight": random.standard_normal((48, 20)).astype(numpy.float32),
        "b.weight": random.standard_normal((7, 5, 3)).astype(ml_dtypes.bfloat16),
        "c.scale": random.standard_normal((64,)).astype(ml_dtypes.float8_e4m3fn),
        "d.ids": random.integers(0, 9, (11,), dtype=numpy.int64),
        "e.scalar": numpy.array(random.standard_normal(), dtype=numpy.float16),
    }


def empty_like(tensors):
    return {name: numpy.zeros_like(tensor) for name, tensor in tensors.items()}


def same(left, right):
    return all(bits(left[name]) == bits(right[name]) for name in left)


class Engine:
    """Notes its hooks; `running` is what a real one would look at before each step."""

    def __init__(self):
        self.running = True
        self.seen = []

    def pause(self, request):
        self.running = False
        self.seen.append(("pause", request.mode.name))
        return "drained 3 requests"

    def resume(self, info):
        self.seen.append(("resume", info.version, info.weights_changed))
        self.running = True


def test_versions_arrive(address, model):
    mine, live, engine = weights(), empty_like(weights()), Engine()
    versions = []
    with weightsync.Trainer(model, address=address) as trainer, weightsync.Worker(
        model,
        "r",
        live,
        address=address,
        on_pause=engine.pause,
        on_resume=engine.resume,
        on_version=lambda info: versions.append((info.version, info.step)),
    ) as worker:
        trainer.register(mine)
        worker.wait_registered()
        assert worker.installed.state == weightsync.InstalledState.ORIGINAL
        assert trainer.node == "nodes/node0"
        with weightsync.Admin(address) as admin:
            # Its node has made room for it.
            cluster.wait_until(
                lambda: admin.call("GetModel", name=f"models/{model}").replica_count == 1
                and admin.call("GetReplica", name=f"models/{model}/replicas/r").state == 2,  # SERVING
                "the replica is not whole",
            )
        prepared = trainer.prepare()
        assert prepared["bucket_count"] >= 1
        for step in (10, 20):
            for name, tensor in weights(step).items():
                mine[name][...] = tensor
            update = trainer.publish(step=step)
            # From here on they may be changed.
            for tensor in mine.values():
                tensor[...] = 0
            result = update.wait(60)
            assert same(live, weights(step))
            assert worker.wait_installed(result.version, 20).version == result.version
        assert result.state == weightsync.State.ACTIVE
        assert (result.version, result.step) == (2, 20)
        assert result.version_name == f"models/{model}/versions/2"
        assert result.total_bytes == sum(tensor.nbytes for tensor in mine.values())
        assert result.copied_bytes == result.total_bytes
        assert result.replica_count == 1
        assert 0 < result.stall_seconds < 30
        assert result.phases["total"] > 0
        assert result.as_dict()["update_id"] == update.update_id
        assert update.result is result
        assert update.done()
    assert versions == [(1, 10), (2, 20)]
    assert [event[0] for event in engine.seen] == ["pause", "resume"] * 2
    assert engine.seen[-1] == ("resume", 2, True)


def test_options_reach_the_engine(address, model):
    live, engine = empty_like(weights()), Engine()
    with weightsync.Trainer(model, address=address) as trainer, weightsync.Worker(
        model, "r", live, address=address, on_pause=engine.pause, on_resume=engine.resume
    ) as worker:
        trainer.register(weights(1))
        worker.wait_registered()
        result = trainer.publish(
            version=7, pause_mode="abort", update_mode="stream", on_straggler="evict", delivery_policy="latest"
        ).wait(60)
        assert result.version == 7
        assert engine.seen[0] == ("pause", "ABORT")
        assert same(live, weights(1))
        result = trainer.publish(pause_mode=weightsync.PauseMode.KEEP, rolling=1, verify_source=True).wait(60)
        assert (result.version, engine.seen[2]) == (8, ("pause", "KEEP"))
        with pytest.raises(WeightsyncError, match="update_mode|UpdateMode") as error:
            trainer.publish(update_mode="sideways")
        assert error.value.reason == "OPTION_UNKNOWN"
        with pytest.raises(weightsync.FailedPreconditionError) as error:
            trainer.publish(version=3)
        assert error.value.reason == "VERSION_NOT_NEWER"
        assert error.value.metadata["object"] == f"rank 0 of {model}"


def test_new_tensors_of_the_same_layout(address, model):
    live = empty_like(weights())
    with weightsync.Trainer(model, address=address) as trainer, weightsync.Worker(
        model, "r", live, address=address
    ) as worker:
        # The first ones make the registration; all are temporaries.
        trainer.publish(tensors=((name, tensor) for name, tensor in weights(1).items())).wait(60)
        worker.wait_installed(1, 20)
        trainer.publish(tensors=weights(2)).wait(60)
        assert same(live, weights(2))
        # Views of any strides, backwards as well.
        turned = {name: numpy.array(tensor, order="F") for name, tensor in weights(3).items()}
        turned["a.weight"] = turned["a.weight"][::-1][::-1]
        turned["d.ids"] = turned["d.ids"][::-1]
        trainer.publish(tensors=turned).wait(60)
        expected = weights(3)
        expected["d.ids"] = expected["d.ids"][::-1]
        assert same(live, expected)
        for broken in ("a.weight", "d.ids"):
            other = weights(4)
            other[broken] = other[broken][:-1]
            with pytest.raises(ValueError) as error:
                trainer.publish(tensors=other)
            assert error.value.reason == "LAYOUT_CHANGED" and broken in str(error.value)
        other = weights(4)
        del other["b.weight"]
        with pytest.raises(ValueError, match="b.weight is missing"):
            trainer.publish(tensors=other)
        assert same(live, expected)


def test_ranks_may_be_threads(address, model):
    """Four ranks that hold rows of one matrix, each in a thread; two workers that want columns of it."""
    whole = numpy.arange(64 * 6, dtype=numpy.float32).reshape(64, 6)
    halves = [numpy.zeros((64, 3), numpy.float32) for _ in range(2)]
    replica = weightsync.Replica(model, "r", workers=2, address=address)
    workers = [
        replica.worker({"w": weightsync.Shard(half, (0, 3 * i), (64, 6))}, index=i)
        for i, half in enumerate(halves)
    ]
    stop = threading.Barrier(4, timeout=60)
    results = [None] * 4

    def rank(i):
        with weightsync.Trainer(model, i, 4, address=address) as trainer:
            rows = whole[16 * i : 16 * (i + 1)].copy()
            trainer.register([("w", weightsync.Shard(rows, (16 * i, 0), (64, 6)))])
            trainer.prepare()
            for step in (1, 2):
                rows[...] = whole[16 * i : 16 * (i + 1)] * step
                results[i] = trainer.publish(step=step).wait(60)
            stop.wait()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for worker in workers:
            worker.wait_registered()
        list(pool.map(rank, range(4)))
    assert {result.version for result in results} == {2}
    assert {result.copied_bytes for result in results} == {16 * 6 * 4}
    for i, half in enumerate(halves):
        assert numpy.array_equal(half, whole[:, 3 * i : 3 * i + 3] * 2)
    assert replica.version == 2 and not replica.paused
    for owner in (*workers, replica):
        owner.close()


def test_a_load_callback_takes_every_tensor(address, model):
    """All of the model, without knowing it before; one future comes late."""
    pool = concurrent.futures.ThreadPoolExecutor(2)
    taken = {}

    def take(name, tensor):
        time.sleep(0.05)
        taken[name] = tensor.copy()

    with weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(1))
        with weightsync.Worker(
            model, "r", load=lambda name, tensor: pool.submit(take, name, tensor), views="numpy", address=address
        ) as worker:
            worker.wait_registered()
            trainer.publish().wait(60)
            assert sorted(taken) == sorted(weights())
            assert same(taken, weights(1))
            assert taken["b.weight"].dtype == ml_dtypes.bfloat16
    pool.shutdown()


def test_a_loader_may_take_everything_at_once(address, model):
    calls = []

    def load_weights(pairs):
        calls.append({name: tensor.copy() for name, tensor in pairs})

    with weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(1))
        with weightsync.Worker(model, "r", load_weights=load_weights, views="numpy", address=address) as worker:
            worker.wait_registered()
            trainer.publish().wait(60)
            trainer.publish(tensors=weights(2)).wait(60)
    assert len(calls) == 2 and same(calls[0], weights(1)) and same(calls[1], weights(2))


def test_what_a_loader_raises_leaves_a_mix_until_it_works(address, model):
    attempts, applied = [], []

    def load(name, tensor):
        attempts.append(name)
        if len(attempts) < 3:
            raise weightsync.ResourceExhaustedError("NO_MEMORY", f"no room for {name}")

    with weightsync.Trainer(model, address=address) as trainer, weightsync.Worker(
        model,
        "r",
        {"w": ((4,), "f32")},
        load=load,
        views="numpy",
        address=address,
        on_applied=applied.append,
    ) as worker:
        trainer.register({"w": numpy.ones(4, numpy.float32)})
        worker.wait_registered()
        result = trainer.publish().wait(60)
        assert result.state == weightsync.State.ACTIVE
        assert worker.version == 1
    assert [a.failure and a.failure[0] for a in applied] == ["NO_MEMORY", "NO_MEMORY", None]
    assert applied[-1].copied_bytes == 16


def _ends_with(kind, error, pool):
    """What a load callback does that ends with `error`."""

    def raises(*_):
        raise error

    async def coroutine():
        raise error

    def callback(name, tensor):
        if kind == "raised":
            raises()
        if kind == "coroutine":
            return coroutine()
        if kind == "torch":
            import torch

            future = torch.futures.Future()
            future.set_exception(error)
            return future
        if kind == "multiprocessing":
            return pool.apply_async(raises)
        future = concurrent.futures.Future()
        future.set_exception(error)
        return future

    return callback


@pytest.mark.parametrize("mode", ["stage", "stream"])
@pytest.mark.parametrize("kind", ["raised", "future", "coroutine", "torch", "multiprocessing"])
def test_who_published_hears_what_a_load_callback_ended_with(address, model, kind, mode):
    """Raised at once or by what it returned: the same words, and nothing counts as loaded."""
    error = weightsync.DeadlineExceededError("ALLOCATOR_STUCK", "the allocator did not answer")
    applied = []
    with multiprocessing.pool.ThreadPool(1) as pool, weightsync.Trainer(model, address=address) as trainer:
        with weightsync.Worker(
            model,
            "r",
            {"w": ((4,), "f32")},
            load=_ends_with(kind, error, pool),
            views="numpy",
            address=address,
            on_applied=applied.append,
        ) as worker:
            trainer.register({"w": numpy.ones(4, numpy.float32)})
            worker.wait_registered()
            result = trainer.publish(update_mode=mode).wait(60)
            assert worker.version == 0
    assert str(result).startswith(f"no replica serves models/{model}/versions/1; left out: r (")
    assert "the allocator did not answer" in str(result), result
    if mode == "stage":
        assert "ALLOCATOR_STUCK" in str(result), result
        assert applied[0].failure == ("ALLOCATOR_STUCK", "the allocator did not answer")


def test_a_cancelled_load_says_so(address, model):
    def load(name, tensor):
        future = concurrent.futures.Future()
        future.cancel()
        return future

    with weightsync.Trainer(model, address=address) as trainer:
        with weightsync.Worker(
            model, "r", {"w": ((4,), "f32")}, load=load, views="numpy", address=address
        ) as worker:
            trainer.register({"w": numpy.ones(4, numpy.float32)})
            worker.wait_registered()
            result = trainer.publish().wait(60)
    assert "HOOK_CANCELLED" in str(result) and "was cancelled" in str(result), result


def test_who_published_hears_that_an_engine_does_not_go_on(address, model):
    def resume(info):
        raise RuntimeError("no room for a cache")

    live = empty_like(weights())
    with weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(1))
        with weightsync.Worker(model, "r", live, address=address, on_resume=resume) as worker:
            worker.wait_registered()
            result = trainer.publish().wait(60)
    assert str(result).startswith("no replica serves") and "no room for a cache" in str(result), result


def test_hooks_may_be_coroutines(address, model):
    live = empty_like(weights())
    log = []

    async def main():
        loop = asyncio.get_running_loop()

        async def pause(request):
            assert asyncio.get_running_loop() is loop
            await asyncio.sleep(0.01)
            log.append("pause")
            return "drained 0 requests"

        async def resume(info):
            await asyncio.sleep(0.01)
            log.append(("resume", info.version))

        worker = weightsync.Worker(model, "r", live, address=address, on_pause=pause, on_resume=resume)
        with weightsync.Trainer(model, address=address) as trainer:
            trainer.register(weights(1))
            await asyncio.to_thread(worker.wait_registered)
            update = trainer.publish()
            await asyncio.to_thread(update.wait, 60)
        await asyncio.to_thread(worker.close)

    asyncio.run(main())
    assert log == ["pause", ("resume", 1)]


def test_a_load_callback_may_be_a_coroutine(address, model):
    taken = {}

    async def main():
        loop = asyncio.get_running_loop()

        async def load(name, tensor):
            assert asyncio.get_running_loop() is loop
            await asyncio.sleep(0.01)
            taken[name] = tensor.copy()

        with weightsync.Trainer(model, address=address) as trainer:
            trainer.register(weights(1))
            worker = await asyncio.to_thread(
                lambda: weightsync.Worker(model, "r", load=load, views="numpy", address=address, loop=loop)
            )
            await asyncio.to_thread(worker.wait_registered)
            await asyncio.to_thread(trainer.publish().wait, 60)
            await asyncio.to_thread(worker.close)

    asyncio.run(main())
    assert same(taken, weights(1))


def test_a_load_that_never_ends_has_a_deadline(address, model):
    applied = []
    with weightsync.Trainer(model, address=address) as trainer, weightsync.Worker(
        model,
        "r",
        {"w": ((4,), "f32")},
        load=lambda name, tensor: concurrent.futures.Future(),
        load_timeout=0.1,
        views="numpy",
        address=address,
        on_applied=applied.append,
    ) as worker:
        trainer.register({"w": numpy.ones(4, numpy.float32)})
        worker.wait_registered()
        update = trainer.publish()
        cluster.wait_until(lambda: applied, "nothing was applied", 60)
        assert applied[0].failure[0] == "LOAD_TIMEOUT" and "w" in applied[0].failure[1]
        assert worker.installed.state == weightsync.InstalledState.WRITING and worker.version == 0
        del update


def test_an_engine_that_raises_in_its_hook(address, model):
    """The update is given up with the hook's reason, and the replica serves what it served."""
    live, engine = empty_like(weights()), Engine()

    def pause(request):
        raise RuntimeError("the scheduler is gone")

    worker = weightsync.Worker(model, "r", live, address=address, on_pause=pause, on_resume=engine.resume)
    with worker, weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(1))
        worker.wait_registered()
        update = trainer.publish()
        with pytest.raises(WeightsyncError) as error:
            update.wait(60)
        assert error.value.reason == "HOOK_FAILED"
        assert "the scheduler is gone" in error.value.message
        progress = update.progress()
        assert progress.state == weightsync.State.ABORTED
        assert progress.failure[0] == "HOOK_FAILED"
        assert worker.installed.state == weightsync.InstalledState.ORIGINAL
        assert same(live, empty_like(live))


def test_a_worker_that_wants_what_is_not_there(address, model):
    with weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(1))
        wrong_shape = {**empty_like(weights()), "a.weight": numpy.zeros((48, 21), numpy.float32)}
        wrong_type = {**empty_like(weights()), "a.weight": numpy.zeros((48, 20), numpy.float16)}
        unknown = {**empty_like(weights()), "z": numpy.zeros(1, numpy.float16)}
        for number, (live, reason, name) in enumerate(
            [
                (wrong_shape, "SHAPE_MISMATCH", "a.weight"),
                (wrong_type, "DTYPE_MISMATCH", "a.weight"),
                (unknown, "PARAMETER_UNKNOWN", "z"),
            ]
        ):
            with weightsync.Worker(model, f"r{number}", live, address=address) as worker:
                with pytest.raises(WeightsyncError) as error:
                    worker.wait_registered(20)
                assert error.value.reason == reason
                assert name in error.value.message
                assert worker.ended


def test_names_that_are_missing_and_extra_may_be_allowed(address, model):
    live = {"a.weight": numpy.zeros((48, 20), numpy.float32), "z": numpy.full(2, 5, numpy.float32)}
    with weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(1))
        with pytest.warns(weightsync.names.PatternWarning) as warned:
            worker = weightsync.Worker(model, "r", live, address=address, policy="warn")
        assert ["(z…)" in str(w.message) for w in warned] == [True, False]
        assert "4 parameters" in str(warned[1].message)
        with worker:
            worker.wait_registered()
            trainer.publish().wait(60)
        assert bits(live["a.weight"]) == bits(weights(1)["a.weight"])
        assert list(live["z"]) == [5, 5]


def test_tied_names_are_sent_once(address, model):
    shared = numpy.ones((4, 4), numpy.float32)
    live = {"embed": numpy.zeros((4, 4), numpy.float32)}
    with weightsync.Trainer(model, address=address) as trainer, weightsync.Worker(
        model, "r", live, address=address
    ) as worker:
        trainer.register({"embed": shared, "head": shared})
        assert trainer.tied_names == {"head": "embed"}
        worker.wait_registered()
        assert trainer.publish().wait(60).total_bytes == 64
    with weightsync.Trainer(f"{model}.2", address=address, tied="keep") as trainer:
        trainer.register({"embed": shared, "head": shared})
        assert not trainer.tied_names
        assert trainer.publish().wait(60).total_bytes == 128


def test_an_engine_that_dropped_its_weights_gets_them_again(address, model):
    live = empty_like(weights())
    with weightsync.Trainer(model, address=address) as trainer, weightsync.Worker(
        model, "r", live, address=address
    ) as worker:
        trainer.register(weights(1))
        worker.wait_registered()
        trainer.publish().wait(60)
        for how in (worker.mark_dropped, lambda: (worker.sleep(), worker.wake())):
            how()
            for tensor in live.values():
                tensor[...] = 0
            worker.wait_installed(1, 30)
            assert same(live, weights(1))


def test_swapping_between_two_sets(address, model):
    sets, flips, engine = [empty_like(weights()), empty_like(weights())], [], Engine()
    with weightsync.Trainer(model, address=address) as trainer, weightsync.Worker(
        model,
        "r",
        sets[0],
        spare=sets[1],
        swap=lambda number, update_id: flips.append(number),
        address=address,
        on_pause=engine.pause,
        on_resume=engine.resume,
    ) as worker:
        trainer.register(weights(1))
        worker.wait_registered()
        trainer.publish(pause_mode="none").wait(60)
        trainer.publish(pause_mode="none", tensors=weights(2)).wait(60)
    assert flips == [1, 0]
    assert same(sets[1], weights(1)) and same(sets[0], weights(2))
    assert [event[0] for event in engine.seen] == ["resume", "resume"]


def test_a_gate_waits_for_the_steps_that_run():
    gate, inside, leave = weightsync.Gate(), threading.Event(), threading.Event()

    def step():
        with gate:
            inside.set()
            assert leave.wait(20)

    thread = threading.Thread(target=step)
    thread.start()
    assert inside.wait(20)
    request = weightsync.PauseRequest("u", 1, weightsync.PauseMode.DRAIN, 0.05)
    with pytest.raises(TimeoutError) as error:
        gate.pause(request)
    assert error.value.reason == "STEP_TOO_LONG"
    leave.set()
    assert "after 1 steps" in gate.pause(weightsync.PauseRequest("u", 1, weightsync.PauseMode.DRAIN, 20))
    entered = threading.Event()

    def late():
        with gate:
            entered.set()

    waiting = threading.Thread(target=late)
    waiting.start()
    assert not entered.wait(0.05) and gate.paused
    gate.resume(weightsync.ResumeInfo("u", 7, 0, True, weightsync.PauseMode.DRAIN))
    assert entered.wait(20) and gate.version == 7
    thread.join()
    waiting.join()


# ---- Memory that the client owns ----


@pytest.fixture
def segment():
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=1 << 20)
    yield memory
    try:
        memory.unlink()
    except FileNotFoundError:
        pass


def test_shared_memory_is_read_where_it_lies(address, model, segment):
    array = numpy.ndarray((1 << 18,), numpy.float32, segment.buf)
    array[...] = 1
    live = {"w": numpy.zeros(1 << 18, numpy.float32)}
    with weightsync.Trainer(model, address=address) as trainer, weightsync.Worker(
        model, "r", live, address=address
    ) as worker:
        trainer.register({"w": array})
        assert not trainer._arenas, "nothing was copied in this process"
        worker.wait_registered()
        array[...] = 2
        trainer.publish().wait(60)
        assert (live["w"] == 2).all()
        # Shrunk under the daemon: the update fails with a name, and the daemon lives.
        os.truncate(f"/dev/shm/{segment.name}", 4096)
        with pytest.raises(WeightsyncError) as error:
            trainer.publish().wait(60)
        assert error.value.reason == "SOURCE_MEMORY_LOST"
        os.truncate(f"/dev/shm/{segment.name}", 1 << 20)
        array[...] = 3
        trainer.publish().wait(60)
        assert (live["w"] == 3).all()
        del array


def test_shared_memory_that_is_gone_or_too_small(address, model, segment):
    raw = weightsync._capi
    with weightsync.Trainer(model, address=address) as trainer:
        base = numpy.ndarray((1 << 20,), numpy.uint8, segment.buf)
        for name, size, reason in [
            (b"/weightsync-vanished", 1 << 20, "MEMORY_UNKNOWN"),
            (f"/{segment.name}".encode(), 1 << 21, "MEMORY_OUT_OF_RANGE"),
        ]:
            at = base.__array_interface__["data"][0]
            trainer._handle.check(
                "use_shared_memory",
                raw.ctypes.byref(raw.SharedMemory(name=name, fd=-1, data=at, size_bytes=size)),
            )
            part = weightsync.tensors.parts_of("w", base)
            with pytest.raises(WeightsyncError) as error:
                trainer._handle.check("register", raw.tensors(part), 1, 20.0, None)
            assert error.value.reason == reason
        del base


def test_a_trainer_that_changes_its_tensors_too_early(address, model, segment):
    """publish(in_place) has not returned, and the tensors change: found, with verify_source, and named."""
    array = numpy.ndarray((1 << 20,), numpy.uint8, segment.buf)
    stop = threading.Event()

    def train():
        while not stop.is_set():
            numpy.add(array[::512], 1, out=array[::512])

    live = {"w": numpy.zeros(1 << 20, numpy.uint8)}
    training = threading.Thread(target=train)
    with weightsync.Trainer(model, address=address) as trainer, weightsync.Worker(
        model, "r", live, address=address
    ) as worker:
        trainer.register({"w": array})
        worker.wait_registered()
        training.start()
        try:
            # On a busy machine the other thread may stand still while both readings are done.
            with pytest.raises(weightsync.AbortedError) as error:
                for _ in range(50):
                    trainer.publish(publish_mode="in_place", verify_source=True).wait(60)
        finally:
            stop.set()
            training.join()
        assert error.value.reason == "SOURCE_CHANGED" and "rank 0" in error.value.message
        trainer.publish(publish_mode="in_place", verify_source=True).wait(60)
        assert (live["w"] == array).all()
        del array


@pytest.fixture
def anonymous():
    """A memfd: shared memory that never had a name."""
    fd = os.memfd_create("weights")
    os.ftruncate(fd, 1 << 20)
    memory = mmap.mmap(fd, 1 << 20)
    yield fd, memory
    try:
        os.close(fd)
    except OSError:
        pass


def test_a_memfd_is_read_where_it_lies(address, model, anonymous):
    fd, memory = anonymous
    array = numpy.ndarray((1 << 18,), numpy.float32, memory)
    live = {"w": numpy.zeros(1 << 18, numpy.float32)}
    with weightsync.Trainer(model, address=address) as trainer, weightsync.Worker(
        model, "r", live, address=address
    ) as worker:
        trainer.register({"w": array})
        assert not trainer._arenas, "nothing was copied in this process"
        worker.wait_registered()
        array[...] = 2
        trainer.publish().wait(60)
        assert (live["w"] == 2).all()
        # Shrunk under the daemon: the update fails with a name, and the daemon lives.
        os.ftruncate(fd, 4096)
        with pytest.raises(WeightsyncError) as error:
            trainer.publish().wait(60)
        assert error.value.reason == "SOURCE_MEMORY_LOST"
        os.ftruncate(fd, 1 << 20)
        # The library keeps a descriptor of its own.
        os.close(fd)
        array[...] = 3
        trainer.publish().wait(60)
        assert (live["w"] == 3).all()
        del array


def test_open_files_that_are_too_small_or_on_a_disk(address, model, anonymous):
    raw = weightsync._capi
    fd, memory = anonymous
    base = numpy.ndarray((1 << 20,), numpy.uint8, memory)
    at = base.__array_interface__["data"][0]
    with weightsync.Trainer(model, address=address) as trainer:

        def named(fd, size):
            given = raw.SharedMemory(name=None, fd=fd, data=at, size_bytes=size)
            trainer._handle.check("use_shared_memory", raw.ctypes.byref(given))
            trainer._handle.check("register", raw.tensors(weightsync.tensors.parts_of("w", base)), 1, 20.0, None)

        named(fd, 1 << 20)
        with pytest.raises(WeightsyncError) as error:
            named(fd, 1 << 21)
        assert error.value.reason == "MEMORY_OUT_OF_RANGE"
        with open(__file__, "rb") as disk, pytest.raises(WeightsyncError) as error:
            named(disk.fileno(), 1 << 20)
        assert error.value.reason == "NOT_MEMORY" and "on a disk" in error.value.message
    del base


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a daemon of another user")
def test_a_memfd_that_the_daemon_may_not_open_is_copied(model, anonymous):
    """The daemon is nobody's, and may not look at what root's processes have open."""
    array = numpy.ndarray((1 << 18,), numpy.float32, anonymous[1])
    live = {"w": numpy.zeros(1 << 18, numpy.float32)}
    with cluster.Cluster(user=65534) as here:
        address = here.nodes[0].listen
        with weightsync.Trainer(model, address=address) as trainer, weightsync.Worker(
            model, "r", live, address=address
        ) as worker:
            with pytest.warns(RuntimeWarning, match="copied"):
                trainer.register({"w": array})
            assert trainer._shards[0].target is not None
            worker.wait_registered()
            array[...] = 5
            trainer.publish().wait(60)
            assert (live["w"] == 5).all()
            # Once is enough to know it.
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                trainer.register({"w": array})
    del array


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a daemon of another user")
def test_shared_memory_of_another_user(model, segment):
    """The daemon is nobody's: what only root may read, it is not given."""
    with cluster.Cluster(user=65534) as here:
        with weightsync.Trainer(model, address=here.nodes[0].listen) as trainer:
            with pytest.raises(PermissionError) as error:
                trainer.register({"w": numpy.ndarray((16,), numpy.uint8, segment.buf)})
            assert error.value.reason == "MEMORY_DENIED"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a trainer of another user")
def test_a_daemon_of_root_gives_nobody_what_is_not_nobodys(daemon, model, segment, tmp_path):
    """The trainer is nobody's: the daemon could open root's memory, and does not do it for him."""
    program = """
import ctypes, sys
import numpy
import weightsync
from weightsync import _capi, tensors

address, name, model = sys.argv[1:]
array = numpy.zeros(4096, numpy.uint8)
with weightsync.Trainer(model, address=address) as trainer:
    at = array.__array_interface__["data"][0]
    memory = _capi.SharedMemory(name=name.encode(), fd=-1, data=at, size_bytes=4096)
    trainer._handle.check("use_shared_memory", ctypes.byref(memory))
    try:
        trainer._handle.check("register", _capi.tensors(tensors.parts_of("w", array)), 1, 20.0, None)
        print("registered")
    except weightsync.WeightsyncError as error:
        print(error.reason)
"""
    path = f"/dev/shm/{segment.name}"

    def said():
        return subprocess.run(
            [sys.executable, "-c", program, daemon.nodes[0].listen, f"/{segment.name}", model],
            capture_output=True,
            text=True,
            timeout=60,
            user=65534,
            group=65534,
            cwd="/",
        ).stdout.strip()

    os.chmod(path, 0o600)
    assert said() == "MEMORY_DENIED"
    os.chmod(path, 0o644)
    assert said() == "registered"


# ---- What goes wrong before anything moves ----


def test_nobody_answers():
    with pytest.raises(TimeoutError) as error:
        weightsync.Trainer("m", address="127.0.0.1:1", connect_timeout=0.3)
    assert error.value.reason == "REGISTER_TIMEOUT"


def test_wrong_arguments(address, model):
    for arguments, reason in [
        (dict(model=""), "NAME_INVALID"),
        (dict(model="Not A Name"), "MODEL_NAME_INVALID"),
        (dict(model=model, rank=2, world_size=2), "RANK_OUT_OF_RANGE"),
        (dict(model=model, address="nowhere"), "ADDRESS_INVALID"),
        (dict(model=model, tied="both"), "OPTION_UNKNOWN"),
    ]:
        with pytest.raises(ValueError) as error:
            weightsync.Trainer(**{"address": address, "connect_timeout": 5, **arguments})
        assert error.value.reason == reason
    with weightsync.Trainer(model, address=address) as trainer:
        with pytest.raises(weightsync.FailedPreconditionError, match="register"):
            trainer.publish()
        for given, reason in [
            (3, "TENSOR_UNKNOWN"),
            ({"w": [1, 2]}, "TENSOR_UNKNOWN"),
            ([("w",)], "TENSOR_UNKNOWN"),
            ({"w": numpy.zeros(2, numpy.complex64)}, "DTYPE_UNKNOWN"),
            ({"w": numpy.zeros((2, 0), numpy.float32)}, "SHAPE_INVALID"),
            ([("w", numpy.zeros(2)), ("w", numpy.zeros(2))], "DUPLICATE_NAME"),
        ]:
            with pytest.raises(ValueError) as error:
                trainer.register(given)
            assert error.value.reason == reason, given
    with pytest.raises(ValueError) as error:
        weightsync.Worker(model, "r", {"w": numpy.zeros(2)}, workers=2, address=address)
    assert error.value.reason == "INCARNATION_MISSING"
    frozen = numpy.zeros(2)
    frozen.flags.writeable = False
    for array, reason in [(frozen, "READ_ONLY"), (numpy.broadcast_to(numpy.float32(0), (3,)), "READ_ONLY")]:
        with pytest.raises(ValueError) as error:
            weightsync.Worker(model, "r", {"w": array}, address=address)
        assert error.value.reason == reason


def test_a_forked_child_is_told(address, model):
    with weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(1))
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            # Whatever happens, no second pytest goes on from here.
            code = 1
            try:
                said = b"no error"
                try:
                    trainer.publish()
                except BaseException as error:  # noqa: BLE001
                    said = getattr(error, "reason", repr(error)).encode()
                os.write(write, said)
                # As a real child would: objects end with it, and must not touch the parent's threads.
                del trainer
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        with os.fdopen(read, "rb") as answer:
            assert answer.read() == b"FORKED_PROCESS"
        _, status = os.waitpid(child, 0)
        assert status == 0
        trainer.publish().wait(60)


def test_errors_can_be_sent_to_other_processes():
    import pickle

    error = weightsync.NotFoundError("MODEL_UNKNOWN", "There is none.", metadata={"call": "x"})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is weightsync.NotFoundError and isinstance(again, LookupError)
    assert (again.reason, again.message, again.metadata) == (error.reason, error.message, error.metadata)
    assert str(again) == "MODEL_UNKNOWN: There is none."


# ---- Looking at a cluster ----


def test_admin(daemon, address, model):
    live = empty_like(weights())
    with weightsync.Trainer(model, address=address) as trainer, weightsync.Worker(
        model, "r", live, address=address
    ) as worker:
        trainer.register(weights(1))
        worker.wait_registered()
        trainer.publish().wait(60)
        for at in (address, daemon.nodes[0].listen, address.removeprefix("unix:")):
            with weightsync.Admin(at) as admin:
                found = admin.call("ListReplicas", parent=f"models/{model}").replicas
                assert [replica.name for replica in found] == [f"models/{model}/replicas/r"]
        with weightsync.Admin(address) as admin:
            states = [version.state for version in admin.watch(f"models/{model}/versions/1", timeout=20)]
            assert states[-1] == weightsync.State.ACTIVE
            with pytest.raises(weightsync.NotFoundError) as error:
                admin.call("GetModel", name="models/nowhere")
            assert error.value.reason == "MODEL_UNKNOWN"
            verified = admin.call("VerifyReplica", name=f"models/{model}/replicas/r", timeout=30)
            assert verified.equal
            live["d.ids"][0] += 1
            verified = admin.call("VerifyReplica", name=f"models/{model}/replicas/r", timeout=30)
            assert list(verified.workers[0].different_tensors) == ["d.ids"]


def test_the_package_is_typed():
    assert (pathlib.Path(weightsync.__file__).parent / "py.typed").exists()
    assert (pathlib.Path(weightsync.__file__).parent / "v1/admin_pb2.pyi").exists()


# ---- Components ----


def test_a_draft_switches_together_with_its_model(address, model):
    """Main and draft in one model; one replica takes both, another one the draft alone."""
    mine = {
        "w": numpy.ones((8, 4), numpy.float32),
        "draft.w": weightsync.Component(numpy.ones((2, 4), numpy.float32), "draft"),
    }
    both = {"w": numpy.zeros((8, 4), numpy.float32), "draft.w": numpy.zeros((2, 4), numpy.float32)}
    draft = {"draft.w": numpy.zeros((2, 4), numpy.float32)}
    seen = []

    def resume(info):
        # Never one of them without the other.
        seen.append((float(both["w"][0, 0]), float(both["draft.w"][0, 0])))

    with weightsync.Trainer(model, address=address) as trainer, weightsync.Worker(
        model, "both", both, address=address, on_resume=resume
    ) as first, weightsync.Worker(model, "draft", draft, address=address, partial=True) as second:
        trainer.register(mine)
        first.wait_registered()
        second.wait_registered()
        for value in (2, 3):
            mine["w"][...] = value
            mine["draft.w"].tensor[...] = value
            assert trainer.publish().wait(60).replica_count == 2
        with weightsync.Admin(address) as admin:
            parameters = admin.call("GetModel", name=f"models/{model}").parameters
            assert {p.name: p.component for p in parameters}["draft.w"] == "draft"
    assert seen == [(2, 2), (3, 3)]
    assert (draft["draft.w"] == 3).all()


# ---- A daemon that is started again ----


def test_everything_comes_back_when_the_daemon_does(segment):
    """The same objects go on: arenas lie where they lay, shared memory is named again, the worker registers."""
    copied, read = numpy.ones(5000, numpy.float32), numpy.ndarray((1 << 18,), numpy.float32, segment.buf)
    read[...] = 1
    live = {"copied": numpy.zeros_like(copied), "read": numpy.zeros_like(read)}
    with cluster.Cluster() as here:
        address = here.nodes[0].socket
        with weightsync.Trainer("m", address=address) as trainer, weightsync.Worker(
            "m", "r", live, address=address
        ) as worker:
            trainer.register({"copied": copied, "read": read})
            worker.wait_registered()
            trainer.publish().wait(60)
            here.restart_node(0)
            copied[...] = 2
            read[...] = 3
            worker.wait_registered(60)
            assert trainer.publish(timeout=60).wait(60).version == 2
            worker.wait_installed(2, 60)
            assert (live["copied"] == 2).all() and (live["read"] == 3).all()
    del read


# ---- Names on both sides ----


def test_a_trainer_and_an_engine_that_fuse_in_different_ways(address, model):
    """Two ranks hold Megatron's interleaved qkv by rows; the engine holds all queries, all keys, all values."""
    heads, kv_heads, dim, hidden = 8, 2, 4, 6
    random = numpy.random.default_rng(3)
    q, k, v = (random.random((n * dim, hidden), numpy.float32) for n in (heads, kv_heads, kv_heads))
    gate, up = (random.random((10, hidden), numpy.float32) for _ in range(2))
    groups = [part.reshape(kv_heads, -1, hidden)[g] for g in range(kv_heads) for part in (q, k, v)]
    megatron = numpy.concatenate(groups)
    rules = [
        weightsync.names.Rename(r"^decoder\.(\d+)\.", r"model.layers.\1."),
        weightsync.names.split_qkv(
            r"\.linear_qkv\.", heads, kv_heads, dim, (".q_proj.", ".k_proj.", ".v_proj."), interleaved=True
        ),
        weightsync.names.split_gate_up(r"\.linear_fc1\.", (".gate_proj.", ".up_proj.")),
    ]
    engine = {
        "model.layers.0.qkv_proj.weight": numpy.zeros_like(megatron),
        "model.layers.0.gate_up_proj.weight": numpy.zeros((20, hidden), numpy.float32),
    }
    rows = megatron.shape[0] // 2 + 3  # not at a group's border
    ranks = [weightsync.Trainer(model, rank, 2, address=address) for rank in range(2)]
    with ranks[0], ranks[1], weightsync.Worker(
        model,
        "r",
        engine,
        address=address,
        names=[
            weightsync.names.split_qkv(r"qkv_proj", heads, kv_heads, dim),
            weightsync.names.split_gate_up(),
        ],
    ) as worker:
        for rank, trainer in enumerate(ranks):
            mine = megatron[rows * rank :][:rows]
            weights = {"decoder.0.linear_qkv.weight": weightsync.Shard(mine, (rows * rank, 0), megatron.shape)}
            fc1 = numpy.concatenate([gate, up])
            weights["decoder.0.linear_fc1.weight"] = weightsync.Shard(fc1[10 * rank :][:10], (10 * rank, 0), fc1.shape)
            trainer.register(weights, names=rules)
        worker.wait_registered()
        updates = [trainer.publish() for trainer in ranks]
        assert [update.wait(60).version for update in updates] == [1, 1]
        with weightsync.Admin(address) as admin:
            found = {p.name for p in admin.call("GetModel", name=f"models/{model}").parameters}
    assert found == {f"model.layers.0.{n}_proj.weight" for n in ("q", "k", "v", "gate", "up")}
    assert numpy.array_equal(engine["model.layers.0.qkv_proj.weight"], numpy.concatenate([q, k, v]))
    assert numpy.array_equal(engine["model.layers.0.gate_up_proj.weight"], numpy.concatenate([gate, up]))


def test_verify_of_a_worker_with_a_loader_says_why_it_cannot(address, model):
    """Its tensors are the engine's, wherever it has put them."""
    taken = {}

    def load(name, tensor):
        taken[name] = numpy.array(tensor)

    wanted = {"w": ((4,), numpy.float32)}
    with weightsync.Worker(model, "r", wanted, load=load, views="numpy", address=address) as worker:
        worker.wait_registered()
        with weightsync.Trainer(model, address=address) as trainer:
            trainer.publish(tensors={"w": numpy.arange(4, dtype=numpy.float32)}).wait(60)
        assert taken["w"].tolist() == [0, 1, 2, 3]
        done = subprocess.run(
            [cluster.CTL, "verify", f"{model}/r", f"--address={address}"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1
        assert "could not be compared with version 1" in done.stdout and "DIFFERS" not in done.stdout
        assert "DIGESTS_UNKNOWN" in done.stdout and "has a loader" in done.stdout
        assert "holds none of them itself" in done.stdout
