"""What a training process would do without weightsync: broadcasts the bytes with torch.distributed's gloo.

  gloo_peer.py RANK WORLD_SIZE MASTER_ADDRESS PORT BYTES RUNS

Rank 0 prints the median of the seconds from "everybody is there" to "everybody has all bytes", of buckets of
up to 256 MiB, as trainers that broadcast make them.
"""

import datetime
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

BUCKET = 256 << 20
WARM_UP = 2


def main(rank, world_size, address, port, size, runs):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=120),
    )
    memory = torch.full((size,), rank + 1, dtype=torch.uint8)
    seconds = []
    for run in range(WARM_UP + runs):
        if rank == 0:
            memory.fill_(run + 7)
        dist.barrier()
        start = time.monotonic()
        for bucket in memory.split(BUCKET):
            dist.broadcast(bucket, src=0)
        dist.barrier()
        seconds.append(time.monotonic() - start)
        assert int(memory[0]) == int(memory[-1]) == run + 7
    if rank == 0:
        print(statistics.median(seconds[WARM_UP:]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
