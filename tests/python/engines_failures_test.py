"""What goes wrong in an engine (fake_engines.py): no replica may serve a mix or an older prefix for it."""

import asyncio
import time
import types

import pytest
import torch
import weightsync
import weightsync.sglang
import weightsync.vllm
from weightsync import WeightsyncError

import cluster
from fake_engines import (
    FakeAsyncLLM,
    FakeModel,
    FakeSGLang,
    FakeVllmServer,
    FakeWorkerBase,
    fake_vllm,  # noqa: F401  a fixture
    serving,
    weights,
)


@pytest.fixture(scope="module")
def address():
    with cluster.Cluster() as here:
        yield here.nodes[0].socket


_count = iter(range(1_000_000))


@pytest.fixture
def model():
    return f"f{next(_count)}"


def replica_fails(address, model, reason):
    """Waits until the daemon tells that failure of replica r."""
    with weightsync.Admin(address) as admin:

        def failure():
            found = admin.call("GetReplica", name=f"models/{model}/replicas/r").last_failure
            return found if found.reason == reason else None

        return cluster.wait_until(failure, f"{reason} is not seen", 60)


# ---- A reload that fails ----


@pytest.mark.parametrize("where", ["while a layer is half loaded", "while a layer is processed"])
def test_a_reload_that_failed_leaves_nothing_to_the_next_one(address, model, fake_vllm, where):
    """The update is applied again, and every tensor is the version's: none is memory that nobody wrote."""

    async def main():
        engine = FakeAsyncLLM(1)

        held = engine.workers[0].model
        controller = weightsync.vllm.Controller(engine, model, "r", address=address)
        with weightsync.Trainer(model, address=address) as trainer:
            trainer.register(weights(0))
            await controller.start()
            storage = held.qk.data_ptr()
            if where == "while a layer is half loaded":
                held.fail = "the first of them only"
            else:
                next(held.modules()).unprocessable = "no kernel for it"
            for version in (1, 2):
                update = trainer.publish(tensors=weights(version))
                await asyncio.to_thread(update.wait, 60)
                assert await engine.collective_rpc("weightsync_version") == [version]
                assert held.holds(weights(version))
            assert fake_vllm.log.count("initialize") == 3, "it did not fail"
            assert held.qk.data_ptr() == storage
            await controller.stop()

    asyncio.run(main())


def test_a_reload_that_vllm_cannot_undo_is_the_last_one(fake_vllm, monkeypatch):
    """Its layers may be half taken apart: what would be installed then is anybody's guess."""
    worker = FakeWorkerBase(0, [])

    def finalize(model, config):
        raise RuntimeError("attention has no scales")

    monkeypatch.setattr(fake_vllm.layerwise, "finalize_layerwise_reload", finalize)
    worker.model.fail = "the loader's own failure"
    load = lambda: weightsync.vllm.load_into(  # noqa: E731
        worker.model, worker.vllm_config, worker.device, weights(1).items()
    )
    with pytest.raises(ValueError, match="the loader's own failure"):
        load()
    with pytest.raises(WeightsyncError) as error:
        load()
    assert error.value.reason == "RELOAD_BROKEN"
    assert "attention has no scales" in error.value.message and "restart the engine" in error.value.message


# ---- Prefixes of older weights ----


@pytest.mark.parametrize(
    "answer, reason",
    [
        ((200, {"success": False}), "PREFIX_CACHE_IN_USE"),
        ((500, {"error": "RuntimeError: Failed to reset KV cache even when all the running requests…"}),
         "PREFIX_CACHE_IN_USE"),
        ((200, None), "PREFIX_CACHE_RESET_UNKNOWN"),
    ],
)  # fmt: skip
def test_a_server_that_did_not_reset_its_cache_stays_paused(address, model, answer, reason):
    engine = FakeVllmServer(1)
    with serving(engine.answer) as url, weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(0))
        controller = weightsync.vllm.HttpController(url, model, "r", address=address)
        controller.start()
        engine.calls.clear()
        engine.reset = answer
        update = trainer.publish(tensors=weights(1))
        assert "stays paused" in replica_fails(address, model, reason).message
        assert "/resume" not in [path for path, _ in engine.calls]
        engine.reset = 200, {"success": True}
        update.wait(90)
        cluster.wait_until(lambda: engine.calls[-1][0] == "/resume", "it stays paused", 60)
        controller.stop()


def test_an_engine_that_does_not_say_whether_it_reset_stays_paused(address, model):
    async def main():
        engine = FakeAsyncLLM(1)
        engine.says_whether_it_reset = False
        controller = weightsync.vllm.Controller(engine, model, "r", address=address)
        with weightsync.Trainer(model, address=address) as trainer:
            trainer.register(weights(0))
            await controller.start()
            trainer.publish(tensors=weights(1))
            await asyncio.to_thread(replica_fails, address, model, "PREFIX_CACHE_RESET_UNKNOWN")
            assert engine.paused and "resume" not in engine.calls
            await controller.stop()

    asyncio.run(main())


