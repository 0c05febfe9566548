"""A plain torch DDP trainer, with gloo on the CPU: what weightsync adds to it are the lines marked (+).

  torchrun --nproc-per-node=2 ddp.py [ADDRESS]          (or: python ddp.py, for one rank)
"""

import os
import sys

import torch
import torch.distributed
import weightsync  # (+)
from torch.nn.parallel import DistributedDataParallel

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29500")
torch.distributed.init_process_group(
    "gloo", rank=int(os.environ.get("RANK", 0)), world_size=int(os.environ.get("WORLD_SIZE", 1))
)
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

address = sys.argv[1] if len(sys.argv) > 1 else None
with weightsync.Trainer("policy", rank, world_size, address=address, dtype=torch.bfloat16) as trainer:  # (+)
    trainer.register(model)  # (+)

    torch.manual_seed(rank)
    for step in range(1, 6):
        x = torch.randn(64, 8)
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # gradients are averaged over ranks
        optimizer.step()
        update = trainer.publish(step=step)  # (+) from here on the weights may be changed
        if rank == 0:
            print(f"step {step}: loss {loss:.3f}, published version {update.version}", flush=True)

    result = update.wait()  # (+)
    print(
        f"rank {rank}: {result}; the last publish kept it {result.stall_seconds * 1e3:.1f} ms; "
        f"sum {sum(float(p.detach().bfloat16().double().sum()) for p in net.parameters()):.6f}",
        flush=True,
    )
torch.distributed.destroy_process_group()
