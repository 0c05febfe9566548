"""Programs in other languages, with stock gRPC and stubs made from proto/: the API is enough for them.

Also that one wheel of the Python package runs with the gRPC and protobuf of PyPI, which all other tests
use, and with the distribution's.
"""

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import zipfile

import numpy
import pytest
import weightsync

import cluster

PROTOS = ["weightsync/v1/admin.proto", "weightsync/v1/types.proto"]


def generate(target, plugin, *outputs):
    subprocess.run(
        ["protoc", f"-I{cluster.ROOT / 'proto'}", plugin, *(f"--{o}={target}" for o in outputs), *PROTOS],
        check=True,
    )
    return target


def run(*command, **environment):
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def check(lines):
    """What both programs say of the demo: two replicas, of which one has two workers' worth of nothing else."""
    assert lines[:2] == [
        f"replica models/demo/replicas/replica-{i} version 3 STATE_SERVING workers {n}" for i, n in ((0, 1), (1, 2))
    ]
    assert lines[2].startswith("models/demo/versions/3 STATE_ACTIVE ") and lines[2].endswith(" bytes")
    assert int(lines[2].split()[2]) > 1000
    assert lines[3:] == ["error 5 MODEL_UNKNOWN"]


def test_ruby(demo, tmp_path):
    stubs = generate(tmp_path, "--plugin=protoc-gen-grpc=/usr/bin/grpc_ruby_plugin", "ruby_out", "grpc_out")
    check(run("ruby", "-I", stubs, cluster.ROOT / "tests/languages/watch.rb", demo.nodes[1].listen, "models/demo", 3))


@pytest.mark.parametrize("python", [sys.executable, "/usr/bin/python3"])
def test_python_without_our_package(demo, tmp_path, python):
    stubs = generate(
        tmp_path,
        "--plugin=protoc-gen-grpc_python=/usr/bin/grpc_python_plugin",
        "python_out",
        "grpc_python_out",
    )
    program = cluster.ROOT / "tests/languages/watch.py"
    check(run(python, program, demo.nodes[0].listen, "models/demo", 3, PYTHONPATH=stubs))


@pytest.mark.parametrize("language", ["ruby", "python"])
def test_a_watch_that_begins_before_the_publish(tmp_path, language):
    """It sees the version come, and what becomes of it, without asking again."""
    if language == "ruby":
        stubs = generate(tmp_path, "--plugin=protoc-gen-grpc=/usr/bin/grpc_ruby_plugin", "ruby_out", "grpc_out")
        command, environment = ["ruby", "-I", stubs, cluster.ROOT / "tests/languages/watch.rb"], {}
    else:
        stubs = generate(
            tmp_path,
            "--plugin=protoc-gen-grpc_python=/usr/bin/grpc_python_plugin",
            "python_out",
            "grpc_python_out",
        )
        command = ["/usr/bin/python3", "-u", cluster.ROOT / "tests/languages/watch.py"]
        environment = {"PYTHONPATH": str(stubs)}
    paused, go_on = threading.Event(), threading.Event()

    def pause(request):
        paused.set()
        assert go_on.wait(60)

    live = {"w": numpy.zeros(1000, numpy.float32)}
    with cluster.Cluster() as here, weightsync.Trainer("watched", address=here.nodes[0].socket) as trainer:
        trainer.register(live)
        with weightsync.Worker("watched", "r", live, address=here.nodes[0].socket, on_pause=pause) as worker:
            worker.wait_registered()
            # "latest" waits for the first version, and goes on with the next ones until it is ended.
            watcher = subprocess.Popen(
                [str(part) for part in [*command, here.nodes[0].listen, "models/watched", "latest"]],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment},
            )
            assert watcher.stdout.readline().startswith("replica models/watched/replicas/r ")
            update = trainer.publish()
            assert paused.wait(60)
            states = [watcher.stdout.readline().split()[:2]]
            go_on.set()
            update.wait(60)
            while not states[-1][1].endswith("ACTIVE"):
                states.append(watcher.stdout.readline().split()[:2])
            watcher.terminate()
            watcher.communicate(timeout=60)
    assert {name for name, _ in states} == {"models/watched/versions/1"}
    assert len(states) >= 2, states


def test_the_wheel_has_the_modules_of_this_tree_alone(tmp_path):
    """One that was deleted stays in the directory of the build before, and must not be packed again."""
    shutil.copytree(
        cluster.ROOT / "client/python",
        tmp_path / "client/python",
        ignore=shutil.ignore_patterns("build", "_lib", "__pycache__", "*.egg-info", "*_pb2*"),
    )
    shutil.copytree(cluster.ROOT / "proto", tmp_path / "proto")
    library = tmp_path / "bazel-bin/client/cc/libweightsync.so"
    bazel = tmp_path / "bin/bazel"
    for path, text in (library, "the library"), (bazel, "#!/bin/sh\n"):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    bazel.chmod(0o755)

    def wheel(name):
        run(
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--no-build-isolation", "--wheel-dir", tmp_path / name, tmp_path / "client/python"),
            PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        )
        (made,) = (tmp_path / name).glob("*.whl")
        with zipfile.ZipFile(made) as packed:
            return packed.namelist()

    ghost = tmp_path / "client/python/weightsync/ghost.py"
    ghost.write_text("")
    assert "weightsync/ghost.py" in wheel("first")
    ghost.unlink()
    names = wheel("second")
    assert "weightsync/ghost.py" not in names
    assert {"weightsync/worker.py", "weightsync/_lib/libweightsync.so", "weightsync/v1/admin_pb2.py"} <= set(names)


def test_the_package_with_the_distributions_grpc(tmp_path):
    package = pathlib.Path(weightsync.__file__).parent
    shutil.copytree(package, tmp_path / "weightsync", ignore=shutil.ignore_patterns("__pycache__"))
    with cluster.Cluster() as here:
        program = cluster.ROOT / "tests/languages/debian_python.py"
        (line,) = run("/usr/bin/python3", program, here.nodes[0].socket, PYTHONPATH=tmp_path)
    used = dict(zip(("grpc", "protobuf"), line.split()[1::2]))
    for name, distribution in (("grpc", "grpcio"), ("protobuf", "protobuf")):
        assert used[name] != importlib.metadata.version(distribution), "these were to be different ones"
