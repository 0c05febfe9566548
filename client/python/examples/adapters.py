"""One engine with a base model and a LoRA adapter: each is a model of its own, and one Gate stands for both.

The adapter is published, replaced and removed while the engine serves; a step has all of one version of each.

  weightsyncd & python adapters.py [ADDRESS]
"""

import sys
import threading
import time

import numpy
import weightsync

WIDTH, RANK = 64, 4
address = sys.argv[1] if len(sys.argv) > 1 else None


def say(line):
    """In one piece: two threads print."""
    print(f"{line}\n", end="", flush=True)


def base_weights(version):
    return {"w": numpy.full((WIDTH, WIDTH), version, numpy.float32)}


def lora_weights(version):
    return {
        "lora_A": numpy.full((RANK, WIDTH), version, numpy.float32),
        "lora_B": numpy.ones((WIDTH, RANK), numpy.float32),
    }


class Engine(threading.Thread):
    """Answers all the time, with the adapter while it has one; prints when what it answers with changes."""

    def __init__(self):
        super().__init__(daemon=True)
        self.changed = threading.Event()
        self.base, self.lora = base_weights(0), lora_weights(0)  # their memory stays where it is
        self.gate = weightsync.Gate()
        base, lora = self.parts = self.gate.part("base"), self.gate.part("adapter")
        self.workers = [
            weightsync.Worker(
                "base", "engine", self.base, address=address, on_pause=base.pause, on_resume=base.resume
            ),
            weightsync.Worker(
                "adapter",
                "engine",
                self.lora,
                address=address,
                on_pause=lora.pause,
                on_resume=lora.resume,
                removable=True,  # the engine can go on without it
            ),
        ]
        for worker in self.workers:
            worker.wait_registered()

    def run(self):
        x, said = numpy.ones(WIDTH, numpy.float32), None
        while True:
            with self.gate:  # neither model is written to in here
                base, lora = self.parts
                y = self.base["w"] @ x
                with_adapter = lora.version > 0 and not lora.removed
                if with_adapter:
                    y = y + self.lora["lora_B"] @ (self.lora["lora_A"] @ x)
                used = f"base {base.version}, " + (f"adapter {lora.version}" if with_adapter else "no adapter")
            if used != said:
                said = used
                say(f"engine: {used}: {y[0]:g}")
                self.changed.set()
            time.sleep(0.001)


def show(line):
    """Prints what was done, and waits until the engine has answered with it."""
    say(line)
    engine.changed.wait(30)
    engine.changed.clear()


engine = Engine()
engine.start()
show(f"{len(engine.workers)} models, one engine")
base = weightsync.Trainer("base", address=address)
adapter = weightsync.Trainer("adapter", address=address)
with base, adapter, weightsync.Admin(address) as admin:
    show(base.publish(tensors=base_weights(1)).wait())
    show(adapter.publish(tensors=lora_weights(1)).wait())
    show(adapter.publish(tensors=lora_weights(2)).wait())  # in place of the first, at once
    show(base.publish(tensors=base_weights(2)).wait())  # the adapter stays
    removed = admin.call("RemoveModel", timeout=60, name="models/adapter")
    show(f"{removed.name} removed; may still hold it: {', '.join(removed.absent_replicas) or 'nobody'}")
    show(adapter.publish(tensors=lora_weights(3)).wait())  # and it is back
for worker in engine.workers:
    worker.close()
