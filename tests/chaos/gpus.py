"""The simulated GPUs of a chaos run (tests/gpu/sim), and what can go wrong with them.

All hosts of a cluster share one simulated machine: every trainer rank and every worker has its tensors on
one of its GPUs, and the daemons read the trainers' through their device agents.
"""

import os
import shutil
import signal

from tests.chaos import faults

# As many as a simulated machine can have: a node that moves bytes over NCCL has one of its own. Processes
# with tensors take them in turn.
DEVICES = 8
MEMORY_MB = 1024
# Longer than an agent takes to start on a loaded machine.
DEVICE_TIMEOUT = "3s"
AGENT = "weightsync_device_agent"

# Of cudart, and of NCCL.
FAULT, OUT_OF_MEMORY = 700, 2
REMOTE_ERROR, SYSTEM_ERROR = 6, 2


def programs(root, where):
    """A folder with the daemon and, beside it, the agent that it starts; and the simulator's libraries."""
    os.makedirs(where)
    for path in (f"{root}/tests/chaos/weightsyncd_faulty", f"{root}/daemon/{AGENT}"):
        shutil.copy(path, where)
    return f"{where}/weightsyncd_faulty"


def uuid(device):
    """As tests/gpu/sim/machine.cc makes them."""
    text = "".join(f"{(0xA0 + 17 * i + device) & 0xFF:02x}" for i in range(16))
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class Machine:
    """What the processes of one cluster see as their GPUs."""

    def __init__(self, directory, root, group, store="host"):
        self.dir = f"{directory}/g"
        self.group, self.store = group, store
        os.makedirs(self.dir)
        self._root = os.path.abspath(root)
        self._given = 0
        self._read = 0

    def next(self):
        self._given += 1
        return (self._given - 1) % DEVICES

    def daemon_flags(self, host):
        flags = ["--memory=cuda", "--gpu_slots=2", f"--device_timeout={DEVICE_TIMEOUT}"]
        if self.store != "host":
            flags.append(f"--store={self.store}")
        if self.group != "tcp":
            # NCCL's first, and those on which trainers may be.
            others = [uuid(device) for device in range(DEVICES) if device != host]
            flags += [f"--group={self.group}", f"--device_uuid={','.join([uuid(host), *others])}"]
        return flags

    def environment(self, name):
        sim = f"{self._root}/tests/gpu/sim"
        before = os.environ.get("LD_LIBRARY_PATH")
        return {
            "GPU_SIM_DIR": self.dir,
            "GPU_SIM_DEVICES": str(DEVICES),
            "GPU_SIM_MEMORY_MB": str(MEMORY_MB),
            "GPU_SIM_DELAY_US": "0",
            "GPU_SIM_KERNELS": f"{self._root}/transport/cuda/libkernel_twins.so",
            "GPU_SIM_ROLE": name,
            "LD_LIBRARY_PATH": sim + (f":{before}" if before else ""),
        }

    def plant(self, *rules):
        """In the place of what was planted before. Words as in tests/gpu/sim/faults.h."""
        with open(f"{self.dir}/faults.new", "w", encoding="utf-8") as file:
            file.write("\n".join(rules) + "\n")
        # A new file: it is told from the old one even within a tick of the clock.
        os.rename(f"{self.dir}/faults.new", f"{self.dir}/faults")

    def findings(self):
        """Lines since the last call: misuse of memory, streams or devices that the simulator saw."""
        try:
            with open(f"{self.dir}/findings", encoding="utf-8") as file:
                file.seek(self._read)
                lines = file.read().splitlines()
                self._read = file.tell()
        except FileNotFoundError:
            return []
        return lines


def agents(daemon):
    """Process numbers of a daemon's device agents."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8") as file:
                comm, rest = file.read().rsplit(")", 1)
        except OSError:
            continue  # it has ended meanwhile
        state, parent = rest.split()[:2]
        if AGENT.startswith(comm.split("(", 1)[1]) and int(parent) == daemon and state not in "ZX":
            found.append(int(name))
    return found


def signal_all(processes, number):
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            pass


class GpuFault(faults.Fault):
    def trigger(self):
        """Mostly while a rank's tensors are read or a worker's written."""
        if self.rng.random() < 0.5:
            return super().trigger()
        source, rank = f"n{self.rank().node}", self.rng.choice(self.cluster.ranks)
        worker = faults.targets(self.cluster, self.rng, "worker")
        return self.rng.choice(
            [
                (rank.name, "trainer:publishing", 0),
                ("n0", "coordinator:journalled:update_opened", 0),
                (source, "node:command:define_layout", 0),
                (source, "node:report:rank_snapshotted", 0),
                (worker.name, "worker:writing", 0),
            ]
        )

    def rank(self):
        return self.rng.choice(self.cluster.ranks)

    def daemon(self):
        """One that reads trainers' tensors."""
        return self.cluster.daemons[self.rank().node]

    def heal(self):
        self.cluster.gpus.plant()

    def describe(self):
        return self.at


class KillAgent(GpuFault):
    def strike(self, hit):
        daemon = self.daemon()
        self.at = f"of {daemon.name}"
        if daemon.alive:
            signal_all(agents(daemon.popen.pid), signal.SIGKILL)
        return None


