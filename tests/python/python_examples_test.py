"""The examples of the Python package run as they are."""

import re
import sys

import pytest

import cluster

pytestmark = pytest.mark.slow

EXAMPLES = cluster.ROOT / "client/python/examples"


def test_reinforce():
    with cluster.Cluster() as here:
        process = here.start("reinforce", sys.executable, EXAMPLES / "reinforce.py", here.nodes[0].socket)
        assert process.wait(240) == 0, process.story()
        lines = process.lines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 30
    for line in steps:
        assert re.search(r"stall \d+\.\d ms, paused: replica-0 \d+ ms, replica-1 \d+ ms$", line), line
    first, last = (float(re.search(r"reward (\d\.\d\d)", line).group(1)) for line in (steps[0], lines[-1]))
    assert first < 0.4 < 0.9 < last, "the policy does not learn from what the replicas play"


def marked(name):
    """The lines that weightsync adds; every line of it is one of them."""
    lines = (EXAMPLES / name).read_text().splitlines()
    lines = lines[[i for i, line in enumerate(lines) if line == '"""'][0] + 1 :]
    found = [line for line in lines if "# (+)" in line]
    for line in lines:
        assert line in found or not re.search(r"\b(weightsync|trainer|worker)\.|update\.wait", line.split("#")[0]), line
    return found


def test_five_lines_and_ten_and_an_engine_of_forty():
    assert len(marked("ddp.py")) <= 5
    assert len(marked("engine.py")) <= 10
    assert len((EXAMPLES / "engine.py").read_text().splitlines()) <= 40


def test_a_ddp_trainer_and_an_engine_in_forty_lines():
    with cluster.Cluster(nodes=2) as here:
        engine = here.start("engine", sys.executable, EXAMPLES / "engine.py", "policy", "r", here.nodes[1].socket)
        trainer = here.start(
            "ddp",
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            EXAMPLES / "ddp.py",
            here.nodes[0].socket,
        )
        assert trainer.wait(240) == 0, trainer.story() + engine.story()
        said = trainer.lines()
        assert sum(line.startswith("step ") for line in said) == 5
        # On a busy machine the engine may come after the last of them.
        served = re.compile(r"(1 replica serves|no replica serves) models/policy/versions/5")
        assert {line.split(":")[0] for line in said if served.search(line)} == {"rank 0", "rank 1"}, said
        cluster.wait_until(
            lambda: any(line.startswith("serving version 5: 4 tensors") for line in engine.lines()),
            "the engine is not at version 5",
            60,
            [engine],
        )
        # What it computes with are the trainer's values, of every rank.
        theirs = {line.rpartition(" ")[2] for line in said if line.startswith("rank ")}
        assert theirs == {engine.lines()[-1].rpartition(" ")[2]}, (said, engine.lines())
        versions = [int(line.split()[2].rstrip(":")) for line in engine.lines() if line.startswith("serving ")]
        assert versions == sorted(versions)


def test_an_adapter_is_published_replaced_and_removed():
    with cluster.Cluster() as here:
        process = here.start("adapters", sys.executable, EXAMPLES / "adapters.py", here.nodes[0].socket)
        assert process.wait(120) == 0, process.story()
        lines = process.lines()
    # base @ 1 is 64 times its version, the adapter adds 4 * 64 times its own.
    assert [line for line in lines if line.startswith("engine: ")] == [
        f"engine: {what}"
        for what in (
            "base 0, no adapter: 0",
            "base 1, no adapter: 64",
            "base 1, adapter 1: 320",
            "base 1, adapter 2: 576",
            "base 2, adapter 2: 640",
            "base 2, no adapter: 128",
            "base 2, adapter 3: 896",
        )
    ]
    assert [line for line in lines if not line.startswith("engine: ")] == [
        "2 models, one engine",
        "1 replica serves models/base/versions/1",
        "1 replica serves models/adapter/versions/1",
        "1 replica serves models/adapter/versions/2",
        "1 replica serves models/base/versions/2",
        "models/adapter removed; may still hold it: nobody",
        "1 replica serves models/adapter/versions/3",
    ]
