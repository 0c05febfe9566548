"""README.md says what is: its programs are compiled and run, its flags are the daemon's."""

import re
import subprocess
import sys

import cluster
import readme

EXAMPLES = ["tests/readme/trainer.cc", "tests/readme/worker.cc"]
PYTHON_EXAMPLES = ["client/python/examples/first_trainer.py", "client/python/examples/first_worker.py"]


def test_the_programs_in_the_readme_are_the_ones_that_are_built():
    assert readme.blocks("cpp") == [
        (readme.ROOT / path).read_text(encoding="utf-8") for path in EXAMPLES
    ]


def test_the_programs_do_what_the_readme_says():
    with cluster.Cluster() as here:
        worker = here.start("worker", cluster.BIN / "tests/readme/worker", here.nodes[0].socket)
        ctl = [str(cluster.CTL), f"--address={here.nodes[0].socket}", "--json", "replicas"]

        def serving():
            listed = subprocess.run(ctl, capture_output=True, text=True, timeout=30)
            return "STATE_SERVING" in listed.stdout

        cluster.wait_until(serving, "the replica does not serve", processes=[worker])
        trainer = here.start(
            "trainer", cluster.BIN / "tests/readme/trainer", here.nodes[0].socket
        )
        assert trainer.wait(60) == 0, trainer.story()
        assert trainer.lines() == [
            f"step {i}: 1 replica serves models/first/versions/{i}" for i in (1, 2, 3)
        ]
        # Before the trainer heard of it, every replica had resumed.
        assert [line for line in worker.lines() if "version 0" not in line] == [
            f"version {i}: weights are {i}" for i in (1, 2, 3)
        ]


def test_the_python_programs_are_the_examples_and_do_what_the_readme_says():
    assert readme.blocks("python") == [
        (readme.ROOT / path).read_text(encoding="utf-8") for path in PYTHON_EXAMPLES
    ]
    trainer, worker = (readme.ROOT / path for path in PYTHON_EXAMPLES)
    with cluster.Cluster() as here:
        serving = here.start("worker", sys.executable, worker, here.nodes[0].socket)
        cluster.wait_until(serving.lines, "the worker does not step", 120, [serving])
        training = here.start("trainer", sys.executable, trainer, here.nodes[0].socket)
        assert training.wait(120) == 0, training.story()
        assert training.lines() == [
            f"step {i}: 1 replica serves models/first/versions/{i}" for i in (1, 2, 3)
        ]
        cluster.wait_until(
            lambda: "a step with version 3" in serving.lines(), "it is not at version 3", 30, [serving]
        )
        versions = [int(line.rpartition(" ")[2]) for line in serving.lines()]
        assert versions == sorted(versions)


# -name (What it does.) type: string default: "value"
HELP = re.compile(r"^\s+-(\w+) \((.*?)\)\s+type: \w+\s+default:\s+(\S+)", re.MULTILINE | re.DOTALL)

# | `--name` | `value` | what it does |
ROW = re.compile(r"^\| `--(\w+)` \| `([^`]*)` \|", re.MULTILINE)


def flags_of_the_daemon():
    helped = subprocess.run(
        [str(cluster.DAEMON), "--help"], capture_output=True, text=True, timeout=30
    )
    assert helped.returncode == 0, helped.stderr
    found = {name: default.strip('"') for name, _, default in HELP.findall(helped.stdout)}
    assert "node" in found and "listen" in found, helped.stdout
    return found


def test_the_readme_lists_every_flag_with_its_default():
    listed = dict(ROW.findall(readme.README.read_text(encoding="utf-8")))
    listed = {name: default.strip('"') for name, default in listed.items()}
    assert listed == flags_of_the_daemon()


def test_every_deadline_is_in_the_readme():
    text = readme.README.read_text(encoding="utf-8")
    for name in flags_of_the_daemon():
        if name.endswith(("_timeout", "_grace", "_interval")):
            assert f"`--{name}`" in text, name


def test_the_paths_that_the_readme_names_exist():
    text = readme.README.read_text(encoding="utf-8")
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (readme.ROOT / path).exists(), path
    for block in readme.blocks("sh"):
        for path in re.findall(r"^(?:deploy|tests)/[\w./]+", block, re.MULTILINE):
            assert (readme.ROOT / path).exists(), path