class StopAgent(GpuFault):
    """Longer than --device_timeout, or not."""

    def strike(self, hit):
        daemon = self.daemon()
        self.at = f"of {daemon.name}"
        self.stopped = agents(daemon.popen.pid) if daemon.alive else []
        signal_all(self.stopped, signal.SIGSTOP)
        return self.rng.choice([self.rng.uniform(0.1, 1.5), self.rng.uniform(4.0, 7.0)])

    def heal(self):
        signal_all(self.stopped, signal.SIGCONT)


class PlantedFault(GpuFault):
    """In every process that has this name while it is planted."""

    def target(self):
        raise NotImplementedError

    def rule(self):
        raise NotImplementedError

    def strike(self, hit):
        name, rule = self.target(), self.rule()
        self.at = f"{name}: {rule}"
        self.cluster.gpus.plant(f"process={name} {rule}")
        return self.rng.uniform(0.3, 2.5)


class AgentFaults(PlantedFault):
    """The agent's context is lost in the middle of its work."""

    def target(self):
        return self.daemon().name

    def rule(self):
        call = self.rng.choice(["cudaLaunchKernel", "cudaMemcpyAsync", "cudaIpcOpenMemHandle"])
        return f"call={call} sticky={FAULT} after={self.rng.choice([0, 0, 1, 4])}"


class AgentStalls(PlantedFault):
    """The GPU does no more of the agent's work."""

    def target(self):
        return self.daemon().name

    def rule(self):
        return "call=cudaLaunchKernel stall=1"


class AgentOutOfMemory(PlantedFault):
    """An agent that is started again finds no room for its slots."""

    def target(self):
        daemon = self.daemon()
        if daemon.alive:
            signal_all(agents(daemon.popen.pid), signal.SIGKILL)
        return daemon.name

    def rule(self):
        return f"call=cudaMalloc error={OUT_OF_MEMORY} count=0"


class WorkerFaults(PlantedFault):
    """An engine's context is lost while it takes an update."""

    def target(self):
        return faults.targets(self.cluster, self.rng, "worker").name

    def rule(self):
        calls = ["cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaStreamQuery"]
        # Engines copy by a kernel where nothing comes from the host.
        if self.cluster.gpus.store == "device":
            calls.append("cuLaunchKernel")
        call = self.rng.choice(calls)
        return f"call={call} sticky={FAULT} after={self.rng.choice([0, 1, 3])}"


class WorkerRefused(PlantedFault):
    """Some commands of a worker find no memory; its context stays whole."""

    def target(self):
        return faults.targets(self.cluster, self.rng, "worker").name

    def rule(self):
        calls = ["cudaMemcpyAsync", "cudaStreamCreateWithFlags", "cudaHostRegister"]
        if self.cluster.gpus.store == "device":
            calls.append("cuLaunchKernel")
        call = self.rng.choice(calls)
        return f"call={call} error={OUT_OF_MEMORY} count={self.rng.choice([1, 2, 0])}"


class TrainerFaults(PlantedFault):
    """A trainer's context is lost while it publishes or registers."""

    def target(self):
        return self.rank().name

    def rule(self):
        call = self.rng.choice(["cudaDeviceSynchronize", "cudaMemcpy", "cudaIpcGetMemHandle"])
        return f"call={call} sticky={FAULT}"


class NcclFault(GpuFault):
    """In the agent of one node that moves bytes."""

    rules = ()
    # A communicator that is there already is made anew.
    anew = False

    def trigger(self):
        name = f"n{self.cluster.source}"
        return name, self.rng.choice(["node:command:move_update", "node:connect", "node:frame"]), 0

    def strike(self, hit):
        node = self.rng.choice([self.cluster.source, *self.cluster.receivers])
        daemon = self.cluster.daemons[node]
        self.at = f"{daemon.name}: {', '.join(self.rules)}"
        self.cluster.gpus.plant(*(f"process={daemon.name} {rule}" for rule in self.rules))
        if self.anew and daemon.alive:
            signal_all(agents(daemon.popen.pid), signal.SIGKILL)
        return self.rng.uniform(0.5, 4.0)


class NcclNeverJoins(NcclFault):
    rules = ("call=ncclCommInitRankConfig hang=1 count=0",)
    anew = True


class NcclRefuses(NcclFault):
    rules = (f"call=ncclCommInitRankConfig error={SYSTEM_ERROR} count=0",)
    anew = True


class NcclError(NcclFault):
    """A communicator has an error in the middle of its work."""

    rules = (f"call=ncclGroupEnd async={REMOTE_ERROR}",)


class NcclAbortHangs(NcclFault):
    """And it cannot be aborted: its process must be killed."""

    rules = (f"call=ncclGroupEnd async={REMOTE_ERROR}", "call=ncclCommAbort hang=1 count=0")


NCCL_KINDS = {
    "nccl never joins": NcclNeverJoins,
    "nccl refuses": NcclRefuses,
    "nccl error": NcclError,
    "nccl abort hangs": NcclAbortHangs,
}

KINDS = {
    "agent killed": KillAgent,
    "agent stopped": StopAgent,
    "agent faults": AgentFaults,
    "agent stalls": AgentStalls,
    "agent out of memory": AgentOutOfMemory,
    "worker's GPU faults": WorkerFaults,
    "worker's GPU refuses": WorkerRefused,
    "trainer's GPU faults": TrainerFaults,
}
