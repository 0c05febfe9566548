"""The adapters for vLLM and SGLang, against fakes of the interfaces that those document, over a real daemon.

What is a fake here is the engine: its workers, its scheduler's pauses and its HTTP routes. tests/engines has
what runs a real one.
"""

import abc
import asyncio
import importlib
import sys
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
    FakeSGLangOfTwo,
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
    return f"e{next(_count)}"


def test_vllm_in_process(address, model, fake_vllm):
    async def main():
        engine, versions = FakeAsyncLLM(), []
        controller = weightsync.vllm.Controller(
            engine, model, "r", address=address, on_version=lambda info: versions.append(info.version)
        )
        with weightsync.Trainer(model, address=address) as trainer:
            trainer.register(weights(0))
            await controller.start()
            assert await engine.collective_rpc("weightsync_version") == [0, 0]
            addresses = [worker.model.qk.data_ptr() for worker in engine.workers]
            for version, pause, expected in [
                (1, "drain", ("pause", "wait", False)),
                (2, "abort", ("pause", "abort", False)),
                (3, "keep", ("pause", "keep", True)),
            ]:
                engine.calls.clear()
                fake_vllm.log.clear()
                update = trainer.publish(tensors=weights(version), pause_mode=pause)
                await asyncio.to_thread(update.wait, 60)
                assert engine.calls == [expected, "reset_prefix_cache", "resume"]
                assert all(worker.model.holds(weights(version)) for worker in engine.workers)
                assert await engine.collective_rpc("weightsync_version") == [version] * 2
                # Each worker's reload is bracketed, in the engine's config.
                assert sorted(map(str, fake_vllm.log)) == sorted(
                    ["config set", "initialize", "('finalize', \"the model's config\")", "config unset"] * 2
                )
            assert versions == [1, 2, 3]
            assert addresses == [worker.model.qk.data_ptr() for worker in engine.workers]
            await controller.stop()

    asyncio.run(main())


def test_vllm_without_layerwise_reload(address, model):
    """Releases that do not have it: the model's loader alone."""

    async def main():
        engine = FakeAsyncLLM(1)
        controller = weightsync.vllm.Controller(engine, model, "r", address=address)
        with weightsync.Trainer(model, address=address) as trainer:
            trainer.register(weights(0))
            await controller.start()
            await asyncio.to_thread(trainer.publish(tensors=weights(1)).wait, 60)
            assert engine.workers[0].model.holds(weights(1))
            await controller.stop()

    asyncio.run(main())


def test_vllm_keeps_no_prefix_of_older_weights(address, model):
    """A prefix cache that cannot be reset leaves the engine paused, by name, until it can."""

    async def main():
        engine = FakeAsyncLLM(1)
        controller = weightsync.vllm.Controller(engine, model, "r", address=address)
        with weightsync.Trainer(model, address=address) as trainer, weightsync.Admin(address) as admin:
            trainer.register(weights(0))
            await controller.start()
            engine.prefix_blocks_in_use = True
            update = trainer.publish(tensors=weights(1))

            def failure():
                found = admin.call("GetReplica", name=f"models/{model}/replicas/r").last_failure
                return found if found.reason == "PREFIX_CACHE_IN_USE" else None

            await asyncio.to_thread(cluster.wait_until, failure, "the failure is not seen", 60)
            assert engine.paused and "resume" not in engine.calls
            engine.prefix_blocks_in_use = False
            await asyncio.to_thread(update.wait, 90)
            await asyncio.to_thread(cluster.wait_until, lambda: not engine.paused, "it stays paused", 60)
            await controller.stop()

    asyncio.run(main())


def test_vllm_that_does_not_pause_serves_on(address, model):
    async def main():
        engine = FakeAsyncLLM(1)
        controller = weightsync.vllm.Controller(engine, model, "r", address=address)
        engine.never_pauses = True
        request = weightsync.PauseRequest("u", 1, weightsync.PauseMode.DRAIN, 1.2)
        with pytest.raises(TimeoutError) as error:
            await controller.pause(request)
        assert error.value.reason == "PAUSE_TOO_LONG"
        assert engine.calls == [("pause", "wait", False), "resume"]
        with pytest.raises(NotImplementedError):
            await controller.pause(weightsync.PauseRequest("u", 1, weightsync.PauseMode.NONE, 1))

    asyncio.run(main())


def test_a_loader_that_takes_nothing_is_an_error(fake_vllm):
    class Deaf(FakeModel):
        def load_weights(self, pairs):
            pass

    with pytest.raises(WeightsyncError) as error:
        weightsync.vllm.load_into(
            Deaf(), types.SimpleNamespace(model_config=None), torch.device("cpu"), [("w", torch.zeros(1))]
        )
    assert error.value.reason == "NOTHING_LOADED"


