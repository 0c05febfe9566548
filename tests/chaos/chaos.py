"""Breaks clusters and watches what their replicas serve. Started by tests/chaos/run.sh.

A cluster lives for several trials; what one trial leaves behind (a restarted node, a replica that is
behind) the next one meets. Everything random follows from the seed, the cluster's number and the
machine's own timing.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from tests.chaos import checker as checkers
from tests.chaos import cluster as clusters
from tests.chaos import faults, gpus, limits, network, operators
from tests.chaos.report import (
    BOUND,
    ENOUGH_TRIALS,
    EVERY_KIND,
    IDLE,
    ROLLBACK,
    Trial,
    add_up,
    missed,
    outcomes,
    table,
)

TRIALS_PER_CLUSTER = 10
# Logs of a trial that took longer are kept as well.
SLOW = 10.0

# What updates are drawn from: (weight, words of the publish command).
COMMIT = [(4, {}), (3, {"evict": True}), (2, {"max_unavailable": 1}), (1, {"max_unavailable": 2})]
STREAM = {"update_mode": 2}
UPDATE_MODE = [(7, {}), (3, STREAM)]
IN_PLACE = {"publish_mode": 2}
PUBLISH_MODE = [(7, {}), (3, IN_PLACE)]
# ABORT, DRAIN, KEEP.
PAUSE_MODE = [(2, {"pause_mode": 1}), (6, {"pause_mode": 2}), (2, {"pause_mode": 3})]
# NONE, for engines with a spare set of tensors.
NO_PAUSE = [(10, {"pause_mode": 4})]
# LATEST.
DELIVERY = [(6, {}), (4, {"delivery_policy": 2})]
VERIFY_SOURCE = [(8, {}), (2, {"verify_source": True})]
# How many clusters have engines that swap, and nodes that pause what is isolated.
SWAP = 0.25
PAUSE_ON_ISOLATION = 0.4
MAX_STALENESS = "700ms"
# A trial's publish is followed by another one at once.
BURST = 0.3

MISUSE = "MISUSE"  # the simulated GPU was used as none may be
ACCEPTED = "ACCEPTED"  # a publish ended well at a coordinator without its journal

# The state in which an update is once its coordinator has passed a point.
STATE_AFTER = {
    "coordinator:journal:update_opened": "GATHERING",
    "coordinator:command:prepare_update": "PREPARING",
    "coordinator:command:move_update": "MOVING",
    "coordinator:command:pause_replica": "PAUSING",
    "coordinator:journal:stream_begun": "MOVING",
    "coordinator:journal:update_committed": "COMMITTING",
    "coordinator:journalled:update_committed": "COMMITTED",
    "coordinator:command:apply_worker": "APPLYING",
    "coordinator:command:resume_replica": "RESUMING",
    "coordinator:journalled:update_ended": IDLE,
}


class StateOfUpdate:
    """Follows the newest update by the points that its coordinator passes."""

    def __init__(self):
        self.state, self._update = IDLE, ""

    def feed(self, line):
        if line["ev"] == "daemon" and line["coordinator"]:
            if line["who"] != "n0":
                return  # another one beside it
            # It takes up what was committed, and gives up what was not.
            if self.state not in ("COMMITTED", "APPLYING", "RESUMING"):
                self.state = IDLE
            return
        state = line["ev"] == "point" and STATE_AFTER.get(line["point"])
        if not state:
            return
        if line["point"] == "coordinator:journal:update_opened":
            self._update = line["update"]
        elif line["update"] != self._update:
            return
        if self.state == IDLE and state != "GATHERING" and state != IDLE:
            return  # a replica that joins late
        self.state = state


def pick(rng, table):
    return dict(rng.choices([words for _, words in table], [weight for weight, _ in table])[0])


class Run:
    """One cluster and its trials."""

    def __init__(self, arguments, number, work, programs, memory, net, calls):
        self.arguments, self.number, self.programs = arguments, number, programs
        self.rng = random.Random(f"{arguments.seed}/{number}")
        self.dir = f"{work}/c{number}"
        os.makedirs(self.dir)
        self.disk = net and limits.mount_small_disk(f"{self.dir}/state0")
        self.gpus = self._machine() if arguments.gpu else None
        self.cluster = clusters.Cluster(
            *(self.dir, programs, arguments.seed * 1000 + number, self.rng, net, memory),
            self.gpus,
        )
        self.checker = checkers.Checker()
        self.cluster.on_line = self._on_line
        self.cluster.on_commits = self.checker.commits
        self.cluster.on_journal = self.checker.journal
        self.cluster.on_hit = self._on_hit
        self.state = StateOfUpdate()
        self.version = 0
        self.content = 0
        # content -> {rank: whether its call and its wait have ended well}
        self._outcomes = collections.defaultdict(dict)
        self._reasons = {}
        # content -> what it was published with, and how the ranks' calls ended
        self._words = {}
        # How publishes of all clusters ended, and what operators were answered.
        self.calls = calls
        self.scenario = operators.Nothing(self)
        # What somebody does while the cluster recovers.
        self.mend = lambda: None
        # content -> {rank: how often it had been started when it was asked}
        self._asked = {}
        self._hit = None
        self._armed = 0
        self._pending = []
        # (when, content): publishes that ended well.
        self._accepted = []
        # Seconds from publish until all serve it.
        self._usual = 0.3
        # Of `recover`: violations, and when it began.
        self._found = []
        self._began = 0
        # What was found, and why it was stuck, before the first trial: that trial's to tell.
        self._at_start = [], ""

    def _machine(self):
        group = {"nccl": self.rng.choice(["nccl", "nccl", "auto"]), "tcp": "tcp"}[self.arguments.gpu]
        return gpus.Machine(self.dir, self.arguments.programs, group, self.arguments.store)

    # ---- what is heard ----

    def _on_line(self, line):
        self.state.feed(line)
        # Steps are judged when the journal has been read again.
        self._pending.append(line)
        if line["ev"] == "pausing" and not line["update"] and not self.scenario.excluded:
            self.calls["isolation: paused"] += 1
        if line["ev"] in ("connect", "published", "outcome", "left"):
            rank = line["who"]
            if line["ev"] in ("outcome", "left") or not line["ok"]:
                self._outcomes[line["content"]][rank] = line["ok"]
                result = "OK" if line["ok"] else line.get("reason", "")
                if line["ev"] == "left":
                    result = "not waited for"
                elif line["ok"]:
                    self._accepted.append((line["t"], line["content"]))
                self.calls[f"{self._words[line['content']]}: {result}"] += 1
                if not line["ok"]:
                    self._reasons[line["content"]] = line.get("reason", "")

    def _on_hit(self, hit):
        if hit["hit"] == self._armed and self._hit is None:
            self._hit = hit
        else:
            self.cluster.tell(hit["who"], {"cmd": "go", "id": hit["hit"]})

    def judge(self):
        self.cluster.read_logs()
        self.cluster.read_journal()
        lines, self._pending = self._pending, []
        for line in lines:
            self.checker.feed(line)
        violations, self.checker.violations = self.checker.violations, []
        for line in self.gpus.findings() if self.gpus else []:
            violations.append(checkers.Violation(MISUSE, "gpu", time.monotonic_ns(), line))
        return violations

    # ---- what is done ----

    def start(self):
        cluster, rng = self.cluster, self.rng
        nodes = self.arguments.nodes
        # With few nodes the coordinator's is a source or a receiver too.
        cluster.source = 1 if nodes >= 4 else rng.choice([0, 1])
        cluster.receivers = [n for n in range(nodes) if n != cluster.source and (n or nodes < 3)]
        if len(cluster.receivers) < 2:
            cluster.receivers = [n for n in range(nodes) if n or nodes < 3]
        cluster.joining_node = nodes
        cluster.swap = swap = rng.random() < SWAP
        if rng.random() < PAUSE_ON_ISOLATION:
            cluster.flags = ["--on_isolation=PAUSE", f"--max_staleness={MAX_STALENESS}"]
        for node in range(nodes):
            cluster.add_node(node).start()
        for rank in range(clusters.WORLD_SIZE):
            # Mostly together; otherwise one of them where a replica is.
            node = cluster.source if rank == 0 or rng.random() < 0.7 else cluster.receivers[0]
            cluster.add_rank(rank, node).start()
        first, last = cluster.receivers[0], cluster.receivers[-1]
        paused = cluster.starts_paused
        cluster.add_engine("one", first, [first], paused, swap).start()
        cluster.add_engine("two", last, [last, last], paused, swap).start()
        cluster.add_engine("wide", first, [first, last], paused, swap).start()
        ok = self.recover(60)[0]
        self._at_start = self._found, "" if ok else f"a new cluster did not come up: {self.diagnose()}"
        return ok

    def options(self):
        rng = self.rng
        commit, mode, publish = pick(rng, COMMIT), pick(rng, UPDATE_MODE), pick(rng, PUBLISH_MODE)
        pause = pick(rng, PAUSE_MODE + NO_PAUSE if self.cluster.swap else PAUSE_MODE)
        if "max_unavailable" in commit or pause in [words for _, words in NO_PAUSE]:
            mode = {}  # STREAM has neither: COMMIT_POLICY_ and PAUSE_MODE_UNIMPLEMENTED
        words = {**commit, **mode, **publish, **pause}
        if mode and (publish or rng.random() < 0.2):
            words["allow_no_recovery"] = True  # no whole copy outlives the sender
        return {**words, **pick(rng, DELIVERY), **pick(rng, VERIFY_SOURCE)}

    def publish(self, version=None, ranks=None, **words):
        """Tells all ranks, or these; returns the content."""
        ranks = self.cluster.ranks if ranks is None else ranks
        self.content += 1
        if version is None:
            self.version += 1
            version = self.version
        self._words[self.content] = " ".join(f"{k}={v}" for k, v in words.items()) or "defaults"
        command = {"cmd": "publish", "version": version, "content": self.content, **words}
        self._asked[self.content] = {rank: rank.starts for rank in ranks}
        for rank in ranks:
            rank.tell(**command)
        return self.content

    def ended(self, content):
        """Whether every rank has told how it went, or has died."""
        return all(
            rank.name in self._outcomes[content] or rank.starts != starts or not rank.alive
            for rank, starts in self._asked[content].items()
        )

    def served_by_all(self, content):
        """Or what an operator wants instead."""
        self.mend()
        self._found += self.judge()
        scenario = self.scenario
        if not scenario.as_wanted():
            return False
        if scenario.content is not None:
            # It is kept, and not served.
            well = self._outcomes[content]
            if not all(well.get(rank.name) for rank in self.cluster.ranks):
                return False
            content = scenario.content
        for replica in self.cluster.engines:
            if replica in scenario.excluded:
                continue
            serving = self.checker.serving.get(replica)
            if serving is None or serving[0] != content:
                return False
            # Of the engine that lives now, and it was told.
            told = self.checker.committed.get(content)
            if serving[1]["began"] < self._began or serving[1]["update"] != told.update:
                return False
        return True

    def recover(self, bound, version=None):
        """Publishes until every living replica serves something published in here."""
        self._found = []
        now = self.cluster.now
        began = now()
        self._began = time.monotonic_ns()
        while now() - began < bound:
            published = now()
            content = self.publish(version, **self.options())
            version = None
            # Its calls end, or a replica is late; then there is another one.
            left = bound - (now() - began)
            self.cluster.run_until(
                lambda: self.ended(content) or self.served_by_all(content), min(9, left)
            )
            well = [self._outcomes[content].get(rank.name) for rank in self.cluster.ranks]
            grace = 2 if all(well) else 0.05
            if self.cluster.run_until(lambda: self.served_by_all(content), min(grace, left)):
                ended = now()
                # Of an update that nothing disturbs.
                self._usual = min(2 * self._usual, 0.7 * self._usual + 0.3 * (ended - published))
                return True, ended - began
        return False, bound

    def trial(self, number, kind):
        trial = Trial(number, kind)
        (trial.violations, trial.stuck), self._at_start = self._at_start, ([], "")
        cluster, rng, now = self.cluster, self.rng, self.cluster.now
        words = cluster.words = self.options()
        fault = EVERY_KIND[kind](cluster, rng)
        draws = operators.usable(fault.keeps_holds, self.arguments.operators)
        scenario = operators.draw(self, draws)
        self.scenario = scenario
        alone = scenario.alone and not fault.republish
        if not alone and rng.random() < 0.5:
            scenario.begin()
            cluster.run_until(scenario.stands, 5)
        self._hit = None
        self._armed = number * 1000 + 1
        trigger = fault.trigger()  # which may choose its target
        if alone:
            trigger = faults.operator_point(cluster, rng)
        if trigger:
            name, point, skip = trigger
            cluster.tell(name, {"cmd": "arm", "id": self._armed, "point": point, "skip": skip})
        began = now()
        strike_after = None if trigger else rng.uniform(0, 1.1 * self._usual)
        content, version = self.content, self.version
        if not alone:
            if rng.random() < BURST and not fault.republish:
                self.publish(no_wait=True, **words)
                words = {**self.options(), "queued": True}
            content = self.publish(**words)
            version = self.version
        if not scenario.begun:
            scenario.begin()

        def due():
            stands = scenario.stands()
            if strike_after is not None:
                return now() - began >= strike_after
            return self._hit is not None or (stands if alone else self.ended(content))

        cluster.run_until(due, 5)
        cluster.read_logs()
        trial.state = self.state.state
        if alone and trial.state == IDLE and not scenario.stands():
            trial.state = ROLLBACK
        trial.point = self._hit["point"] if self._hit else "a random time"
        lasts = fault.strike(self._hit)
        if self._hit:
            cluster.tell(self._hit["who"], {"cmd": "go", "id": self._hit["hit"]})
        else:
            for name in cluster.processes:
                cluster.tell(name, {"cmd": "disarm"})
        if lasts is not None:
            # The trainer does not know, and goes on.
            struck, before = time.monotonic_ns(), self.content
            over = now() + lasts
            while now() < over:
                cluster.run_until(
                    lambda: scenario.stands() and self.ended(content) or now() >= over, lasts
                )
                if now() < over and not fault.republish:
                    content = self.publish(**{**self.options(), **fault.meanwhile})
            cluster.read_logs()
            meanwhile = {c for t, c in self._accepted if t > struck and c > before}
            if meanwhile:
                trial.detail = f"{len(meanwhile)} published meanwhile"
            for t, accepted in self._accepted:
                if fault.accepts_nothing and accepted in meanwhile:
                    detail = f"content {accepted}, by a coordinator that lost its journal"
                    trial.violations.append(checkers.Violation(ACCEPTED, "n0", t, detail))
            fault.heal()
            for detail in fault.found:
                violation = checkers.Violation(ACCEPTED, "other", time.monotonic_ns(), detail)
                trial.violations.append(violation)
        self._accepted = []
        details = [fault.describe(), scenario.describe(), trial.detail]
        trial.detail = "; ".join(filter(None, details))
        self._settle(trial, fault, version)
        if scenario.void:
            trial.scenario = f"{scenario.name}: void"
        else:
            trial.scenario = scenario.name
        return trial

    def _settle(self, trial, fault, version):
        """After the fault: operators' wishes are met, then everything is as before."""
        scenario = self.scenario
        adopter = operators.Adopter(self)
        if fault.may_lose_journal:
            self.mend = adopter.poll
        if fault.loses_journal and not self.cluster.run_until(adopter.poll, BOUND):
            trial.stuck = trial.stuck or f"JOURNAL_LOST was not shown, or not adopted: {self.diagnose()}"
        if not self.cluster.run_until(scenario.stands, BOUND):
            trial.stuck = trial.stuck or f"{scenario.describe()}: {scenario.last}; {self.diagnose()}"
        if scenario.void:
            # A call that failed may have placed its hold before.
            self._take_back(trial)
        ok, trial.recovery = self.recover(BOUND, version if fault.republish else None)
        trial.violations += self._found
        if ok and scenario.begun and not scenario.void:
            self._take_back(trial)
            ok, again = self.recover(BOUND)
            trial.violations += self._found
            trial.recovery = max(trial.recovery, again)
        if not ok:
            trial.stuck = trial.stuck or self.diagnose()
        scenario.finish()
        trial.violations += self.judge()
        self.scenario, self.mend = operators.Nothing(self), lambda: None

    def _take_back(self, trial):
        if not self.cluster.run_until(self.scenario.taken_back, BOUND):
            trial.stuck = (
                f"{self.scenario.describe()}, still: {self.scenario.last}; {self.diagnose()}"
            )

    # ---- what is kept ----

    def ctl(self, *words):
        try:
            return subprocess.run(
                [
                    self.programs["weightsyncctl"],
                    *words,
                    f"--address=unix:{self.dir}/n0.sock",
                ],
                capture_output=True,
                text=True,
                timeout=10,
            ).stdout
        except subprocess.TimeoutExpired:
            return "no answer"

    def diagnose(self):
        late = []
        for replica in self.cluster.engines:
            serving = self.checker.serving.get(replica)
            late.append(f"{replica} serves content {serving and serving[0]}")
        ended = [p.name for p in self.cluster.processes.values() if not p.alive]
        text = (
            f"content {self.content}, version {self.version}, last reasons "
            f"{list(self._reasons.items())[-3:]}; {'; '.join(late)}; not running: {ended}"
        )
        with open(f"{self.dir}/diagnosis", "w", encoding="utf-8") as file:
            file.write(text + "\n")
            for what in ("status", "replicas", "nodes", "versions"):
                file.write(f"--- {what}\n{self.ctl(what)}\n")
        return text

    def keep(self, where, name):
        shutil.rmtree(f"{where}/{name}", ignore_errors=True)
        shutil.copytree(
            self.dir,
            f"{where}/{name}",
            ignore=lambda d, names: [
                n for n in names if not n.endswith((".jsonl", ".err", "diagnosis", ".journal"))
                and not os.path.isdir(f"{d}/{n}")
            ],
        )

    def destroy(self):
        self.cluster.destroy()
        if self.disk:
            limits.unmount(f"{self.dir}/state0")
        shutil.rmtree(self.dir, ignore_errors=True)


