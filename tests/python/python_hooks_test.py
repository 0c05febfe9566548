"""Hooks of a replica: coroutines, and what they raise."""

import asyncio
import threading

import numpy
import pytest
import weightsync

import cluster


@pytest.fixture(scope="module")
def address():
    with cluster.Cluster() as here:
        yield here.nodes[0].socket


_count = iter(range(1_000_000))


@pytest.fixture
def model():
    return f"h{next(_count)}"


def weights(value):
    return {"w": numpy.full(8, value, numpy.float32)}


def test_all_hooks_may_be_coroutines(address, model):
    """They run on the loop of the engine, in order, and each is waited for."""
    seen, live = [], weights(0)

    async def main():
        loop = asyncio.get_running_loop()

        async def hook(name, given):
            assert asyncio.get_running_loop() is loop
            seen.append(f"{name} begins")
            await asyncio.sleep(0.01)
            seen.append(f"{name} ends at {given.version} with {live['w'][0]:g}")

        worker = weightsync.Worker(
            model,
            "r",
            live,
            address=address,
            on_pause=lambda request: hook("pause", request),
            on_version=lambda info: hook("version", info),
            on_resume=lambda info: hook("resume", info),
        )
        with weightsync.Trainer(model, address=address) as trainer:
            trainer.register(weights(0))
            await asyncio.to_thread(worker.wait_registered)
            for value in (1, 2):
                await asyncio.to_thread(trainer.publish(tensors=weights(value)).wait, 60)
        await asyncio.to_thread(worker.close)

    asyncio.run(main())
    expected = []
    for version in (1, 2):
        expected += ["pause begins", f"pause ends at {version} with {version - 1}"]
        expected += ["version begins", f"version ends at {version} with {version}"]
        expected += ["resume begins", f"resume ends at {version} with {version}"]
    assert seen == expected


@pytest.mark.parametrize("which", ["on_version", "on_resume"])
@pytest.mark.parametrize("coroutine", [False, True])
def test_a_hook_that_raises_at_the_resume(address, model, which, coroutine):
    """The engine is named with what the hook said, is not counted as serving, and is resumed again until it does."""
    live, mended, calls, replica_name = weights(0), threading.Event(), [], f"models/{model}/replicas/r"

    def note(name, info):
        calls.append((name, info.version))
        if name == which and not mended.is_set():
            raise ValueError(f"the tokenizer is gone in {name}")

    async def note_later(name, info):
        await asyncio.sleep(0)
        note(name, info)

    loop = asyncio.new_event_loop()
    runner = threading.Thread(target=loop.run_forever, daemon=True)
    runner.start()
    call = note_later if coroutine else note
    worker = weightsync.Worker(
        model,
        "r",
        live,
        address=address,
        on_version=lambda info: call("on_version", info),
        on_resume=lambda info: call("on_resume", info),
        loop=loop,
    )
    with weightsync.Trainer(model, address=address) as trainer, weightsync.Admin(address) as admin, worker:
        trainer.register(weights(0))
        worker.wait_registered()
        update = trainer.publish(tensors=weights(1))

        def failure():
            found = admin.call("GetReplica", name=replica_name)
            return found if found.last_failure.reason == "HOOK_FAILED" else None

        found = cluster.wait_until(failure, "the failure is not seen", 60)
        assert f"the tokenizer is gone in {which}" in found.last_failure.message
        assert found.state != type(found).STATE_SERVING
        mended.set()
        result = update.wait(90)
        assert result.version == 1 and live["w"][0] == 1
        cluster.wait_until(
            lambda: admin.call("GetReplica", name=replica_name).state == type(found).STATE_SERVING,
            "it does not serve",
            60,
        )
        if which == "on_resume":
            assert calls.count(("on_version", 1)) == 1, "it was told of the version before"
        else:
            first = calls.index(("on_resume", 1))
            assert calls[:first].count(("on_version", 1)) >= 2, "an engine ran that was not told"
        # And the next one comes as ever.
        assert trainer.publish(tensors=weights(2)).wait(60).version == 2
        assert calls[-2:] == [("on_version", 2), ("on_resume", 2)]
    loop.call_soon_threadsafe(loop.stop)
    runner.join(10)
