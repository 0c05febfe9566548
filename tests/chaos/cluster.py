"""A cluster of real daemons, trainer ranks and engines, and who watches over them: what ends is
started again after a random delay, as a supervisor would.

One thread: everything happens in Cluster.tick().
"""

import collections
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

from tests.chaos import journal

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1

MODEL_BYTES = 8 << 20
COORDINATOR_PORT = 7670
WORLD_SIZE = 2

# Short enough for a trial of some seconds, long enough for a loaded machine of two cores.
DEADLINES = {
    "gather_timeout": "3s",
    "prepare_timeout": "2s",
    "progress_timeout": "1500ms",
    "pause_timeout": "1500ms",
    "apply_timeout": "2s",
    "resume_timeout": "1500ms",
    "publish_timeout": "4s",
    "heartbeat_interval": "200ms",
    "heartbeat_timeout": "1500ms",
    "node_reconnect_grace": "1s",
    "recovery_timeout": "3s",
    "registration_timeout": "3s",
    "call_timeout": "3s",
    "wait_timeout": "20s",
    "shutdown_timeout": "1s",
}


class Log:
    def __init__(self):
        self.file = None
        self.rest = b""


class Process:
    """A program, started again whenever it ends, until it is given up."""

    def __init__(self, cluster, name, kind, node, argv):
        self.cluster, self.name, self.kind, self.node = cluster, name, kind, node
        self.argv = argv
        self.popen = None
        self.wanted = True
        self.start_at = None
        self.starts = 0
        self.stopped = False
        # Of engines: all of these live and die together.
        self.engine = None
        self.before_start = None

    @property
    def alive(self):
        return self.popen is not None and self.popen.poll() is None

    def start(self):
        if self.before_start:
            self.before_start()
        network, node = self.cluster.network, self.node
        cgroup = self.cluster.cgroup_of(node)

        def child():
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if cgroup:
                cgroup.enter()
            if network:
                network.enter(node)

        self.starts += 1
        self.stopped = False
        self.start_at = None
        log = open(f"{self.cluster.dir}/{self.name}.err", "ab")
        self.popen = subprocess.Popen(
            self.argv() if callable(self.argv) else self.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=child,
            env=self.cluster.environment(self.name),
        )
        log.close()

    def signal(self, number):
        if self.alive:
            self.popen.send_signal(number)
            self.stopped = number == signal.SIGSTOP or (
                self.stopped and number != signal.SIGCONT
            )

    def tell(self, **command):
        self.cluster.tell(self.name, command)


class Engine:
    """One replica: a control process and workers, each on a node."""

    def __init__(self, cluster, replica, control_node, worker_nodes, paused, swap):
        self.cluster, self.replica = cluster, replica
        self.worker_nodes = worker_nodes
        self.nodes = {control_node, *worker_nodes}
        gpus = [cluster.take_gpu() for _ in worker_nodes]
        common = [
            cluster.programs["engine"],
            f"--replica={replica}",
            f"--workers={len(worker_nodes)}",
            f"--seed={cluster.seed}",
            f"--bytes={MODEL_BYTES}",
            f"--engine_socket={cluster.dir}/{replica}.engine",
            f"--swap={'true' if swap else 'false'}",
        ]
        self.control = self._process(
            f"{replica}-control", "control", control_node, common + ["--role=control"], paused
        )
        self.workers = [
            self._process(
                f"{replica}-w{i}",
                "worker",
                node,
                common + ["--role=worker", f"--index={i}", *gpus[i]],
                paused,
            )
            for i, node in enumerate(worker_nodes)
        ]
        self.processes = [self.control, *self.workers]
        for process in self.processes:
            process.engine = self

    def _process(self, name, kind, node, argv, paused):
        cluster = self.cluster

        def command():
            flags = [
                f"--address=unix:{cluster.dir}/n{node}.sock",
                f"--incarnation={self.replica}-{cluster.incarnations[self.replica]}",
            ]
            if kind == "control":
                flags.append(f"--paused={'true' if paused() else 'false'}")
            return argv + flags + cluster.chaos_flags(name)

        return cluster.add_process(name, kind, node, command)

    def start(self):
        self.cluster.incarnations[self.replica] += 1
        for process in self.processes:
            process.start()

    def kill(self):
        for process in self.processes:
            process.signal(signal.SIGKILL)
            if process.popen:
                process.popen.wait()


