"""What can go wrong, and where in the life of an update it is made to.

A Fault is one of the kinds below, drawn for one trial. `strike` does it; `heal` undoes it, at once or
later, and a trial's recovery is timed from there. Whatever ends is started again by the cluster.
"""

import os
import shutil
import signal

from tests.chaos import journal, limits
from tests.chaos.cluster import COORDINATOR_PORT

# Points that a process can be held at, by what it is. tests/chaos/control.h, weightsyncd_faulty.cc
# and daemon/service/fault_point.h say what they mean; the number is how often one update passes it.
COORDINATOR_POINTS = {
    "coordinator:journal:update_opened": 1,
    "coordinator:journalled:update_opened": 1,
    "coordinator:journal:layout_defined": 1,
    "coordinator:journalled:layout_defined": 1,
    "coordinator:command:prepare_update": 3,
    "coordinator:command:move_update": 3,
    "coordinator:command:update_manifest": 3,
    "coordinator:command:release_sources": 2,
    "coordinator:command:pause_replica": 4,
    "coordinator:journal:update_committed": 1,
    "coordinator:journalled:update_committed": 1,
    "coordinator:command:apply_worker": 6,
    "coordinator:command:resume_replica": 4,
    "coordinator:journal:update_ended": 1,
    "coordinator:journalled:update_ended": 1,
    "coordinator:command:end_update": 3,
}
# Of an update that is streamed.
STREAM_POINTS = {
    "coordinator:journal:stream_begun": 1,
    "coordinator:journalled:stream_begun": 1,
}
# Of what operators ask for, and of what is installed because of it.
OPERATOR_POINTS = {
    "coordinator:journal:hold_placed": 1,
    "coordinator:journalled:hold_placed": 1,
    "coordinator:journal:hold_released": 1,
    "coordinator:journalled:hold_released": 1,
    "coordinator:journal:node_drained": 1,
    "coordinator:journalled:node_drained": 1,
    "coordinator:command:pin_update": 2,
    "coordinator:command:pause_replica": 3,
    "coordinator:command:apply_worker": 3,
    "coordinator:command:resume_replica": 3,
}
SOURCE_POINTS = {
    "node:command:define_layout": 1,
    "node:command:prepare_update": 1,
    "node:report:rank_snapshotted": 2,
    "node:report:update_prepared": 1,
    "node:command:move_update": 1,
    "node:command:release_sources": 1,
    "node:command:end_update": 1,
    "node:connect": 1,
    "node:frame": 10,
}
RECEIVER_POINTS = {
    "node:command:prepare_update": 1,
    "node:report:update_prepared": 1,
    "node:command:move_update": 1,
    "node:command:update_manifest": 1,
    "node:report:update_verified": 1,
    "node:command:pause_replica": 2,
    "node:report:replica_paused": 2,
    "node:command:apply_worker": 2,
    "node:report:worker_applied": 2,
    "node:command:resume_replica": 2,
    "node:report:replica_resumed": 2,
    "node:command:end_update": 1,
}
TRAINER_POINTS = {"trainer:publishing": 1, "trainer:published": 1}
WORKER_POINTS = {"worker:writing": 1, "worker:applied": 1}
CONTROL_POINTS = {"control:pausing": 1, "control:paused": 1, "control:resuming": 1}


class Fault:
    """One kind of fault in one trial."""

    # Of a run without root.
    needs_network = False
    # Seconds after which it ends by itself; None: it is over at once.
    longest = None

    def __init__(self, cluster, rng):
        self.cluster, self.rng = cluster, rng
        # What must not be, in words.
        self.found = []

    def trigger(self):
        """(process name, point, skip), or None: at a random time."""
        if self.rng.random() < 0.2:
            return None
        return random_point(self.cluster, self.rng)

    def strike(self, hit):
        """Makes it happen. Returns seconds until `heal`, or None when there is nothing to undo."""
        raise NotImplementedError

    def heal(self):
        pass

    # Whether what operators asked for is known after it.
    keeps_holds = True
    # Between `strike` and `heal` no publish may end well.
    accepts_nothing = False
    # JOURNAL_LOST comes of it: always, or perhaps. It is adopted.
    loses_journal = may_lose_journal = False
    # The next version takes the number of the one that was hit, if that was aborted.
    republish = False
    # Words of the publishes while the fault lasts.
    meanwhile = {}

    def describe(self):
        return ""