def deck(seed, kinds, trials):
    """Every kind as often as any other, in a random order."""
    rng = random.Random(seed)
    cards = []
    while len(cards) < trials:
        round_of = sorted(kinds)
        rng.shuffle(round_of)
        cards += round_of
    return cards[:trials]


def parse(argv):
    parser = argparse.ArgumentParser(prog="tests/chaos/run.sh", description=__doc__)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=4, help="daemons, without one that joins")
    parser.add_argument("--minutes", type=float, help="no further trial begins after so long")
    parser.add_argument(
        "--gpu",
        nargs="?",
        const="tcp",
        choices=["tcp", "nccl"],
        help="all tensors on simulated GPUs; with nccl, bytes between nodes go over it",
    )
    parser.add_argument("--store", choices=["host", "device"], default="host", help="of --gpu: the daemons' stores")
    parser.add_argument("--cluster", type=int, help="replay only this cluster of the run")
    parser.add_argument("--kinds", help="only kinds of fault that contain this text")
    parser.add_argument("--operators", help="only what operators do whose name contains this text")
    parser.add_argument("--keep", help="logs of clusters with a finding are kept here")
    parser.add_argument("--json", help="totals are also written to this file")
    parser.add_argument("--sum", nargs="+", help="add up what --json wrote, and run nothing")
    parser.add_argument("--programs", help="where the programs were built")
    arguments = parser.parse_args(argv)
    if arguments.nodes < 3:
        parser.error("--nodes must be at least 3: a replica spans two of them")
    if arguments.store != "host" and not arguments.gpu:
        parser.error(f"--store {arguments.store} needs --gpu")
    return arguments


