"""An inference replica of one worker: its weights change only while it is paused."""

import sys
import time

import torch
import weightsync

model = torch.nn.Linear(1024, 1024, dtype=torch.bfloat16)  # its memory stays where it is
gate = weightsync.Gate()

address = sys.argv[1] if len(sys.argv) > 1 else None
worker = weightsync.Worker(
    "first", "replica-0", model, address=address, on_pause=gate.pause, on_resume=gate.resume
)
worker.wait_registered()
while True:
    with gate, torch.no_grad():  # a step: all of it with the weights of one version
        model(torch.randn(8, 1024, dtype=torch.bfloat16))
        print(f"a step with version {gate.version}", flush=True)
    time.sleep(0.05)
