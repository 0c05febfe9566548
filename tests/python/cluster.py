"""Starts real daemons and clients on this machine, and ends them."""

import contextlib
import json
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

import ml_dtypes
import numpy
import safetensors.numpy

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BIN = ROOT / "bazel-bin"
DAEMON = BIN / "daemon/weightsyncd"
CTL = BIN / "client/ctl/weightsyncctl"
DEMO_TRAINER = BIN / "tests/e2e/demo_trainer"
DEMO_WORKER = BIN / "tests/e2e/demo_worker"

START_SECONDS = 30
STOP_SECONDS = 20


class Process:
    """A child whose output goes to a file; `lines()` are those of stdout so far."""

    def __init__(self, name, arguments, directory, user=None):
        self.name = name
        self.out = directory / f"{name}.out"
        self.log = directory / f"{name}.log"
        with open(self.out, "wb") as out, open(self.log, "wb") as log:
            self._popen = subprocess.Popen(
                [str(argument) for argument in arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                cwd=ROOT if user is None else directory,
                user=user,
            )

    @property
    def pid(self):
        return self._popen.pid

    def running(self):
        return self._popen.poll() is None

    def lines(self):
        return self.out.read_text(errors="replace").splitlines()

    def wait(self, timeout):
        """Waits for the end; returns the exit code. Fails at the deadline, with the log."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end in {timeout} s:\n{self.story()}") from None

    def terminate(self):
        if self.running():
            self._popen.send_signal(signal.SIGTERM)

    def stop(self):
        """Ends it: SIGTERM, and SIGKILL when that does not help. Returns the exit code."""
        self.terminate()
        try:
            return self._popen.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
            return None

    def story(self):
        """The end of what it said, for a failure's message."""
        text = self.out.read_text(errors="replace")[-2000:]
        return f"--- {self.name}: stdout\n{text}\n--- stderr\n{self.log.read_text(errors='replace')[-4000:]}"


def wait_until(condition, what, timeout=START_SECONDS, processes=()):
    """Polls until `condition()` is true. Fails at the deadline or when a process has ended."""
    deadline = time.monotonic() + timeout
    while True:
        result = condition()
        if result:
            return result
        dead = [process for process in processes if not process.running()]
        if dead or time.monotonic() > deadline:
            stories = "\n".join(process.story() for process in dead or processes)
            raise AssertionError(f"{what}: {'a process ended' if dead else 'too late'}\n{stories}")
        time.sleep(0.02)


class Node:
    """A running daemon."""

    def __init__(self, process, addresses):
        self.process = process
        self.listen = addresses["listen"][0]
        self.socket = f"unix:{addresses['unix_socket']}"
        self.http = addresses["http"]


class Cluster:
    """Daemons on this machine, the first of them the coordinator. Use it with `with`."""

    def __init__(self, nodes=1, flags=("--store_budget_bytes=2000000000",), user=None, daemon=DAEMON):
        self._flags = list(flags)
        # Of the daemons; None: of this process.
        self._user = user
        self._daemon = daemon
        self._count = nodes
        self._stack = contextlib.ExitStack()
        self.nodes = []
        self.trainers = []
        self.replicas = []
        self.model = "demo"
        self.directory = None

    def __enter__(self):
        self.directory = pathlib.Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-"))
        )
        if self._user is not None:
            # What Bazel builds lies where only its user may look.
            self.directory.chmod(0o777)
            self._daemon = shutil.copy(self._daemon, self.directory / "weightsyncd")
        try:
            for index in range(self._count):
                self._start_node(index)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _start_node(self, index):
        name = f"node{index}"
        ready = self.directory / f"{name}.ready"
        flags = [
            f"--node={name}",
            f"--unix_socket={self.directory / name}.sock",
            f"--state_dir={self.directory / name}",
            f"--ready_file={ready}",
            "--listen=127.0.0.1:0",
        ] + self._flags
        if index > 0:
            flags.append(f"--coordinator_address={self.nodes[0].listen}")
        process = Process(name, [self._daemon, *flags], self.directory, self._user)
        self._stack.callback(process.stop)
        wait_until(ready.exists, f"the daemon {name} did not start", processes=[process])
        self.nodes.append(Node(process, json.loads(ready.read_text())))

    def restart_node(self, index):
        """Ends a daemon and starts it again, with its state and its unix socket."""
        assert self.nodes[index].process.stop() == 0
        after = self.nodes[index + 1 :]
        del self.nodes[index:]
        self._start_node(index)
        self.nodes += after

    def start(self, name, *arguments):
        """Starts a program that ends, at the latest, with the cluster (in reverse order)."""
        process = Process(name, arguments, self.directory)
        self._stack.callback(process.stop)
        return process

    def start_replica(self, name, node, *flags):
        """Starts a replica of the demo on a node."""
        process = self.start(
            f"replica-{name}",
            DEMO_WORKER,
            f"--address={self.nodes[node].socket}",
            f"--name={self.model}",
            f"--replica={name}",
            *flags,
        )
        self.replicas.append(process)
        return process

    def start_trainers(self, count, *flags):
        """Starts the ranks of the demo's trainer on node 0."""
        for rank in range(count):
            self.trainers.append(
                self.start(
                    f"trainer-{rank}",
                    DEMO_TRAINER,
                    f"--address={self.nodes[0].socket}",
                    f"--name={self.model}",
                    f"--rank={rank}",
                    f"--world_size={count}",
                    *flags,
                )
            )


def write_safetensors(path, shapes):
    """Writes a small model: name -> shape; bf16 with values that nobody would guess."""
    random = numpy.random.default_rng(7)
    tensors = {
        name: random.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    safetensors.numpy.save_file(tensors, str(path))


DEMO_SHAPES = {
    "model.embed_tokens.weight": (96, 32),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.self_attn.q_proj.bias": (32,),
    "model.layers.0.self_attn.o_proj.weight": (32, 32),
    "model.layers.0.mlp.up_proj.weight": (64, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 64),
    "model.norm.weight": (32,),
}


@contextlib.contextmanager
def demo(versions=3):
    """Two daemons, two replicas and two trainer ranks of a small model that stay; all versions served."""
    with Cluster(nodes=2) as here:
        file = here.directory / "demo.safetensors"
        write_safetensors(file, DEMO_SHAPES)
        flags = [f"--safetensors={file}", f"--versions={versions}", "--linger"]
        here.start_replica("replica-0", 0, *flags)
        here.start_replica("replica-1", 1, *flags, "--workers=2")
        here.start_trainers(2, *flags, "--wait_replicas=2")

        def served():
            found = subprocess.run(
                [CTL, "--address", here.nodes[0].socket, "--json", "versions", f"{here.model}/{versions}"],
                capture_output=True,
                text=True,
                timeout=30,
            )
            return "STATE_ACTIVE" in found.stdout

        wait_until(served, "the model is not served", 60, here.trainers + here.replicas)
        yield here