def random_point(cluster, rng):
    """Of any process, so that every transition of every party is hit."""
    coordinator = dict(COORDINATOR_POINTS)
    if cluster.words.get("update_mode") == 2:
        coordinator.update(STREAM_POINTS)
    choices = [("n0", coordinator)] * 3
    source = cluster.source
    choices += [(f"n{source}", SOURCE_POINTS)] * 2
    choices += [(f"n{node}", RECEIVER_POINTS) for node in cluster.receivers]
    choices += [(process.name, TRAINER_POINTS) for process in cluster.ranks[:1]]
    engine = rng.choice(list(cluster.engines.values()))
    choices.append((engine.control.name, CONTROL_POINTS))
    choices.append((rng.choice(engine.workers).name, WORKER_POINTS))
    name, points = rng.choice(choices)
    ordered = sorted(points)
    # Around the decision three times as often: it is one point among many, and all turns on it.
    decisions = ("update_committed", "stream_begun")
    point = rng.choices(ordered, [3 if p.endswith(decisions) else 1 for p in ordered])[0]
    return name, point, rng.randrange(points[point])


def operator_point(cluster, rng):
    """Of a rollback, while no update is under way."""
    engine = rng.choice(list(cluster.engines.values()))
    name, points = rng.choice(
        [
            *[("n0", OPERATOR_POINTS)] * 3,
            (rng.choice(engine.workers).name, WORKER_POINTS),
            (engine.control.name, CONTROL_POINTS),
        ]
    )
    point = rng.choice(sorted(points))
    return name, point, rng.randrange(points[point])


def targets(cluster, rng, role):
    if role == "coordinator":
        return cluster.daemons[0]
    if role == "source":
        return cluster.daemons[cluster.source]
    if role == "receiver":
        joined = [node for node in [cluster.joining_node] if node in cluster.daemons]
        return cluster.daemons[rng.choice(cluster.receivers + joined)]
    if role == "trainer":
        return rng.choice(cluster.ranks)
    engine = rng.choice(list(cluster.engines.values()))
    return engine.control if role == "control" else rng.choice(engine.workers)


class Kill(Fault):
    role = None

    def strike(self, hit):
        self.target = targets(self.cluster, self.rng, self.role)
        self.target.signal(signal.SIGKILL)
        return None

    def describe(self):
        return self.target.name


class Stop(Fault):
    role = None

    def strike(self, hit):
        self.target = targets(self.cluster, self.rng, self.role)
        self.popen = self.target.popen
        self.target.signal(signal.SIGSTOP)
        return self.rng.uniform(0.1, 3.0)

    def heal(self):
        if self.target.popen is not self.popen:
            return
        # Most come back to life; some are ended by whoever looked after them.
        self.target.signal(signal.SIGKILL if self.rng.random() < 0.25 else signal.SIGCONT)

    def describe(self):
        return self.target.name


class KillPair(Fault):
    """Two at once: a coordinator and one more."""

    def strike(self, hit):
        second = self.rng.choice(["receiver", "source", "trainer", "worker", "control"])
        self.pair = [
            targets(self.cluster, self.rng, "coordinator"),
            targets(self.cluster, self.rng, second),
        ]
        for process in self.pair:
            process.signal(signal.SIGKILL)
        return None

    def describe(self):
        return " and ".join(process.name for process in self.pair)


class NetworkFault(Fault):
    needs_network = True

    def node(self):
        return self.rng.choice(sorted(self.cluster.daemons))

    def describe(self):
        return f"n{self.at}"


