"""The chaos run's judge: what it must find, in made-up logs and in planted faults of a live cluster."""

import argparse
import collections
import itertools
import pathlib
import signal
import struct
import sys

import pytest

import readme

sys.path.insert(0, str(readme.ROOT))
from tests.chaos import chaos, checker, gpus, journal  # noqa: E402

HASHES = {content: f"{content:016x}" for content in range(1, 12)}
# Bytes of no content.
TORN = "torn"


class Logs:
    """A replica of two workers, "r", as its processes would write it down."""

    def __init__(self):
        self.checker = checker.Checker()
        self.now = 0
        self.steps = itertools.count(1)
        for content in range(1, 9):
            self.publish(content)
        self.start("i1")

    def __call__(self, who, **line):
        self.now += 1
        self.checker.feed({"t": self.now, "who": who, **line})

    def publish(self, content):
        self(
            "t0",
            ev="content",
            content=content,
            hashes1=["1" + HASHES[content]],
            hashes2=["a" + HASHES[content], "b" + HASHES[content]],
        )

    def start(self, incarnation, paused=True):
        self("c", ev="engine", replica="r", incarnation=incarnation, workers=2, paused=paused)
        for i, who in enumerate("ab"):
            self(
                f"w{i}",
                ev="worker",
                replica="r",
                incarnation=incarnation,
                index=i,
                workers=2,
                own=who + "own",
            )

    def commit(self, *contents):
        for content in contents:
            self(
                "n0", ev="point", point="coordinator:journal:update_committed", update=f"u{content}"
            )
        self.checker.commits([journal.Commit(f"u{c}", c, c) for c in contents])

    def step(self, first, second=None, told=None):
        second = first if second is None else second
        text = {0: "own", TORN: TORN, **HASHES}
        self(
            "c",
            ev="step",
            step=next(self.steps),
            began=self.now + 1,
            update=f"u{told or first}",
            version=told or first,
            workers=[{"hash": "a" + text[first]}, {"hash": "b" + text[second]}],
        )

    def found(self):
        return [violation.kind for violation in self.checker.violations]


@pytest.fixture
def logs():
    return Logs()


def test_a_clean_history_is_clean(logs):
    logs.commit(1, 2)
    logs("w0", ev="writing", update="u1")
    logs("c", ev="resumed", update="u1", version=1)
    logs.step(1)
    logs("c", ev="paused", update="u2")
    logs("w0", ev="writing", update="u2")
    logs("c", ev="resumed", update="u2", version=2)
    logs.step(2)
    logs.start("i2", paused=False)
    logs.step(0)
    logs.step(2)
    assert logs.found() == []
    # Of the second incarnation the third step is the first of which a line tells.
    assert logs.checker.steps == 6


def test_two_updates_in_two_workers(logs):
    logs.commit(1, 2)
    logs.step(1, 2)
    assert logs.found() == [checker.MIXED]


def test_bytes_of_no_update(logs):
    logs.commit(1)
    logs.step(1, TORN)
    assert logs.found() == [checker.MIXED]


def test_an_update_that_nobody_committed(logs):
    logs.commit(1)
    logs.step(1)
    logs.step(3)
    assert logs.found() == [checker.UNCOMMITTED]


def test_an_older_update_unless_a_rollback_asked_for_it(logs):
    logs.commit(1, 2)
    logs.step(2)
    logs.step(1)
    assert logs.found() == [checker.OLDER]
    logs.checker.allow_rollback(1)
    logs.step(1)
    assert logs.found() == [checker.OLDER]


def test_what_an_engine_came_with_after_an_update(logs):
    logs.commit(1)
    logs.step(1)
    logs.step(0)
    assert logs.found() == [checker.OLDER]


def test_a_restart_does_not_excuse_an_older_update(logs):
    logs.commit(1, 2)
    logs.step(2)
    logs.start("i2")
    logs.step(1)
    assert logs.found() == [checker.OLDER]


def test_a_label_that_advances_on_old_weights(logs):
    logs.commit(1, 2)
    logs.step(1, told=2)
    assert logs.found() == [checker.MISLABELED]


def test_memory_written_under_a_running_engine(logs):
    logs.commit(1)
    logs("c", ev="resumed", update="u1", version=1)
    logs("w1", ev="writing", update="u1")
    assert logs.found() == [checker.WROTE_WHILE_SERVING]


def test_a_commit_told_before_it_is_in_the_journal(logs):
    logs("w1", ev="writing", update="u1")
    assert logs.found() == [checker.EARLY]


def test_a_step_under_an_operators_hold(logs):
    logs.commit(1, 2)
    logs.step(1)
    logs("c", ev="paused", update="")
    logs.checker.held("r", logs.now)
    # An update that resumes what somebody else holds.
    logs("c", ev="resumed", update="u2", version=2)
    logs.step(2)
    assert logs.found() == [checker.HELD]
    logs.checker.resumed("r", logs.now)
    logs.step(2)
    assert logs.found() == [checker.HELD]


