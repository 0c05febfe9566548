"""deploy/quickstart.sh: proves equality, notices a flipped bit, leaves a cluster or nothing."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import pytest

import cluster
import grpc_cli
import readme

pytestmark = pytest.mark.slow

QUICKSTART = readme.ROOT / "deploy/quickstart.sh"
SHAPES = {
    "model.embed_tokens.weight": (4097, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.q_proj.bias": (64,),
    "model.layers.0.self_attn.o_proj.weight": (64, 64),
    "model.norm.weight": (64,),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    cluster.write_safetensors(path, SHAPES)
    return path


def quickstart(directory, *arguments):
    return subprocess.run(
        [str(QUICKSTART), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TMPDIR": str(directory)},
        start_new_session=True,
    )


def running_in(directory):
    """Process ids whose command line names the directory."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(directory).encode() in command:
                found.append(int(entry.name))
    return found


def test_all_bytes_are_equal(tmp_path, model):
    run = quickstart(tmp_path, "--safetensors", model, "--versions", "3")
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert lines[-1] == "OK: 3 versions, 3 replicas, 4 workers, all bytes equal"
    rows = [line for line in lines if re.match(r"^ +[123]  ", line)]
    assert len(rows) == 3, run.stdout
    # Nothing is left behind.
    assert list(tmp_path.iterdir()) == []
    assert running_in(tmp_path) == []


def toolkit():
    """Whether the build finds nvcc and NCCL's headers, where third_party/cuda/cuda_configure.bzl looks for them."""
    roots = [pathlib.Path(os.environ.get(name) or "/nowhere") for name in ("CUDA_PATH", "CUDA_HOME", "NCCL_HOME")]
    roots += [pathlib.Path("/usr/local/cuda"), pathlib.Path("/usr/local"), pathlib.Path("/usr")]
    return os.environ.get("WEIGHTSYNC_CUDA") != "0" and all(
        any((root / name).exists() for root in roots) for name in ("bin/nvcc", "include/nccl.h")
    )


@pytest.mark.skipif(not toolkit(), reason="there is no CUDA toolkit with NCCL's headers to build the simulator with")
@pytest.mark.parametrize("flip, store", [(False, "host"), (True, "host"), (False, "device")])
def test_on_simulated_gpus(tmp_path, model, flip, store):
    """By CUDA IPC out of the trainers' GPUs and into the workers'; the simulator finds any misuse."""
    arguments = ["--safetensors", model, "--versions", "2", "--memory", "cuda", "--store", store, "--simulate_gpu"]
    run = quickstart(tmp_path, *arguments, *(["--flip_bit"] if flip else []))
    if flip:
        assert run.returncode == 1 and re.search(r"DIFFERENT: replica-1, worker 0", run.stderr), run.stdout + run.stderr
    else:
        assert run.returncode == 0, run.stdout + run.stderr
        assert run.stdout.splitlines()[-1].endswith("4 workers, all bytes equal, on simulated GPUs")
        assert list(tmp_path.iterdir()) == []
    assert running_in(tmp_path) == []


def test_a_flipped_bit_is_found(tmp_path, model):
    run = quickstart(tmp_path, "--safetensors", model, "--versions", "2", "--flip_bit")
    assert run.returncode == 1, run.stdout + run.stderr
    assert re.search(r"DIFFERENT: replica-1, worker 0\S*, version 2", run.stderr), run.stderr
    assert "OK:" not in run.stdout
    assert running_in(tmp_path) == []


def test_keep_leaves_a_cluster_to_look_at(tmp_path, model):
    run = quickstart(tmp_path, "--safetensors", model, "--versions", "1", "--keep")
    try:
        assert run.returncode == 0, run.stdout + run.stderr
        assert "OK: 1 version, 3 replicas, 4 workers, all bytes equal" in run.stdout
        printed = run.stdout[run.stdout.index("The cluster is up") :]
        address = re.search(r"export WEIGHTSYNC_ADDRESS=(\S+)", printed)[1]
        commands = re.findall(r"^\s+(\S+/weightsyncctl .*)$", printed, re.MULTILINE)
        assert len(commands) >= 3, printed
        for command in commands:
            if " watch " in command:
                # Goes on to the next versions until somebody stops it.
                command += " --timeout 2s"
            looked = subprocess.run(
                command.split(),
                capture_output=True,
                text=True,
                timeout=60,
                env={**os.environ, "WEIGHTSYNC_ADDRESS": address},
            )
            assert "demo" in looked.stdout, (command, looked)
        words = re.search(r"^\s+grpc_cli (.*)$", printed, re.MULTILINE)[1].split()
        assert "GetCluster" in grpc_cli.run(words)
    finally:
        left = running_in(tmp_path)
        for pid in left:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 30
        while running_in(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        still = running_in(tmp_path)
        for pid in still:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(tmp_path, ignore_errors=True)
    assert left, "nothing was left up"
    assert not still, "SIGTERM did not end it"


@pytest.mark.parametrize(
    "arguments", [["--modle", "x"], ["--versions", "0"], ["--versions"], ["--safetensors", "/none"]], ids=str
)
def test_wrong_command_lines(tmp_path, arguments):
    run = quickstart(tmp_path, *arguments)
    assert run.returncode == 2
    assert "quickstart.sh:" in run.stderr


def test_a_model_that_nobody_knows(tmp_path):
    run = quickstart(tmp_path, "--model", "no-such-model")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "no-such-model" in run.stderr
    assert running_in(tmp_path) == []
