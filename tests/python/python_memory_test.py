"""What a worker with a loader takes of memory: a buffer, and not the model once more."""

import multiprocessing
import zlib

import numpy
import pytest
import weightsync

import cluster

MIB = 1 << 20
TENSORS, TENSOR_BYTES = 16, 16 * MIB
MODEL_BYTES = TENSORS * TENSOR_BYTES
BUFFER_BYTES = 16 * MIB
# What Python, gRPC and the allocator take meanwhile.
SLACK_BYTES = 48 * MIB


def weights(seed):
    random = numpy.random.default_rng(seed)
    return {
        f"layer.{i}": random.integers(0, 1 << 31, TENSOR_BYTES // 4, dtype=numpy.int32).view(numpy.float32)
        for i in range(TENSORS)
    }


def memory():
    """(bytes of this process's own, resident bytes at their highest with all that it has mapped)."""
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmHWM"))


def _engine(address, model, whole, pipe):
    """An engine that keeps nothing of what it is given but its checksum."""
    seen, own = {}, []

    def look(name, tensor):
        seen[name] = zlib.crc32(memoryview(tensor).cast("B"))
        own.append(memory()[0])

    def look_at_all(pairs):
        for name, tensor in pairs:
            look(name, tensor)

    loader = {"load_weights": look_at_all} if whole else {"load": look}
    worker = weightsync.Worker(
        model,
        "engine",
        {f"layer.{i}": ((TENSOR_BYTES // 4,), numpy.float32) for i in range(TENSORS)},
        views="numpy",
        address=address,
        load_buffer_bytes=BUFFER_BYTES,
        **loader,
    )
    with worker:
        worker.wait_registered()
        before = memory()
        pipe.send("registered")
        for _ in range(2):
            pipe.recv()
            pipe.send((dict(seen), max(own) - before[0], memory()[1] - before[1]))
            seen.clear()
        pipe.recv()


@pytest.mark.parametrize("whole", [False, True], ids=["load", "load_weights"])
def test_the_model_is_not_held_once_more(whole):
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    with cluster.Cluster() as here:
        address = here.nodes[0].socket
        engine = context.Process(target=_engine, args=(address, "big", whole, other))
        engine.start()
        try:
            assert mine.poll(60) and mine.recv() == "registered"
            with weightsync.Trainer("big", address=address) as trainer:
                # The second finds everything warm, and lies elsewhere in the store.
                for version in (1, 2):
                    tensors = weights(version)
                    result = trainer.publish(version=version, tensors=tensors).wait(120)
                    assert result.serving_count == 1, result
                    mine.send("measure")
                    assert mine.poll(60)
                    seen, own, resident = mine.recv()
                    assert seen == {name: zlib.crc32(memoryview(t).cast("B")) for name, t in tensors.items()}
                    assert own < BUFFER_BYTES + SLACK_BYTES < MODEL_BYTES / 2, f"{own / MIB:.0f} MiB"
                    # With the store's arenas (for --keep_updates=2), which are the daemon's and mapped here.
                    assert resident < 2 * MODEL_BYTES + BUFFER_BYTES + SLACK_BYTES, f"{resident / MIB:.0f} MiB"
                    print(f"version {version}: {own / MIB:.0f} MiB of its own, {resident / MIB:.0f} MiB resident")
            mine.send("end")
            engine.join(60)
            assert engine.exitcode == 0
        finally:
            engine.kill()
            engine.join()
