"""The adapters for vLLM and SGLang, against fakes of the interfaces that those document, over a real daemon.

What is a fake here is the engine: its workers, its scheduler's pauses and its HTTP routes. tests/engines has
what runs a real one.
"""

import abc
import asyncio
import base64
import concurrent.futures
import contextlib
import http.server
import importlib.util
import json
import pickle
import sys
import threading
import types
import urllib.parse

import pytest
import torch
import weightsync
import weightsync.sglang
import weightsync.vllm
from weightsync import WeightsyncError

import cluster


@pytest.fixture(scope="module")
def address():
    with cluster.Cluster() as here:
        yield here.nodes[0].socket


_count = iter(range(1_000_000))


@pytest.fixture
def model():
    return f"e{next(_count)}"


SHAPES = {"model.layers.0.q_proj.weight": (8, 4), "model.layers.0.k_proj.weight": (4, 4), "lm_head.weight": (6, 4)}


def weights(seed):
    torch.manual_seed(seed)
    return {name: torch.randn(shape, dtype=torch.float32).bfloat16() for name, shape in SHAPES.items()}


class FakeModel:
    """Fuses as vLLM's models do, and keeps its addresses."""

    def __init__(self):
        self.qk = torch.zeros(12, 4, dtype=torch.bfloat16)
        self.head = torch.zeros(6, 4, dtype=torch.bfloat16)
        self.fail = None

    def load_weights(self, pairs):
        # Layerwise reload may hold tensors until a layer is whole.
        held = dict(pairs)
        if self.fail:
            raise ValueError(self.fail)
        self.qk[:8].copy_(held["model.layers.0.q_proj.weight"])
        self.qk[8:].copy_(held["model.layers.0.k_proj.weight"])
        self.head.copy_(held["lm_head.weight"])

    def holds(self, w):
        return torch.equal(self.qk[:8], w["model.layers.0.q_proj.weight"]) and torch.equal(
            self.head, w["lm_head.weight"]
        )


class FakeWorkerBase:
    def __init__(self, rank, log):
        self.rank = self.local_rank = rank
        self.device = torch.device("cpu")
        self.vllm_config = types.SimpleNamespace(
            model_config="the model's config", parallel_config=types.SimpleNamespace(rank=rank, world_size=1)
        )
        self.model = FakeModel()
        self.log = log

    def get_model(self):
        return self.model


def fake_workers(count, log):
    """As vLLM extends its worker class: no attribute may exist on it already."""
    kind = type("Worker", (FakeWorkerBase,), {})
    extension = weightsync.vllm.WorkerExtension
    for name in dir(extension):
        assert name.startswith("__") or not hasattr(kind, name), name
    kind.__bases__ += (extension,)
    return [kind(rank, log) for rank in range(count)]


@pytest.fixture
def fake_vllm(monkeypatch):
    """The modules of vLLM that the adapter imports, when it has them; notes its calls."""
    log = []
    layerwise = types.ModuleType("vllm.model_executor.model_loader.reload.layerwise")
    layerwise.initialize_layerwise_reload = lambda model: log.append("initialize")
    layerwise.finalize_layerwise_reload = lambda model, config: log.append(("finalize", config))
    config = types.ModuleType("vllm.config")

    @contextlib.contextmanager
    def set_current_vllm_config(given):
        log.append("config set")
        yield
        log.append("config unset")

    config.set_current_vllm_config = set_current_vllm_config
    factory = types.ModuleType("vllm.distributed.weight_transfer.factory")
    factory.engines = {}

    class WeightTransferEngineFactory:
        @staticmethod
        def register_engine(name, module, kind):
            if name in factory.engines:
                raise ValueError(f"{name} is registered")
            factory.engines[name] = (module, kind)

    factory.WeightTransferEngineFactory = WeightTransferEngineFactory
    reload = types.ModuleType("vllm.model_executor.model_loader.reload")
    reload.layerwise = layerwise
    for name, module in {
        "vllm": types.ModuleType("vllm"),
        "vllm.config": config,
        "vllm.model_executor": types.ModuleType("vllm.model_executor"),
        "vllm.model_executor.model_loader": types.ModuleType("vllm.model_executor.model_loader"),
        "vllm.model_executor.model_loader.reload": reload,
        "vllm.model_executor.model_loader.reload.layerwise": layerwise,
        "vllm.distributed": types.ModuleType("vllm.distributed"),
        "vllm.distributed.weight_transfer": types.ModuleType("vllm.distributed.weight_transfer"),
        "vllm.distributed.weight_transfer.factory": factory,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return types.SimpleNamespace(log=log, factory=factory)


class FakeAsyncLLM:
    def __init__(self, workers=2):
        self.calls = []
        self.workers = fake_workers(workers, self.calls)
        self.vllm_config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(world_size=workers))
        self.paused = False
        self.prefix_blocks_in_use = False
        self.never_pauses = False

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        # In their own processes there, all at once.
        with concurrent.futures.ThreadPoolExecutor(len(self.workers)) as pool:
            calls = [
                asyncio.get_running_loop().run_in_executor(
                    pool, lambda worker=worker: getattr(worker, method)(*args, **(kwargs or {}))
                )
                for worker in self.workers
            ]
            return list(await asyncio.gather(*calls))

    async def pause_generation(self, *, mode="abort", clear_cache=True):
        assert mode in ("abort", "wait", "keep")
        self.calls.append(("pause", mode, clear_cache))
        if self.never_pauses:
            await asyncio.sleep(1000)
        self.paused = True

    async def resume_generation(self):
        self.calls.append("resume")
        self.paused = False

    async def reset_prefix_cache(self):
        assert self.paused
        self.calls.append("reset_prefix_cache")
        return not self.prefix_blocks_in_use


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
    class Deaf:
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


