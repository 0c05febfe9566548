"""Fakes of the interfaces that vLLM and SGLang document, and of the traps in them (see engines_test.py)."""

import asyncio
import base64
import concurrent.futures
import contextlib
import functools
import http.server
import importlib.util
import json
import pickle
import sys
import threading
import types
import urllib.parse
import weakref

import pytest
import torch
import weightsync.sglang
import weightsync.vllm

SHAPES = {"model.layers.0.q_proj.weight": (8, 4), "model.layers.0.k_proj.weight": (4, 4), "lm_head.weight": (6, 4)}


def weights(seed):
    torch.manual_seed(seed)
    return {name: torch.randn(shape, dtype=torch.float32).bfloat16() for name, shape in SHAPES.items()}


class FakeLayer:
    """A parameter made of several of the checkpoint's, `rows` of it each; its address stays."""

    def __init__(self, rows):
        self.rows = rows
        self.tensor = torch.zeros(max(end for _, end in rows.values()), 4, dtype=torch.bfloat16)
        # What layerwise reload puts around it while it is under way.
        self.wrapped = None
        # Raised by what makes the engine's format of it (quantisation).
        self.unprocessable = None

    def load(self, name, tensor):
        begin, end = self.rows[name]
        self.tensor[begin:end].copy_(tensor)


class FakeModel:
    """Fuses as vLLM's models do, and keeps its addresses."""

    def __init__(self):
        self._qk = FakeLayer({"model.layers.0.q_proj.weight": (0, 8), "model.layers.0.k_proj.weight": (8, 12)})
        self._head = FakeLayer({"lm_head.weight": (0, 6)})
        # Raised once, after the first of qk's tensors.
        self.fail = None

    qk = property(lambda self: self._qk.tensor)
    head = property(lambda self: self._head.tensor)

    def modules(self):
        return iter([self._qk, self._head])

    def load_weights(self, pairs):
        # Looked up once, as named_parameters() is: what a layer had then is what is called.
        loaders = {name: layer.wrapped or layer.load for layer in self.modules() for name in layer.rows}
        for name, tensor in pairs:
            loaders[name](name, tensor)
            if self.fail and name == "model.layers.0.q_proj.weight":
                failure, self.fail = self.fail, None
                raise ValueError(failure)

    def holds(self, w):
        return (
            torch.equal(self.qk[:8], w["model.layers.0.q_proj.weight"])
            and torch.equal(self.qk[8:], w["model.layers.0.k_proj.weight"])
            and torch.equal(self.head, w["lm_head.weight"])
        )


class FakeReload(types.ModuleType):
    """What vLLM 0.32's layerwise.py does with a layer, and what it does not: without a word, memory that nobody
    wrote becomes weights where its counts are wrong.
    """

    class Info:
        def __init__(self):
            self.reset()

        def reset(self):
            self.load_numel, self.load_numel_total, self.loaded_weights, self.kernel_tensors = 0, None, [], None

        def can_load(self):
            return self.load_numel_total is not None

    def __init__(self, log):
        super().__init__("vllm.model_executor.model_loader.reload.layerwise")
        self.log = log
        self._infos = weakref.WeakKeyDictionary()

    def get_layerwise_info(self, layer):
        return self._infos.setdefault(layer, self.Info())

    def initialize_layerwise_reload(self, model):
        self.log.append("initialize")
        for layer in model.modules():
            info = self.get_layerwise_info(layer)
            if info.can_load():
                continue  # "already initialized"
            info.kernel_tensors, layer.tensor = layer.tensor, None
            info.load_numel, info.load_numel_total = 0, info.kernel_tensors.numel()
            layer.wrapped = functools.partial(self._load, layer, info)

    def _load(self, layer, info, name, tensor):
        if not info.can_load():
            return  # "Excessive loading"
        # Held until the layer is whole.
        info.loaded_weights.append((name, tensor))
        info.load_numel += tensor.numel()
        if info.load_numel >= info.load_numel_total:
            self._process(layer, info)

    def _process(self, layer, info):
        layer.tensor = torch.full_like(info.kernel_tensors, float("nan"))  # empty_strided there
        for name, tensor in info.loaded_weights:
            layer.load(name, tensor)
        if layer.unprocessable:
            failure, layer.unprocessable = layer.unprocessable, None
            raise ValueError(failure)
        info.kernel_tensors.copy_(layer.tensor)
        self._place(layer, info)
        info.reset()

    def _place(self, layer, info):
        layer.tensor, layer.wrapped = info.kernel_tensors, None

    def finalize_layerwise_reload(self, model, config):
        self.log.append(("finalize", config))
        for layer in model.modules():
            info = self.get_layerwise_info(layer)
            if not info.can_load():
                info.reset()
                continue
            if info.load_numel <= 0:
                self._place(layer, info)  # "Failed to load weights", a warning
            elif info.load_numel < info.load_numel_total:
                self._process(layer, info)  # "Delayed processing"
            info.reset()


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
    layerwise = FakeReload(log)
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
    return types.SimpleNamespace(log=log, factory=factory, layerwise=layerwise)


class FakeAsyncLLM:
    def __init__(self, workers=2):
        self.calls = []
        self.workers = fake_workers(workers, self.calls)
        self.vllm_config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(world_size=workers))
        self.paused = False
        # Requests that it is working on: each is True while it has KV that was computed.
        self.running = []
        # Held by something else than them, for example a transfer of KV.
        self.prefix_blocks_in_use = False
        # Whether a reset says what came of it; vLLM before that was asked for said nothing.
        self.says_whether_it_reset = True
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
        if clear_cache:
            self.running = [False] * len(self.running)

    async def resume_generation(self):
        self.calls.append("resume")
        self.paused = False

    async def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        assert self.paused
        self.calls.append("reset_prefix_cache")
        if reset_running_requests:
            # Preempted: they go on, and compute theirs again.
            self.running = [False] * len(self.running)
            if self.prefix_blocks_in_use:
                raise RuntimeError("Failed to reset KV cache even when all the running requests are preempted")
        done = not self.prefix_blocks_in_use and not any(self.running)
        return done if self.says_whether_it_reset else None


# ---- Over HTTP ----


@contextlib.contextmanager
def serving(answer):
    """A server whose routes are `answer(method, path, query, body)` -> (status, object); None: nothing."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def _do(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            url = urllib.parse.urlsplit(self.path)
            try:
                status, found = answer(self.command, url.path, dict(urllib.parse.parse_qsl(url.query)), body)
            except Exception as error:  # noqa: BLE001
                status, found = 500, {"error": repr(error)}
            text = b"" if found is None else json.dumps(found).encode()
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


class FakeVllmServer:
    """The development endpoints of a vLLM server, in front of the workers of one engine."""

    def __init__(self, workers=2):
        self.workers = fake_workers(workers, [])
        self.calls = []
        # What it answers to a reset of its prefix cache.
        self.reset = 200, {"success": True}

    def answer(self, method, path, query, body):
        self.calls.append((path, query))
        if path == "/get_world_size":
            return 200, {"world_size": len(self.workers)}
        if path == "/collective_rpc":
            with concurrent.futures.ThreadPoolExecutor(len(self.workers)) as pool:
                found = pool.map(lambda worker: getattr(worker, body["method"])(**body["kwargs"]), self.workers)
                return 200, {"results": list(found)}
        if path == "/reset_prefix_cache":
            return self.reset
        return 200, {"status": "ok"}
