"""An inference engine in forty lines: a replica whose weights change while it is paused.

  weightsyncd & python engine.py [MODEL [REPLICA [ADDRESS]]]
"""

import sys
import threading

import numpy
import weightsync

model, replica, address = (sys.argv[1:] + ["policy", "replica-0", None][len(sys.argv) - 1 :])[:3]
weights = {}  # what the engine computes with
gate = weightsync.Gate()  # open while the replica is not paused


def load(name, tensor):
    """Takes a tensor of a new version over; only while the replica is paused."""
    weights[name] = numpy.array(tensor, dtype=numpy.float32)


def resume(info):
    print(f"serving version {info.version}: {len(weights)} tensors", flush=True)
    gate.resume(info)


worker = weightsync.Worker(
    model, replica, load=load, views="numpy", address=address, on_pause=gate.pause, on_resume=resume
)
worker.wait_registered()
while not worker.ended:
    with gate:  # one step: all of it with the weights of one version
        sum(float(tensor.sum()) for tensor in weights.values())
    threading.Event().wait(0.01)
