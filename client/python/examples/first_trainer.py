"""A trainer: a torch module whose weights are published after each step."""

import sys

import torch
import weightsync

model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

address = sys.argv[1] if len(sys.argv) > 1 else None  # None: this machine's daemon
with weightsync.Trainer("first", rank=0, world_size=1, address=address, dtype=torch.bfloat16) as trainer:
    trainer.register(model)  # a module, a state_dict, or (name, tensor) pairs
    for step in range(1, 4):
        model(torch.randn(8, 1024)).square().mean().backward()
        optimizer.step()
        update = trainer.publish(step=step)
        # From here on the weights may be changed: the next step could begin.
        result = update.wait()
        print(f"step {step}: {result}")  # who serves it, and who does not yet