class LinkCut(NetworkFault):
    def strike(self, hit):
        self.at = self.node()
        self.cluster.network.cut(self.at)
        return self.rng.choice([self.rng.uniform(0.1, 1.0), self.rng.uniform(1.0, 4.0)])

    def heal(self):
        self.cluster.network.heal_link(self.at)


class LinkSlow(NetworkFault):
    def strike(self, hit):
        self.at = self.node()
        self.rate = self.rng.choice(["4mbit", "20mbit", "80mbit"])
        self.cluster.network.slow(self.at, self.rate)
        return self.rng.uniform(1.0, 3.0)

    def heal(self):
        self.cluster.network.heal_slow(self.at)

    def describe(self):
        return f"n{self.at} {self.rate}"


class LinkLossy(NetworkFault):
    def strike(self, hit):
        self.at = self.node()
        self.percent = self.rng.choice([2, 10, 40])
        self.cluster.network.lossy(self.at, self.percent)
        return self.rng.uniform(1.0, 3.0)

    def heal(self):
        self.cluster.network.heal_rules(self.at)

    def describe(self):
        return f"n{self.at} {self.percent}%"


class EdgeCut(NetworkFault):
    """Two healthy nodes do not hear each other; everybody else hears both."""

    def strike(self, hit):
        self.pair = self.rng.sample(sorted(self.cluster.daemons), 2)
        self.cluster.network.cut_edge(*self.pair)
        return self.rng.uniform(0.5, 4.0)

    def heal(self):
        for node in self.pair:
            self.cluster.network.heal_rules(node)

    def describe(self):
        return f"n{self.pair[0]} n{self.pair[1]}"


class FrameFault(Fault):
    """Rules of transport/fault in every daemon."""

    def trigger(self):
        # On the path of the bytes, before they have gone it.
        name = f"n{self.cluster.source}"
        point = self.rng.choice(["node:command:move_update", "node:connect", "node:frame"])
        return name, point, 0

    def rules(self):
        raise NotImplementedError

    def strike(self, hit):
        self.text = self.rules()
        for daemon in self.cluster.daemons.values():
            daemon.tell(cmd="rules", text=self.text)
        return self.rng.uniform(0.5, 2.5)

    def heal(self):
        for daemon in self.cluster.daemons.values():
            daemon.tell(cmd="rules", text="")

    def edge(self):
        source = f"n{self.cluster.source}"
        others = [f"n{node}" for node in self.cluster.receivers] + ["*"]
        return f"{self.rng.choice([source, '*'])}->{self.rng.choice(others)}"

    def describe(self):
        return self.text


class Delay(FrameFault):
    def rules(self):
        return f"kind=delay edge={self.edge()} ms={self.rng.choice([1, 5, 30])} count=0"


class Damage(FrameFault):
    def rules(self):
        kind = self.rng.choice(["damage", "damage", "damage_header"])
        count = self.rng.choice([1, 3, 20, 0])
        return f"kind={kind} edge={self.edge()} after={self.rng.randrange(40)} count={count}"


class EdgeLost(FrameFault):
    """The connection of one edge breaks, falls silent, or cannot be made again."""

    def rules(self):
        kind = self.rng.choice(["drop", "silence", "cut"])
        return f"kind={kind} edge={self.edge()} after={self.rng.randrange(40)}"


class MemoryLimit(Fault):
    """A node and its clients reach the limit of their control group; the kernel ends one of them."""

    def strike(self, hit):
        self.at = self.rng.choice(sorted(self.cluster.daemons))
        group = self.cluster.cgroup_of(self.at)
        group.limit_to_usage(2 << 20)
        self.cluster.start_balloon(self.at)
        return self.rng.uniform(0.3, 1.5)

    def heal(self):
        self.cluster.cgroup_of(self.at).unlimit()

    def describe(self):
        return f"n{self.at}"


class DiskFull(Fault):
    """The journal cannot grow."""

    def strike(self, hit):
        limits.fill_disk(self.cluster.state_dir(0))
        return self.rng.uniform(0.3, 3.0)

    def heal(self):
        limits.free_disk(self.cluster.state_dir(0))


