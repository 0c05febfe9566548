"""One engine, a base and two LoRA adapters: each a model of its own, published, replaced and removed while it serves."""

import json
import multiprocessing
import os
import signal
import subprocess
import threading
import time

import numpy
import pytest
import weightsync

import cluster

WIDTH = 32
RANK = 4


@pytest.fixture(scope="module")
def daemon():
    with cluster.Cluster() as here:
        yield here


@pytest.fixture
def address(daemon):
    return daemon.nodes[0].socket


def ctl(address, *words):
    return subprocess.run(
        [cluster.CTL, *words, f"--address={address}"], capture_output=True, text=True, timeout=60
    )


def base_of(version):
    random = numpy.random.default_rng(version)
    return {"w": random.standard_normal((WIDTH, WIDTH)).astype(numpy.float32)}


def lora_of(name, version):
    random = numpy.random.default_rng(1000 * version + ord(name[-1]))
    return {
        "lora_A": random.standard_normal((RANK, WIDTH)).astype(numpy.float32),
        "lora_B": random.standard_normal((WIDTH, RANK)).astype(numpy.float32),
    }


def answer(base, lora=None):
    out = base["w"] @ numpy.ones(WIDTH, numpy.float32)
    return out if lora is None else out + lora["lora_B"] @ (lora["lora_A"] @ numpy.ones(WIDTH, numpy.float32))


def empty(tensors):
    return {name: numpy.zeros_like(tensor) for name, tensor in tensors.items()}


class Engine:
    """Answers with each adapter that it has, all the time; keeps (adapter, base's version, its version) of each."""

    def __init__(self, address, prefix, adapters):
        self.gate = weightsync.Gate()
        self.base, self.loras = empty(base_of(0)), {name: empty(lora_of(name, 0)) for name in adapters}
        self.names = {name: f"{prefix}-{name}" for name in ("base", *adapters)}
        self.parts = {name: self.gate.part(model) for name, model in self.names.items()}
        self.dropped, self.seen, self.wrong = [], set(), []
        self.steps = 0
        self.workers = {}
        for name, live in (("base", self.base), *self.loras.items()):
            part = self.parts[name]
            self.workers[name] = weightsync.Worker(
                self.names[name],
                "engine",
                live,
                address=address,
                on_pause=part.pause,
                on_resume=part.resume,
                on_remove=None if name == "base" else self._drop(name),
            )
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def _drop(self, name):
        def drop(_info):
            self.dropped.append(name)

        return drop

    def __enter__(self):
        for worker in self.workers.values():
            worker.wait_registered()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join(30)
        for worker in self.workers.values():
            worker.close()

    def _serve(self):
        while not self._end.is_set():
            for name in (None, *self.loras):
                with self.gate:
                    self.steps += 1
                    base = self.parts["base"].version
                    part = self.parts[name] if name else None
                    if not base or part and (part.removed or not part.version):
                        continue
                    version = part.version if part else 0
                    got = answer(self.base, self.loras[name] if name else None)
                    wanted = answer(base_of(base), lora_of(name, version) if name else None)
                    self.seen.add((name, base, version))
                    if not numpy.array_equal(got, wanted):
                        self.wrong.append((name, base, version))
            time.sleep(0.001)

    def serves(self, *what):
        self.seen.discard(what)
        cluster.wait_until(lambda: what in self.seen, f"the engine answers with {what}")


def test_adapters_are_published_replaced_and_removed(address):
    adapters = ("lora0", "lora1")
    with Engine(address, "multi", adapters) as engine:
        trainers = {name: weightsync.Trainer(model, address=address) for name, model in engine.names.items()}
        try:

            def publish(name, version):
                tensors = base_of(version) if name == "base" else lora_of(name, version)
                trainers[name].register(tensors)
                return trainers[name].publish(version=version).wait(60)

            publish("base", 1)
            engine.serves(None, 1, 0)
            publish("lora0", 1)
            publish("lora1", 1)
            engine.serves("lora0", 1, 1)
            engine.serves("lora1", 1, 1)
            # One is replaced; the other one and the base keep their bytes.
            before = {name: array.copy() for name, array in engine.loras["lora1"].items()}
            publish("lora0", 2)
            engine.serves("lora0", 1, 2)
            engine.serves("lora1", 1, 1)
            assert all(numpy.array_equal(before[name], engine.loras["lora1"][name]) for name in before)
            publish("base", 2)
            engine.serves("lora0", 2, 2)

            removed = ctl(address, "remove", engine.names["lora0"], "--json")
            assert removed.returncode == 0, removed.stderr
            assert json.loads(removed.stdout)["removed"] is True
            assert engine.dropped == ["lora0"] and engine.parts["lora0"].removed
            engine.seen.clear()
            engine.serves("lora1", 2, 1)
            assert not [entry for entry in engine.seen if entry[0] == "lora0"]
            # Once more changes nothing; the base is not to be removed.
            assert ctl(address, "remove", engine.names["lora0"]).returncode == 0
            refused = ctl(address, "remove", engine.names["base"])
            assert refused.returncode != 0 and "MODEL_REQUIRED" in refused.stderr
            engine.serves(None, 2, 0)

            # The next version brings it back, with a higher number.
            with pytest.raises(weightsync.WeightsyncError) as error:
                publish("lora0", 2)
            assert error.value.reason == "VERSION_NOT_NEWER"
            publish("lora0", 3)
            engine.serves("lora0", 2, 3)
            assert not engine.parts["lora0"].removed
            assert engine.dropped == ["lora0"]
        finally:
            for trainer in trainers.values():
                trainer.close()
        assert engine.steps > 0 and not engine.wrong


def _hold_the_removal(address, model, pipe):
    """An engine that ends while it drops its adapter."""

    def drop(_info):
        pipe.send("dropping")
        time.sleep(60)

    worker = weightsync.Worker(model, "engine", empty(lora_of("x", 0)), address=address, on_remove=drop)
    worker.wait_registered()
    pipe.send("registered")
    time.sleep(120)


def test_an_engine_that_dies_in_the_removal(address):
    """It comes back with what it had: it is told again."""
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    process = context.Process(target=_hold_the_removal, args=(address, "dying", other))
    process.start()
    try:
        assert mine.poll(60) and mine.recv() == "registered"
        with weightsync.Trainer("dying", address=address) as trainer:
            trainer.register(lora_of("x", 1))
            trainer.publish(version=1).wait(60)
            call = subprocess.Popen(
                [cluster.CTL, "remove", "dying", "--timeout=60s", f"--address={address}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert mine.poll(60) and mine.recv() == "dropping"
            os.kill(process.pid, signal.SIGKILL)
            process.join(30)
            dropped = []
            live = empty(lora_of("x", 1))
            with weightsync.Worker(
                "dying", "engine", live, address=address, on_remove=lambda info: dropped.append(info.removed)
            ) as worker:
                worker.wait_registered()
                _, errors = call.communicate(timeout=60)
                assert call.returncode == 0, errors
                # The call does not wait for a replica that is away.
                cluster.wait_until(lambda: dropped == [True], "it is not told", 20)
                trainer.publish(version=2).wait(60)
                worker.wait_installed(2, 30)
                assert all(numpy.array_equal(live[name], tensor) for name, tensor in lora_of("x", 1).items())
    finally:
        process.kill()
        process.join()
