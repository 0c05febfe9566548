"""An inference engine in forty lines: a replica whose weights change while it is paused.

What weightsync adds to it are the lines marked (+).

  weightsyncd & python engine.py [MODEL [REPLICA [ADDRESS]]]
"""

import sys
import threading

import numpy
import weightsync  # (+)

model, replica, address = (sys.argv[1:] + ["policy", "replica-0", None][len(sys.argv) - 1 :])[:3]
weights = {}  # what the engine computes with
gate = weightsync.Gate()  # (+) open while the replica is not paused


def load(name, tensor):  # (+)
    """Takes a tensor of a new version over; only while the replica is paused."""
    weights[name] = numpy.array(tensor, dtype=numpy.float32)  # (+)


def show(info):
    total = sum(float(tensor.sum(dtype=numpy.float64)) for tensor in weights.values())
    print(f"serving version {info.version}: {len(weights)} tensors, sum {total:.6f}", flush=True)


worker = weightsync.Worker(  # (+)
    model, replica, load=load, address=address, on_pause=gate.pause, on_resume=gate.resume, on_version=show  # (+)
)  # (+)
worker.wait_registered()  # (+)
while not worker.ended:  # (+)
    with gate:  # (+) one step: all of it with the weights of one version
        sum(float(tensor.sum()) for tensor in weights.values())
    threading.Event().wait(0.01)