class CoordinatorRestart(Fault):
    def strike(self, hit):
        self.cluster.daemons[0].signal(signal.SIGTERM)
        return None


class EmptyCoordinator(Fault):
    """A coordinator comes up with an empty journal: somebody lost the disk. It must accept nothing;
    then the disk is found again."""

    accepts_nothing = True

    def strike(self, hit):
        daemon = self.cluster.daemons[0]
        daemon.wanted = False
        daemon.signal(signal.SIGKILL)
        daemon.popen.wait()
        self.cluster.read_journal()
        state = self.cluster.state_dir(0)
        self.kept = state + ".kept"
        os.makedirs(self.kept)
        for name in os.listdir(state):
            shutil.move(f"{state}/{name}", self.kept)
        daemon.wanted = True
        daemon.start()
        return self.rng.uniform(1.0, 3.0)

    def heal(self):
        daemon = self.cluster.daemons[0]
        daemon.signal(signal.SIGKILL)
        daemon.popen.wait()
        state = self.cluster.state_dir(0)
        for name in os.listdir(state):
            os.unlink(f"{state}/{name}")
        for name in os.listdir(self.kept):
            shutil.move(f"{self.kept}/{name}", state)
        os.rmdir(self.kept)


class JournalLost(Fault):
    """The journal is gone for good: JOURNAL_LOST is shown, nothing is accepted, and an operator
    adopts the cluster."""

    accepts_nothing = True
    loses_journal = True
    keeps_holds = False

    def strike(self, hit):
        daemon = self.cluster.daemons[0]
        daemon.wanted = False
        daemon.signal(signal.SIGKILL)
        daemon.popen.wait()
        self.cluster.read_journal()
        state = self.cluster.state_dir(0)
        self.all = self.rng.random() < 0.5
        for name in os.listdir(state):
            if self.all or name == "coordinator.journal":
                os.unlink(f"{state}/{name}")
        daemon.wanted = True
        daemon.start()
        return self.rng.uniform(0.5, 2.0)

    def describe(self):
        return "all of the disk" if self.all else "the journal"


class SecondCoordinator(NetworkFault):
    """Two coordinators live: some nodes reach another one at the address of the first, which was
    started with a copy of its journal, or with none. Then the other one ends."""

    copy = False

    def strike(self, hit):
        cluster, host = self.cluster, self.cluster.joining_node + 1
        state = f"{cluster.dir}/other{len(cluster.other_states)}"
        os.makedirs(state)
        self.known = []
        if self.copy:
            shutil.copy(f"{cluster.state_dir(0)}/coordinator.journal", state)
            self.known = journal.read(f"{state}/coordinator.journal")
        self.other = cluster.add_coordinator(host, state)
        self.other.start()
        nodes = [node for node in sorted(cluster.daemons) if node]
        self.moved = self.rng.sample(nodes, self.rng.randint(1, len(nodes)))
        for node in self.moved:
            cluster.network.redirect(node, 0, host, COORDINATOR_PORT)
        return self.rng.uniform(2.0, 5.0)

    def heal(self):
        cluster = self.cluster
        cluster.remove_process(self.other)
        cluster.read_journal()
        own = journal.read(f"{cluster.other_states[-1]}/coordinator.journal")
        self.committed = len(set(own) - set(self.known))
        if not self.copy and own:
            self.found.append(f"{own[0]} was committed by a coordinator that lost its journal")
        for node in self.moved:
            cluster.network.heal_rules(node)

    def describe(self):
        return f"{' '.join(f'n{node}' for node in self.moved)}, it committed {self.committed}"


class SecondCoordinatorWithCopy(SecondCoordinator):
    copy = True
    # A hold that one of them was told of is not known to the other.
    keeps_holds = False
    # The nodes know of a higher term than the first has.
    may_lose_journal = True


class Republish(Fault):
    """A rank dies before its bytes are out; the number is tried again with other content."""

    republish = True

    def trigger(self):
        if self.rng.random() < 0.5:
            return "n0", "coordinator:journalled:update_opened", 0
        return f"n{self.cluster.source}", "node:report:rank_snapshotted", 0

    def strike(self, hit):
        self.target = self.rng.choice(self.cluster.ranks)
        self.target.signal(signal.SIGKILL)
        return None

    def describe(self):
        return self.target.name