class Call:
    """One run of weightsyncctl, which may wait for the cluster."""

    def __init__(self, cluster, words, node, timeout):
        self.words = words
        self._popen = subprocess.Popen(
            [
                cluster.programs["weightsyncctl"],
                *words,
                f"--address=unix:{cluster.dir}/n{node}.sock",
                f"--timeout={timeout:g}s",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.asked = time.monotonic_ns()
        self.answered = None
        self.output = self.reason = self.error = ""

    @property
    def done(self):
        if self.answered is None and self._popen.poll() is not None:
            # Little is said, so that nobody waits for a reader.
            self.output, error = self._popen.communicate()
            self.answered = time.monotonic_ns()
            # "weightsyncctl: REASON: sentence"
            self.reason = (error.split(": ") + ["", ""])[1]
            self.error = error.strip()
        return self.answered is not None

    @property
    def ok(self):
        return self.done and self._popen.returncode == 0

    def end(self):
        self._popen.kill()
        self._popen.communicate()


class Cluster:
    def __init__(self, directory, programs, seed, rng, network, memory, gpus=None):
        self.dir, self.programs, self.seed, self.rng = directory, programs, seed, rng
        self.network = network
        # gpus.Machine, with tensors on its GPUs, or None.
        self.gpus = gpus
        self._memory = memory
        self._cgroups = {}
        self.processes = {}
        self.engines = {}
        # Of all engines of that name, also of those that were removed.
        self.incarnations = collections.Counter()
        self.ranks = []
        self.daemons = {}
        self.restarts = 0
        # Who is where; the run fills it.
        self.source = 0
        self.receivers = []
        self.joining_node = 0
        # What is published, for faults that turn on it.
        self.words = {}
        # Engines have a spare set of tensors.
        self.swap = False
        # What the daemons are started with beside what is needed.
        self.flags = []
        # Of this process and of what it started.
        self._calls = []
        # Coordinators' state directories, beside that of node 0.
        self.other_states = []
        self._now = 0.0
        self._last_look = time.monotonic()
        self._logs = {}
        self._early = []
        self.on_line = lambda line: None
        self.on_hit = lambda hit: None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"{directory}/run.sock")
        self._socket.setblocking(False)
        self._out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._out.setblocking(False)
        if not network:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._port = probe.getsockname()[1]

    # ---- processes ----

    def environment(self, name):
        return {**os.environ, **(self.gpus.environment(name) if self.gpus else {})}

    def take_gpu(self):
        """The flag of one who has tensors: of the next GPU in turn."""
        return [f"--gpu={self.gpus.next()}"] if self.gpus else []

    def chaos_flags(self, name):
        return [
            f"--who={name}",
            f"--control_socket={self.dir}/{name}.chaos",
            f"--run_socket={self.dir}/run.sock",
            f"--log={self.dir}/{name}.jsonl",
        ]

    def add_process(self, name, kind, node, argv):
        process = Process(self, name, kind, node, argv)
        self.processes[name] = process
        # Of all that ever were.
        self._logs.setdefault(name, Log())
        return process

    def coordinator_address(self):
        return f"{self.network.address(0)}:{COORDINATOR_PORT}" if self.network else f"127.0.0.1:{self._port}"

    def add_node(self, node):
        """The daemon of a host; that of host 0 coordinates."""
        process = self._add_daemon(f"n{node}", node, self.state_dir(node), node == 0)
        self.daemons[node] = process
        if node == 0:
            # Opening it may leave old commits out.
            process.before_start = self.read_journal
        return process

    def add_coordinator(self, host, state):
        """One more, at the port of the first, on a host that has nothing else."""
        self.other_states.append(state)
        return self._add_daemon("other", host, state, True)

    def _add_daemon(self, name, host, state, coordinates):
        os.makedirs(state, exist_ok=True)
        address = self.network.address(host) if self.network else "127.0.0.1"
        argv = [
            self.programs["weightsyncd_faulty"],
            "--logtostderr",
            f"--node={name}",
            f"--unix_socket={self.dir}/{name}.sock",
            f"--state_dir={state}",
            f"--data_address={address}",
            "--insecure",
            f"--store_budget_bytes={MODEL_BYTES * 4}",
            f"--bucket_bytes={1 << 20}",
            "--copy_threads=1",
            f"--chaos_socket={self.dir}/{name}.chaos",
            f"--chaos_run_socket={self.dir}/run.sock",
            f"--chaos_log={self.dir}/{name}.jsonl",
            *(f"--{flag}={value}" for flag, value in DEADLINES.items()),
            *(self.gpus.daemon_flags(host) if self.gpus else []),
            *self.flags,
        ]
        if coordinates and name != "n0":
            argv.append(f"--listen={address}:{COORDINATOR_PORT}")
        elif coordinates:
            argv.append(f"--listen={self.coordinator_address()}")
        else:
            argv += ["--listen=", f"--coordinator_address={self.coordinator_address()}"]
        return self.add_process(name, "daemon", host, argv)

    def add_engine(self, replica, control_node, worker_nodes, paused, swap=False):
        engine = Engine(self, replica, control_node, worker_nodes, paused, swap)
        self.engines[replica] = engine
        return engine

    def add_rank(self, rank, node):
        name = f"t{rank}"
        argv = [
            self.programs["trainer"],
            f"--rank={rank}",
            f"--world_size={WORLD_SIZE}",
            f"--seed={self.seed}",
            f"--bytes={MODEL_BYTES}",
            f"--address=unix:{self.dir}/n{node}.sock",
        ] + self.take_gpu() + self.chaos_flags(name)
        process = self.add_process(name, "trainer", node, argv)
        self.ranks.append(process)
        return process

    def remove_engine(self, replica):
        engine = self.engines.pop(replica)
        engine.kill()
        for process in engine.processes:
            process.wanted = False
            del self.processes[process.name]

    def remove_node(self, node):
        self.remove_process(self.daemons.pop(node))

    def remove_process(self, process):
        process.wanted = False
        process.signal(signal.SIGKILL)
        if process.popen:
            process.popen.wait()
        del self.processes[process.name]

    def state_dir(self, node):
        return f"{self.dir}/state{node}"

    def cgroup_of(self, node):
        if not self._memory:
            return None
        if node not in self._cgroups:
            self._cgroups[node] = self._memory.group(f"n{node}")
        return self._cgroups[node]

    def starts_paused(self):
        """Most engines wait for weights; some serve what they loaded by themselves."""
        return self.rng.random() < 0.75

    def start_balloon(self, node):
        """A process of that node's control group that takes memory until the kernel ends one."""
        group = self.cgroup_of(node)
        subprocess.Popen(
            [sys.executable, "-c", "b = []\nwhile len(b) < 64: b.append(bytearray(1 << 20))"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=group.enter,
        )

    def tell(self, name, command):
        try:
            self._out.sendto(json.dumps(command).encode(), f"{self.dir}/{name}.chaos")
        except OSError:
            pass  # it is gone: what it was to do is void

    def call(self, *words, timeout, node=0):
        """weightsyncctl, by that node's daemon."""
        call = Call(self, words, node, timeout)
        self._calls.append(call)
        return call

    # ---- time ----

    def now(self):
        """Seconds, of which those do not count in which the machine ran something else.

        A tick takes some hundredths of a second. Where it takes many times as long the processes of
        the cluster wait for a processor too, and no time-out of theirs or of the run means anything.
        """
        real = time.monotonic()
        self._now += min(real - self._last_look, 0.1)
        self._last_look = real
        return self._now

    def run_until(self, condition, seconds):
        deadline = self.now() + seconds
        while not condition():
            if self.now() >= deadline:
                return False
            self.tick()
        return True

    def tick(self, pause=0.02):
        now = self.now()
        self._supervise(now)
        self.read_logs()
        try:
            while True:
                hit = json.loads(self._socket.recv(65536))
                self.on_hit(hit)
        except BlockingIOError:
            pass
        select.select([self._socket], [], [], pause)

    def _supervise(self, now):
        for process in list(self.processes.values()):
            if not process.wanted or process.engine or process.alive:
                continue
            if process.start_at is None:
                process.start_at = now + self.rng.uniform(0.05, 1.0)
            elif now >= process.start_at:
                self.restarts += process.starts > 0
                process.start()
        for engine in self.engines.values():
            if all(process.alive for process in engine.processes):
                continue
            control = engine.control
            if control.start_at is None:
                control.start_at = now + self.rng.uniform(0.05, 1.0)
            elif now >= control.start_at:
                self.restarts += control.starts > 0
                engine.kill()
                engine.start()

    # ---- logs ----

    def read_logs(self):
        """Hands on what was logged since the last call, in the order of time.

        What was logged while the files were being read waits for the next call: its cause may stand
        in a file that had been read before.
        """
        began = time.monotonic_ns()
        lines = self._early
        for name, log in self._logs.items():
            try:
                log.file = log.file or open(f"{self.dir}/{name}.jsonl", "rb")
            except FileNotFoundError:
                continue
            data = log.file.read()
            if not data:
                continue
            *whole, log.rest = (log.rest + data).split(b"\n")
            lines += [json.loads(line) for line in whole]
        lines.sort(key=lambda line: line["t"])
        self._early = [line for line in lines if line["t"] >= began]
        for line in lines[: len(lines) - len(self._early)]:
            self.on_line(line)

    def read_journal(self):
        for state in [self.state_dir(0), *self.other_states]:
            try:
                records = journal.read_all(f"{state}/coordinator.journal")
            except ValueError:
                continue  # the disk was full when it was made
            self.on_commits(journal.commits(records))
            if state == self.state_dir(0):
                self.on_journal(records)

    def on_commits(self, commits):
        pass

    def on_journal(self, records):
        """What the first coordinator's journal holds now, in order."""

    # ---- the end ----

    def destroy(self):
        for call in self._calls:
            if not call.done:
                call.end()
        for process in self.processes.values():
            process.wanted = False
            process.signal(signal.SIGKILL)
        for process in self.processes.values():
            if process.popen:
                process.popen.wait()
        if self.network:
            self.network.heal()
        for group in self._cgroups.values():
            group.destroy()
        for log in self._logs.values():
            if log.file:
                log.file.close()
        self._socket.close()
        self._out.close()