def test_a_hold_outlives_the_engine(logs):
    logs.commit(1, 2)
    logs("c", ev="paused", update="")
    logs.checker.held("r", logs.now)
    # It runs until it is known and paused; from then on it does not.
    logs.start("i2", paused=False)
    logs.step(0)
    assert logs.found() == []
    logs("c", ev="paused", update="")
    logs.step(2)
    assert logs.found() == [checker.HELD]
    logs.start("i3")
    logs.step(2)
    assert logs.found() == [checker.HELD] * 2


def test_whether_an_engine_is_paused_is_its_own_word(logs):
    assert logs.checker.paused("r")
    logs("c", ev="resumed", update="u1", version=1)
    assert not logs.checker.paused("r")
    logs.start("i2")
    assert logs.checker.paused("r")


def test_an_older_update_after_the_release(logs):
    logs.commit(1, 2, 3)
    logs.step(2)
    logs.checker.allow_rollback(1)
    logs.step(1)
    logs.checker.rollback_stands(logs.now)
    logs.step(1)
    logs.checker.release_asked(logs.now)
    logs.step(1)
    # Asked for, of a coordinator that is away: an engine that was on its way goes there yet.
    logs.step(3)
    logs.step(1)
    assert logs.found() == []
    logs("n0", ev="point", point="coordinator:journal:hold_released", update="")
    logs.step(1)
    logs.step(3)
    # It does not hold any more, though the release was not answered yet.
    logs.step(1)
    assert logs.found() == [checker.OLDER]


def test_an_update_that_a_rollback_keeps_back(logs):
    logs.commit(1, 2)
    logs.step(2)
    logs.checker.allow_rollback(1)
    logs.step(1)
    logs.checker.rollback_stands(logs.now)
    logs.publish(10)
    logs.commit(10)
    logs.step(10)
    assert logs.found() == [checker.KEPT_BACK]
    logs.checker.release_asked(logs.now)
    logs.step(10)
    assert logs.found() == [checker.KEPT_BACK]


def test_an_update_on_a_drained_node(logs):
    logs.commit(1)
    logs.step(1)
    logs.checker.drained(["r"], logs.now)
    logs.step(1)
    logs.publish(10)
    logs.commit(10)
    logs.step(10)
    assert logs.found() == [checker.KEPT_BACK]


def test_a_swap_before_the_commit(logs):
    logs("w0", ev="swapped", update="u1")
    assert logs.found() == [checker.EARLY]


def _field(number, payload):
    if isinstance(payload, int):
        return bytes([number << 3, payload])
    return bytes([number << 3 | 2, len(payload)]) + payload


def test_the_journal_is_read_up_to_a_torn_record():
    commit = _field(6, _field(1, b"models/m") + _field(2, b"u1") + _field(3, 7) + _field(4, 9))
    other = _field(1, _field(2, 3))
    frames = b"".join(struct.pack("<II", len(r), 0) + r for r in (other, commit, commit))
    assert journal.parse(b"WSJRNL01" + frames) == [journal.Commit("u1", 7, 9)] * 2
    assert journal.parse(b"WSJRNL01" + frames[:-1]) == [journal.Commit("u1", 7, 9)]
    with pytest.raises(ValueError):
        journal.parse(b"nonsense")


def _trial(kind, state=chaos.IDLE):
    trial = chaos.Trial(0, kind)
    trial.state, trial.recovery = state, 1.0
    return trial


def test_a_kind_of_fault_that_never_hits_an_update_fails_the_run():
    missed = [_trial("kill worker")] * chaos.ENOUGH_TRIALS
    assert chaos.missed(missed) == ["kill worker"]
    assert chaos.missed(missed[1:]) == []
    assert chaos.missed(missed + [_trial("kill worker", "MOVING")]) == []


def test_the_state_of_an_update_follows_its_coordinator():
    state = chaos.StateOfUpdate()

    def point(name, update="u1"):
        state.feed({"ev": "point", "point": name, "update": update})
        return state.state

    assert point("coordinator:command:apply_worker", "u0") == chaos.IDLE
    assert point("coordinator:journal:update_opened") == "GATHERING"
    assert point("coordinator:command:pause_replica") == "PAUSING"
    assert point("coordinator:journalled:update_committed") == "COMMITTED"
    state.feed({"ev": "daemon", "who": "n0", "coordinator": True})
    assert state.state == "COMMITTED"
    assert point("coordinator:journalled:update_ended") == chaos.IDLE


# ---- planted faults ----


def test_what_the_simulated_gpu_finds_is_told_once(tmp_path):
    machine = gpus.Machine(str(tmp_path), "bazel-bin", "auto")
    assert machine.findings() == []
    for line in ("a leak", "a use of freed memory"):
        with open(f"{machine.dir}/findings", "a", encoding="utf-8") as file:
            file.write(line + "\n")
        assert machine.findings() == [line]
    assert machine.findings() == []