class HangInApply(Fault):
    """A worker takes longer than it may."""

    def trigger(self):
        self.target = targets(self.cluster, self.rng, "worker")
        return self.target.name, "worker:writing", 0

    def strike(self, hit):
        seconds = self.rng.choice([0.5, 2.5, 6.0])
        self.target.tell(cmd="hang_apply", ms=int(seconds * 1000))
        return seconds

    def describe(self):
        return self.target.name


class StopInApply(Fault):
    """A worker's process is stopped in apply and continued when its slot has been used again."""

    meanwhile = {"evict": True, "max_unavailable": 0}

    def trigger(self):
        self.target = targets(self.cluster, self.rng, "worker")
        return self.target.name, "worker:writing", 0

    def strike(self, hit):
        self.popen = self.target.popen
        self.target.signal(signal.SIGSTOP)
        return self.rng.uniform(4.0, 6.0)

    def heal(self):
        if self.target.popen is self.popen:
            self.target.signal(signal.SIGCONT)

    def describe(self):
        return self.target.name


class HangInPause(Fault):
    """An engine does not pause in time."""

    def trigger(self):
        self.target = targets(self.cluster, self.rng, "control")
        return self.target.name, "control:pausing", 0

    def strike(self, hit):
        self.target.tell(cmd="hang_pause", ms=self.rng.choice([300, 5000]))
        return self.rng.uniform(0.3, 3.0)

    def heal(self):
        self.target.tell(cmd="hang_pause", ms=0)

    def describe(self):
        return self.target.name


class NodeJoins(Fault):
    """A node with a replica of its own; the one of an earlier trial leaves first."""

    def __init__(self, cluster, rng):
        super().__init__(cluster, rng)
        if "joined" in cluster.engines:
            cluster.remove_engine("joined")
            cluster.remove_node(cluster.joining_node)

    def strike(self, hit):
        node = self.cluster.joining_node
        self.cluster.add_node(node).start()
        cluster = self.cluster
        cluster.add_engine("joined", node, [node], cluster.starts_paused, cluster.swap).start()
        return None


def _of_role(base, role):
    return type(f"{base.__name__}{role.title()}", (base,), {"role": role})


ROLES = ["coordinator", "receiver", "source", "trainer", "worker", "control"]

KINDS = {f"kill {role}": _of_role(Kill, role) for role in ROLES}
KINDS.update({f"stop {role}": _of_role(Stop, role) for role in ROLES})
KINDS.update(
    {
        "kill coordinator and another": KillPair,
        "link cut": LinkCut,
        "link slow": LinkSlow,
        "link lossy": LinkLossy,
        "edge cut": EdgeCut,
        "frames delayed": Delay,
        "frames damaged": Damage,
        "edge lost": EdgeLost,
        "memory limit": MemoryLimit,
        "disk full": DiskFull,
        "coordinator restart": CoordinatorRestart,
        "empty journal": EmptyCoordinator,
        "journal lost and adopted": JournalLost,
        "second coordinator, empty": SecondCoordinator,
        "second coordinator, a copy": SecondCoordinatorWithCopy,
        "number tried again": Republish,
        "hang in apply": HangInApply,
        "stopped in apply": StopInApply,
        "hang in pause": HangInPause,
        "node joins": NodeJoins,
    }
)


def usable(network, memory, disks):
    """The kinds that can be made here, and why the others cannot."""
    kinds, left_out = {}, {}
    for name, kind in KINDS.items():
        if kind.needs_network and not network:
            left_out[name] = "network namespaces need root"
        elif kind is MemoryLimit and not memory:
            left_out[name] = "no control group with a memory limit can be made here"
        elif kind is DiskFull and not disks:
            left_out[name] = "no small file system can be mounted here"
        else:
            kinds[name] = kind
    return kinds, left_out