class FakeTransferBase(abc.ABC):
    """What vLLM's base class (0.32) does: it keeps which model an update is for, and sets it back. And what one of
    0.25 to 0.32 leaves to be written.
    """

    init_transfer_engine = abc.abstractmethod(lambda self: None)
    shutdown = abc.abstractmethod(lambda self: None)
    receive_weights = abc.abstractmethod(lambda self: None)
    start_weight_update = abc.abstractmethod(lambda self: None)
    finish_weight_update = abc.abstractmethod(lambda self: None)
    trainer_send_weights = staticmethod(abc.abstractmethod(lambda: None))

    def __init__(self, config, vllm_config, device, model):
        self.config = config
        self.vllm_config = vllm_config
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config
        self.device = device
        self.model = model
        self._default_model_config = self.model_config
        self._default_model = model

    def reset_weight_update_target(self):
        self.model = self._default_model
        self.model_config = self._default_model_config


class FakeTransferWorker:
    """The session as vLLM's worker runs it: v1/worker/gpu_worker.py of 0.32."""

    def __init__(self, engine):
        self.engine = engine
        self.active = False

    def start_weight_update(self):
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        try:
            self.engine.start_weight_update()
        except BaseException:
            self.engine.reset_weight_update_target()
            raise
        self.active = True

    def update_weights(self, info):
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            self.engine.update_weights(info)
        except BaseException:
            self.active = False
            self.engine.reset_weight_update_target()
            raise

    def finish_weight_update(self):
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.engine.finish_weight_update()
        self.engine.reset_weight_update_target()
        self.active = False


@pytest.fixture
def module_with_base(fake_vllm, monkeypatch):
    """weightsync.vllm_transfer as it is inside vLLM, where the classes it derives from exist."""
    base = types.ModuleType("vllm.distributed.weight_transfer.base")
    base.WeightTransferEngine = FakeTransferBase
    base.WeightTransferInitInfo = type("WeightTransferInitInfo", (), {})
    base.WeightTransferUpdateInfo = type("WeightTransferUpdateInfo", (), {})
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setattr(sys.modules["vllm.distributed.weight_transfer"], "base", base, raising=False)
    monkeypatch.delitem(sys.modules, "weightsync.vllm_transfer", raising=False)
    monkeypatch.delattr(weightsync, "vllm_transfer", raising=False)
    module = importlib.import_module("weightsync.vllm_transfer")
    assert issubclass(module.TransferEngine, FakeTransferBase)
    yield module
    # The others get the one without vLLM.
    del sys.modules["weightsync.vllm_transfer"], weightsync.vllm_transfer


def test_vllms_worker_runs_one_session_after_the_other(address, model, module_with_base):
    """What the base class keeps is there, so that each session ends and the next one may begin."""
    fake = FakeWorkerBase(0, [])
    engine = module_with_base.TransferEngine("config", fake.vllm_config, fake.device, fake.model)
    worker = FakeTransferWorker(engine)
    replica = weightsync.Replica(model, "r", address=address)
    with weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(0))
        info = dict(model=model, replica="r", incarnation=replica.incarnation, workers=1, address=address)
        engine.init_transfer_engine(engine.parse_init_info(info))
        for version in (1, 2):
            worker.start_weight_update()
            update = trainer.publish(tensors=weights(version))
            worker.update_weights({"version": version})
            worker.finish_weight_update()
            update.wait(60)
            assert fake.model.holds(weights(version)) and engine.model is fake.model
        # One that fails is over as well: the next one starts.
        for _ in range(2):
            worker.start_weight_update()
            with pytest.raises(TimeoutError):
                worker.update_weights({"version": 9, "timeout": 0.1})
        engine.shutdown()
    replica.close()


def test_vllms_transfer_engine(address, model, fake_vllm):
    weightsync.vllm.register()
    weightsync.vllm.register()  # a second time is fine
    module, kind = fake_vllm.factory.engines["weightsync"]
    engine_class = getattr(importlib.import_module(module), kind)
    assert engine_class is weightsync.vllm.TransferEngine
    worker = FakeWorkerBase(0, [])
    engine = engine_class("config", worker.vllm_config, worker.device, worker.model)
    replica = weightsync.Replica(model, "r", address=address)
    with weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(0))
        with pytest.raises(RuntimeError):
            engine.start_weight_update()
        engine.init_transfer_engine(
            engine.parse_init_info(
                dict(model=model, replica="r", incarnation=replica.incarnation, workers=1, address=address)
            )
        )
        with pytest.raises(RuntimeError):
            engine.receive_weights(engine.parse_update_info({"version": 1}))
        engine.start_weight_update()
        with pytest.raises(RuntimeError):
            engine.start_weight_update()
        with pytest.raises(TimeoutError) as error:
            engine.update_weights({"version": 1, "timeout": 0.1})
        assert error.value.reason == "INSTALL_TIMEOUT", "its label must not go ahead of the weights"
        trainer.publish(tensors=weights(1)).wait(60)
        engine.start_weight_update()
        engine.update_weights({"version": 1})
        engine.finish_weight_update()
        with pytest.raises(RuntimeError):
            engine.finish_weight_update()
        assert worker.model.holds(weights(1))
        engine.shutdown()
        engine.shutdown()
    replica.close()