def test_each_process_has_its_part_of_the_simulated_gpus(tmp_path):
    machine = gpus.Machine(str(tmp_path), "bazel-bin", "nccl")
    assert [machine.next() for _ in range(gpus.DEVICES + 1)] == [*range(gpus.DEVICES), 0]
    flags = machine.daemon_flags(3)
    # NCCL takes the first of them: that of the node.
    (uuids,) = [flag.split("=")[1].split(",") for flag in flags if flag.startswith("--device_uuid=")]
    assert uuids[0] == gpus.uuid(3) == "GPU-a3b4c5d6-e7f8-091a-2b3c-4d5e6f8091a2"
    assert len(set(uuids)) == gpus.DEVICES
    machine.plant("process=n1 call=cudaMalloc error=2")
    with open(f"{machine.dir}/faults", encoding="utf-8") as file:
        assert file.read() == "process=n1 call=cudaMalloc error=2\n"
    assert machine.environment("n1")["GPU_SIM_ROLE"] == "n1"


@pytest.fixture
def run(tmp_path, monkeypatch):
    # Plants are written into the one set of tensors.
    monkeypatch.setattr(chaos, "SWAP", 0)
    arguments = argparse.Namespace(seed=3, nodes=3, gpu=None)
    programs = chaos.programs(str(readme.ROOT / "bazel-bin"))
    missing = [path for path in programs.values() if not pathlib.Path(path).exists()]
    assert not missing, f"not built: {missing}"
    # Unix sockets have short names.
    here = chaos.Run(arguments, 0, str(tmp_path)[:60], programs, None, None, collections.Counter())
    try:
        assert here.start()
        yield here
    finally:
        here.destroy()


def _finds(run, kind, replica, content, workers):
    """Gives workers of a replica the bytes of some content, behind everybody's back, and waits until
    the judge speaks of that kind."""
    for index in workers:
        path = f"{run.dir}/planted{content}-{index}"
        count = len(run.cluster.engines[replica].workers)
        run.cluster.tell(
            "t0", {"cmd": "dump", "content": content, "path": path, "index": index, "count": count}
        )
        assert run.cluster.run_until(lambda p=path: pathlib.Path(p).exists(), 10)
        run.cluster.engines[replica].workers[index].tell(cmd="plant", path=path)
    deadline = run.cluster.now() + 20
    found = set()
    while run.cluster.now() < deadline and kind not in found:
        run.cluster.tick()
        # What was planted before is found again and again.
        found |= {violation.kind for violation in run.judge()}
    return kind in found


@pytest.mark.slow
def test_a_planted_mix_is_found(run):
    assert run.judge() == []
    run.recover(30)
    assert _finds(run, checker.MIXED, "two", run.content - 1, [1])


@pytest.mark.slow
def test_a_planted_older_update_and_a_lost_commit_are_found(run):
    run.recover(30)
    assert _finds(run, checker.OLDER, "one", 1, [0])
    # Known to the trainers, never committed: what a COMMIT that is undone leaves behind.
    # The rank waits for the other one, in vain.
    lost = run.publish(ranks=run.cluster.ranks[:1])
    run.cluster.run_until(lambda: run.ended(lost), 1)
    assert _finds(run, checker.UNCOMMITTED, "one", lost, [0])


@pytest.mark.slow
def test_a_planted_hang_is_stuck(run):
    run.cluster.engines["one"].control.tell(cmd="hang_pause", ms=10**6)
    run.cluster.run_until(lambda: False, 0.1)
    chaos_commit, chaos.COMMIT[:] = list(chaos.COMMIT), [(1, {})]
    try:
        assert run.recover(8)[0] is False
    finally:
        chaos.COMMIT[:] = chaos_commit
    assert "one serves content" in run.diagnose()
    run.cluster.engines["one"].control.tell(cmd="hang_pause", ms=0)
    assert run.recover(30)[0]


@pytest.mark.slow
def test_a_product_that_resumes_before_all_workers_have_applied_is_found(run):
    assert run.judge() == []
    mutant = readme.ROOT / "bazel-bin/tests/chaos/weightsyncd_mutant"
    assert mutant.exists(), "not built"
    coordinator = run.cluster.daemons[0]
    coordinator.argv[0] = str(mutant)
    coordinator.signal(signal.SIGKILL)
    found = set()
    deadline = run.cluster.now() + 20
    while checker.MIXED not in found and run.cluster.now() < deadline:
        # Nothing else is slow.
        run.cluster.engines["two"].workers[1].tell(cmd="hang_apply", ms=500)
        content = run.publish()
        run.cluster.run_until(lambda c=content: run.ended(c), 5)
        found |= {violation.kind for violation in run.judge()}
    assert checker.MIXED in found
