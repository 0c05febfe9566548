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


def test_a_ddp_trainer_and_an_engine_in_forty_lines():
    assert len((EXAMPLES / "engine.py").read_text().splitlines()) <= 45
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
        assert {line.split(":")[0] for line in said if "1 replica serves models/policy/versions/5" in line} == {"rank 0", "rank 1"}
        cluster.wait_until(
            lambda: "serving version 5: 4 tensors" in engine.lines(), "the engine is not at version 5", 60, [engine]
        )
        versions = [int(line.split()[2].rstrip(":")) for line in engine.lines()]
        assert versions == sorted(versions)