# ---- Over HTTP ----


def test_vllm_over_http(address, model, monkeypatch):
    # Of the environment's proxies none is between a controller and its engine.
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    engine = FakeVllmServer(2)
    with serving(engine.answer) as url, weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(0))
        controller = weightsync.vllm.HttpController(url, model, "r", address=address)
        controller.start()
        engine.calls.clear()
        trainer.publish(tensors=weights(1), pause_mode="keep").wait(60)
        assert all(worker.model.holds(weights(1)) for worker in engine.workers)
        assert engine.calls == [
            ("/pause", {"mode": "keep", "clear_cache": "true"}),
            ("/reset_prefix_cache", {"reset_running_requests": "true"}),
            ("/resume", {}),
        ]
        controller.stop()


def test_an_engine_that_cannot_be_reached():
    with pytest.raises(ConnectionError) as error:
        weightsync.vllm.HttpController("http://127.0.0.1:1", "m", "r")
    assert error.value.reason == "ENGINE_UNREACHABLE"


def test_sglang(address, model):
    engine, versions = FakeSGLang(), []
    with serving(engine.answer) as url, weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(0))
        controller = weightsync.sglang.Controller(
            url, model, "r", address=address, on_version=lambda info: versions.append(info.version)
        )
        controller.start()
        engine.calls.clear()
        trainer.publish(tensors=weights(1), pause_mode="abort").wait(60)
        assert engine.model.holds(weights(1))
        assert engine.calls == [("pause", "abort"), "load", "flush", "continue"]
        assert engine.version == "1" and versions == [1]
        # What SGLang cannot do is refused before anything is paused, and the old weights serve on.
        engine.calls.clear()
        for mode in ("drain", "keep"):
            with pytest.raises(WeightsyncError) as error:
                trainer.publish(tensors=weights(2), pause_mode=mode).wait(60)
            assert error.value.reason == "PAUSE_MODE_UNIMPLEMENTED"
        assert ("pause", "abort") not in engine.calls and "load" not in engine.calls
        assert engine.model.holds(weights(1))
        controller.stop()


def test_sglang_of_two_workers_whose_flush_is_refused(address, model, monkeypatch):
    """It stays paused, by name, with prefixes that older weights made; and goes on when the flush succeeds."""
    engine = FakeSGLangOfTwo(monkeypatch)
    with serving(engine.answer) as url, weightsync.Trainer(model, address=address) as trainer, weightsync.Admin(
        address
    ) as admin:
        trainer.register(weights(0))
        controller = weightsync.sglang.Controller(url, model, "r", workers=2, address=address)
        controller.start()
        trainer.publish(tensors=weights(1), pause_mode="abort").wait(60)
        assert all(one.holds(weights(1)) for one in engine.models)
        engine.calls.clear()
        engine.queue_is_empty = False
        update = trainer.publish(tensors=weights(2), pause_mode="abort")

        def failure():
            found = admin.call("GetReplica", name=f"models/{model}/replicas/r").last_failure
            return found if found.reason == "PREFIX_CACHE_IN_USE" else None

        found = cluster.wait_until(failure, "the failure is not seen", 60)
        assert "stays paused" in found.message
        assert "flush" in engine.calls and "continue" not in engine.calls and engine.version == "1"
        engine.queue_is_empty = True
        update.wait(90)
        cluster.wait_until(lambda: "continue" in engine.calls, "it stays paused", 60)
        assert all(one.holds(weights(2)) for one in engine.models) and engine.version == "2"
        controller.stop()


def test_sglang_without_a_prefix_cache_may_keep_requests(address, model):
    engine = FakeSGLang()
    with serving(engine.answer) as url, weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(0))
        controller = weightsync.sglang.Controller(url, model, "r", address=address, radix_cache=False)
        controller.start()
        engine.calls.clear()
        trainer.publish(tensors=weights(1), pause_mode="keep").wait(60)
        assert engine.calls == [("pause", "retract"), "load", "continue"], "a flush would fail: the queue is full"
        assert engine.model.holds(weights(1))
        controller.stop()


def test_sglangs_loader_takes_only_commands():
    with pytest.raises(ValueError, match="model.w"):
        weightsync.sglang.load(FakeModel(), [("model.w", torch.zeros(2))])