def programs(root):
    return {
        "weightsyncd_faulty": f"{root}/tests/chaos/weightsyncd_faulty",
        "engine": f"{root}/tests/chaos/engine",
        "trainer": f"{root}/tests/chaos/trainer",
        "weightsyncctl": f"{root}/client/ctl/weightsyncctl",
    }


def main(argv):
    arguments = parse(argv)
    if arguments.sum:
        return add_up(arguments.sum)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    namespaces = network.available()
    memory, why_no_memory = limits.memory() if namespaces else (None, "needs root")
    kinds, left_out = faults.usable(namespaces, memory, limits.small_disks())
    if not namespaces:
        print("No root: process faults only, all daemons on this host.")
    for kind, why in left_out.items():
        print(f"left out: {kind}: {why}")
    if arguments.gpu:
        # Of the others, those of processes: what the rest does is no other on GPUs.
        kinds = {k: v for k, v in kinds.items() if k.startswith(("kill ", "stop "))}
        kinds.update(gpus.KINDS)
        if arguments.gpu == "nccl":
            kinds.update(gpus.NCCL_KINDS)
    if arguments.kinds:
        kinds = {name: kind for name, kind in kinds.items() if arguments.kinds in name}
    print(
        f"bound: {BOUND:.0f} s from the end of a fault until every living replica serves a version "
        "published after it"
    )
    work = tempfile.mkdtemp(prefix="wschaos.")
    found = programs(arguments.programs)
    gpu = f"--gpu {arguments.gpu} --store {arguments.store} " if arguments.gpu else ""
    if arguments.gpu:
        found["weightsyncd_faulty"] = gpus.programs(arguments.programs, f"{work}/bin")
    keep = arguments.keep or tempfile.mkdtemp(prefix="wschaos-kept.")
    os.makedirs(keep, exist_ok=True)
    trials, steps, restarts, calls = [], 0, 0, collections.Counter()
    cards = deck(arguments.seed, kinds, arguments.trials)
    began = time.monotonic()
    run, cluster_number, net = None, -1, None
    over = False
    try:
        if namespaces:
            # One for all clusters, with hosts for a node that joins and for another coordinator.
            net = network.Network(f"wsc{os.getpid()}")
            for node in range(arguments.nodes + 2):
                net.add(node)
        for number, kind in enumerate(cards):
            if arguments.minutes and time.monotonic() - began > arguments.minutes * 60:
                print(f"stopped after {arguments.minutes:g} minutes, as asked")
                over = True
                break
            if arguments.cluster not in (None, number // TRIALS_PER_CLUSTER):
                continue
            if run is None or cluster_number != number // TRIALS_PER_CLUSTER:
                if run:
                    steps, restarts = steps + run.checker.steps, restarts + run.cluster.restarts
                    run.destroy()
                cluster_number = number // TRIALS_PER_CLUSTER
                run = Run(
                    *(arguments, cluster_number, work, found),
                    *(memory, net, calls),
                )
                run.start()
            trial = run.trial(number, kind)
            trials.append(trial)
            print(
                f"{number:4} {kind:30} {trial.scenario:11} {trial.state:10} at {trial.point} {trial.detail}: "
                f"{trial.recovery:.1f} s",
                flush=True,
            )
            if trial.recovery > SLOW and not trial.violations and not trial.stuck:
                name = f"seed{arguments.seed}-trial{number}-slow"
                run.keep(keep, name)
                print(f"     slow, no finding; logs: {keep}/{name}", flush=True)
            if trial.violations or trial.stuck:
                name = f"seed{arguments.seed}-trial{number}"
                run.keep(keep, name)
                for finding in trial.findings():
                    print(f"     {finding}")
                print(
                    f"     logs: {keep}/{name}; again: tests/chaos/run.sh {gpu}"
                    f"--seed {arguments.seed} "
                    f"--trials {arguments.trials} --cluster {cluster_number}",
                    flush=True,
                )
                steps, restarts = steps + run.checker.steps, restarts + run.cluster.restarts
                run.destroy()
                run = None
    finally:
        if run:
            steps, restarts = steps + run.checker.steps, restarts + run.cluster.restarts
            run.destroy()
        if net:
            net.destroy()
        shutil.rmtree(work, ignore_errors=True)
        if not os.listdir(keep):
            os.rmdir(keep)
    if not trials:
        print("no trial ran")
        return 1
    print()
    print(table(trials))
    print(outcomes(calls))
    never = missed(trials)
    for kind in never:
        print(f"NEVER HIT an update in flight in {ENOUGH_TRIALS} trials or more: {kind}")
    totals = {
        "seed": arguments.seed,
        "trials": len(trials),
        "asked": len(cards) if arguments.cluster is None else len(trials),
        "mixed": sum(bool(trial.violations) for trial in trials),
        "stuck": sum(bool(trial.stuck) for trial in trials),
        "never_hit": never,
        "worst_recovery_s": round(max(trial.recovery for trial in trials), 2),
        "bound_s": BOUND,
        "steps_checked": steps,
        "restarts": restarts,
        "seconds": round(time.monotonic() - began, 1),
        "stopped_early": over,
    }
    for trial in trials:
        for finding in trial.findings():
            print(f"FINDING trial {trial.number}, {trial.kind}, {trial.state}: {finding}")
    print(json.dumps(totals))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(
                {
                    **totals,
                    "calls": calls,
                    "each": [
                        [t.kind, t.state, bool(t.violations), bool(t.stuck), t.recovery, t.scenario]
                        for t in trials
                    ],
                    "findings": {
                        t.number: "; ".join(t.findings()) for t in trials if t.findings()
                    },
                },
                file,
            )
    return 1 if totals["mixed"] or totals["stuck"] or never else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