@contextlib.contextmanager
def serving(answer):
    """A server whose routes are `answer(method, path, query, body)` -> (status, object)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def _do(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            url = urllib.parse.urlsplit(self.path)
            try:
                status, found = answer(self.command, url.path, dict(urllib.parse.parse_qsl(url.query)), body)
            except Exception as error:  # noqa: BLE001
                status, found = 500, {"error": repr(error)}
            text = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = _do

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_vllm_over_http(address, model):
    workers, calls = fake_workers(2, []), []

    def answer(method, path, query, body):
        calls.append((path, query))
        if path == "/get_world_size":
            return 200, {"world_size": 2}
        if path == "/collective_rpc":
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                found = pool.map(lambda worker: getattr(worker, body["method"])(**body["kwargs"]), workers)
                return 200, {"results": list(found)}
        if path == "/reset_prefix_cache":
            return 200, {"success": True}
        return 200, {"status": "ok"}

    with serving(answer) as url, weightsync.Trainer(model, address=address) as trainer:
        trainer.register(weights(0))
        controller = weightsync.vllm.HttpController(url, model, "r", address=address)
        controller.start()
        calls.clear()
        trainer.publish(tensors=weights(1), pause_mode="keep").wait(60)
        assert all(worker.model.holds(weights(1)) for worker in workers)
        assert calls == [
            ("/pause", {"mode": "keep", "clear_cache": "true"}),
            ("/reset_prefix_cache", {}),
            ("/resume", {}),
        ]
        controller.stop()


def test_an_engine_that_cannot_be_reached():
    with pytest.raises(ConnectionError) as error:
        weightsync.vllm.HttpController("http://127.0.0.1:1", "m", "r")
    assert error.value.reason == "ENGINE_UNREACHABLE"


class FakeSGLang:
    def __init__(self):
        self.model = FakeModel()
        self.calls = []
        self.queue_is_empty = True
        self.version = "default"

    def answer(self, method, path, query, body):
        if path == "/update_weights_from_tensor":
            assert body["load_format"] in ["weightsync.sglang.load"], "not in --custom-weight-loader"
            assert body["flush_cache"] is False, "would kill the scheduler with a queue that is not empty"
            for payload in body["serialized_named_tensors"]:
                tensors = pickle.loads(base64.b64decode(payload))
                weightsync.sglang.load(self.model, tensors)
                self.calls.append("load")
        elif path == "/pause_generation":
            assert body["mode"] in ("abort", "retract", "in_place")
            self.calls.append(("pause", body["mode"]))
            if body["mode"] == "retract":
                self.queue_is_empty = False
        elif path == "/continue_generation":
            self.calls.append("continue")
            self.queue_is_empty = True
        elif path == "/flush_cache":
            self.calls.append("flush")
            if not self.queue_is_empty:
                return 400, {"error": "Cache not flushed because there are pending requests."}
        elif path == "/update_weight_version":
            assert body["abort_all_requests"] is False, "it is true by default"
            self.version = body["new_version"]
        else:
            return 404, {}
        return 200, {"success": True, "message": ""}


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


class FakeSGLangOfTwo(FakeSGLang):
    """Each of its ranks has the module for itself, as processes have."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.models = [FakeModel(), FakeModel()]
        self.ranks = []
        for rank in range(2):
            spec = importlib.util.spec_from_file_location(f"weightsync.sglang_{rank}", weightsync.sglang.__file__)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            monkeypatch.setattr(module, "_tensor_parallel_rank", lambda rank=rank: rank)
            self.ranks.append(module)

    def answer(self, method, path, query, body):
        if path != "/update_weights_from_tensor":
            return super().answer(method, path, query, body)
        payloads = [pickle.loads(base64.b64decode(p)) for p in body["serialized_named_tensors"]]
        assert len(payloads) == 2, "one for each rank"
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda module, model, given: module.load(model, given), self.ranks, self.models, payloads))
        return 200, {"success": True, "message": ""}


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