def test_requests_that_an_operator_froze_go_on_without_what_older_weights_made(address, model):
    """The pause was before any update, and cleared nothing; the update finds the engine paused already."""

    async def main():
        engine = FakeAsyncLLM(1)
        engine.running = [True, True]
        controller = weightsync.vllm.Controller(engine, model, "r", address=address)
        name = f"models/{model}/replicas/r"
        with weightsync.Trainer(model, address=address) as trainer, weightsync.Admin(address, timeout=60) as admin:
            trainer.register(weights(0))
            await controller.start()
            await asyncio.to_thread(admin.call, "PauseReplica", name=name, mode="PAUSE_MODE_KEEP")
            assert engine.calls == [("pause", "keep", False)] and engine.running == [True, True]
            update = trainer.publish(tensors=weights(1))
            await asyncio.to_thread(
                cluster.wait_until, lambda: engine.workers[0].model.holds(weights(1)), "it is not installed", 60
            )
            await asyncio.to_thread(admin.call, "ResumeReplica", name=name)
            await asyncio.to_thread(update.wait, 60)
            await asyncio.to_thread(cluster.wait_until, lambda: not engine.paused, "it stays paused", 60)
            assert engine.calls[1:] == ["reset_prefix_cache", "resume"]
            assert engine.running == [False, False]
            await controller.stop()

    asyncio.run(main())


# ---- Starting ----


class _Vllm:
    """A controller in the engine's process; its coroutines are run one by one."""

    def __init__(self, model, address, timeout):
        self.timeout = timeout
        self.loop = asyncio.new_event_loop()
        self.engine = FakeAsyncLLM(2)
        self.controller = weightsync.vllm.Controller(self.engine, model, "r", address=address)

    def start(self):
        self.loop.run_until_complete(self.controller.start(self.timeout))

    def workers(self):
        return [getattr(worker, "_weightsync_worker", None) for worker in self.engine.workers]

    def stop(self):
        self.loop.run_until_complete(self.controller.stop())
        self.loop.close()


class _OverHttp:
    def __init__(self, model, address, timeout):
        self.engine = FakeVllmServer(2)
        self._serving = serving(self.engine.answer)
        self.controller = weightsync.vllm.HttpController(
            self._serving.__enter__(), model, "r", address=address, timeout=timeout
        )
        self.start = self.controller.start

    workers = _Vllm.workers

    def stop(self):
        self.controller.stop()
        self._serving.__exit__(None, None, None)


class _Sglang:
    def __init__(self, model, address, timeout):
        self.engine = FakeSGLang()
        self._serving = serving(self.engine.answer)
        self.controller = weightsync.sglang.Controller(
            self._serving.__enter__(), model, "r", address=address, timeout=timeout
        )
        self.start = self.controller.start

    def workers(self):
        return [weightsync.sglang._worker]

    stop = _OverHttp.stop


@pytest.mark.parametrize("kind", [_Vllm, _OverHttp, _Sglang])
def test_a_start_that_failed_may_be_repeated(address, model, kind):
    """It ends at its own deadline, says why, and leaves neither a replica nor workers behind."""
    here = kind(model, address, timeout=2)
    start = time.monotonic()
    with pytest.raises(Exception, match="CATALOG_UNKNOWN"):
        here.start()
    assert 1.5 < time.monotonic() - start < 12
    assert here.workers() in ([None], [None, None]) and here.controller.replica is None
    with weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(0))
        here.start()
        assert None not in here.workers()
        here.stop()


@pytest.mark.parametrize("kind", [_Vllm, _OverHttp, _Sglang])
def test_a_replica_that_is_taken_leaves_no_worker(address, model, kind):
    """What fails after the workers were made: they are stopped, and the next start succeeds."""
    with weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(0))
        here = kind(model, address, timeout=5)
        with weightsync.Replica(model, "r", workers=here.controller.workers, address=address) as other:
            other.wait_registered()
            with pytest.raises(Exception, match="_TAKEN|INCARNATION|REGISTER_TIMEOUT"):
                here.start()
            assert here.workers() in ([None], [None, None]) and here.controller.replica is None
        here.start()
        here.stop()


def test_a_transfer_engine_whose_model_nobody_has_says_so_in_time(address, model):
    worker = FakeWorkerBase(0, [])
    engine = weightsync.vllm.TransferEngine("config", worker.vllm_config, worker.device, worker.model)
    info = dict(model=model, replica="r", incarnation="i", workers=1, address=address, timeout=2)
    start = time.monotonic()
    with pytest.raises(WeightsyncError) as error:
        engine.init_transfer_engine(engine.parse_init_info(info))
    assert error.value.reason == "CATALOG_UNKNOWN"
    assert 1.5 < time.monotonic() - start < 12


# ---- Devices ----


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda as far as loaders use it; notes the calls."""
    log = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: log.append(("set_device", device)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(("synchronize", device)))
    return log


class OnGpu(FakeModel):
    """Says that it is on the second GPU."""

    def __init__(self, log):
        super().__init__()
        self.log = log
        self.device = torch.device("cuda", 1)

    def parameters(self):
        return iter([types.SimpleNamespace(device=self.device)])

    def load_weights(self, pairs):
        assert not torch.is_grad_enabled()
        super().load_weights(pairs)
        self.log.append("load")


def test_sglangs_model_is_loaded_on_its_own_gpu(address, model, cuda):
    """Its worker is a thread of the library, whose device is another; installed is what has arrived."""
    engine = FakeSGLang()
    engine.model = OnGpu(cuda)
    with serving(engine.answer) as url, weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(0))
        controller = weightsync.sglang.Controller(url, model, "r", address=address)
        controller.start()
        trainer.publish(tensors=weights(1), pause_mode="abort").wait(60)
        assert engine.model.holds(weights(1))
        controller.stop()
    assert cuda == [("set_device", engine.model.device), "load", ("synchronize", engine.model.device)]


def test_vllms_model_is_loaded_on_its_own_gpu(cuda):
    model = OnGpu(cuda)
    config = types.SimpleNamespace(model_config=None)
    weightsync.vllm.load_into(model, config, model.device, weights(1).items())
    assert model.holds(weights(1))
    assert cuda == [("set_device", model.device), "load", ("synchronize", model.device)]
