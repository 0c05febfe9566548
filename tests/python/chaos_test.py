"""The chaos run's judge: what it must find, in made-up logs and in planted faults of a live cluster."""

import argparse
import collections
import itertools
import json
import pathlib
import re
import signal
import struct
import subprocess
import sys

import pytest

import readme

sys.path.insert(0, str(readme.ROOT))
from tests.chaos import chaos, checker, faults, gpus, journal, network  # noqa: E402

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


with open(readme.ROOT / "tests/chaos/checker_cases.json", encoding="utf-8") as _file:
    CASES = json.load(_file)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_it_finds_what_the_simulations_checker_finds(logs, case):
    """checker_cases.json is judged by both: simulation/checker_test.cc is the other one."""
    records = []

    for what, *words in case["events"]:
        if what == "commit":
            number = int(words[0][1:])
            logs.commit(number)
            records.append(journal.Commit(words[0], number, number))
            logs.checker.journal(records)
        elif what == "abort":
            records.append(journal.Abort(words[0]))
            logs.checker.journal(records)
        elif what == "write":
            logs(f"w{words[0]}", ev="writing", update=words[1])
        elif what == "serve":
            logs.step(*(TORN if word == "torn" else 0 if word == "own" else int(word[1:]) for word in words))
        elif what in ("pause", "resume"):
            logs("c", ev=f"{what}d", update="", version=0)
        elif what == "restart":
            logs.start(f"i{len(records)}r", paused=False)
        elif what == "hold":
            logs.checker.held("r", logs.now)
        elif what == "unhold":
            logs.checker.resumed("r", logs.now)
        elif what == "rollback":
            logs.checker.allow_rollback(int(words[0][1:]))
        elif what == "release":
            logs.checker.release_asked(logs.now)
            logs("n0", ev="point", point="coordinator:journal:hold_released", update="")
        else:
            assert what == "open", what
    assert logs.found() == case["finds"]


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
    batch = frames + struct.pack("<II", len(commit) | 1 << 31, 0) + commit
    assert journal.parse(b"WSJRNL02" + batch) == [journal.Commit("u1", 7, 9)] * 3
    with pytest.raises(ValueError):
        journal.parse(b"nonsense")


def test_how_updates_ended_is_read():
    ends = [
        _field(7, _field(2, b"u1") + _field(4, 1)),  # active
        _field(7, _field(2, b"u2")),
        _field(7, _field(2, b"u3") + _field(7, 1)),  # superseded
        _field(7, _field(2, b"u4") + _field(8, 1)),  # lost
        _field(14, _field(2, 5)),
    ]
    frames = b"".join(struct.pack("<II", len(r), 0) + r for r in ends)
    assert journal.parse(b"WSJRNL01" + frames) == [journal.Abort("u2"), journal.Adopted(5)]


def test_a_commit_that_is_aborted_afterwards(logs):
    commit = [journal.Commit(f"u{i}", i, i) for i in range(4)]
    logs.checker.journal([commit[1], journal.Abort("u2"), commit[3]])
    assert logs.found() == []
    # The file has lost the commit of u3 meanwhile.
    lost = [commit[1], journal.Abort("u2"), journal.Abort("u3")]
    logs.checker.journal(lost)
    logs.checker.journal(lost)
    assert logs.found() == [checker.UNDONE]
    logs.checker.journal([commit[1], journal.Abort("u1")])
    assert logs.found() == [checker.UNDONE] * 2


def test_an_adopted_cluster_begins_anew(logs):
    commit = [journal.Commit(f"u{i}", i, i) for i in range(3)]
    logs.checker.journal([journal.Adopted(3), commit[1]])
    # On another disk: the nodes did not know that u1 was committed.
    logs.checker.journal([journal.Adopted(9), journal.Abort("u1"), commit[2]])
    assert logs.found() == []
    logs.checker.journal([journal.Adopted(9), journal.Abort("u1"), journal.Abort("u2")])
    assert logs.found() == [checker.UNDONE]


# Fields of the messages at which a daemon could be held, and is not. All others are in some list of
# tests/chaos/faults.py.
NO_POINT = {
    "journal": {
        "started": "before a coordinator serves anybody",
        "request_opened": "written with update_opened, in one go",
        "rank_copied": "of calls with a request_id: the simulation ends a coordinator before any record",
        "lost": "of a coordinator that accepts nothing",
        "adopted": "of a coordinator that accepts nothing",
        "version_deleted": "the simulation's",
        "model_removed": "the simulation's",
    },
    "command": {
        **dict.fromkeys(["welcome", "reply", "heartbeat"], "of no update"),
        **dict.fromkeys(["refuse_worker", "refuse_replica", "digest_worker"], "of no update"),
        **dict.fromkeys(["drop_update", "remove_worker"], "the simulation's"),
        **dict.fromkeys(
            ["write_checkpoint", "complete_checkpoint", "read_checkpoint", "prune_checkpoints"],
            "chaos trials save and load nothing: the simulation does, and tests/e2e/checkpoint_test",
        ),
    },
    "report": {
        **dict.fromkeys(["hello", "hello_done", "heartbeat"], "of no update"),
        **dict.fromkeys(["claim_rank", "rank_shards", "rank_lost"], "of registering"),
        **dict.fromkeys(["replica_joined", "replica_left"], "of registering"),
        **dict.fromkeys(["worker_joined", "worker_left"], "of registering"),
        "publish_arrived": "held by the trainers' own points",
        "update_progress": "decides nothing",
        "update_evicted": "the simulation's",
        "worker_digests": "of verify, which changes nothing",
        "checkpoint_written": "as the command",
        "checkpoint_read": "as the command",
    },
}


def _fields_of(path, message):
    text = (readme.ROOT / path).read_text(encoding="utf-8")
    body = text[text.index(f"message {message} {{") :]
    body = body[body.index("oneof ") : body.index("\n}\n")]
    return re.findall(r"^ +[\w.]+ (\w+) = \d+;", body, re.MULTILINE)


@pytest.mark.parametrize(
    "kind, path, message",
    [
        ("journal", "proto/weightsync/internal/v1/journal.proto", "JournalRecord"),
        ("command", "proto/weightsync/v1/node.proto", "NodeCommand"),
        ("report", "proto/weightsync/v1/node.proto", "NodeReport"),
    ],
)
def test_every_transition_has_a_fault_point(kind, path, message):
    lists = [value for name, value in vars(faults).items() if name.endswith("_POINTS")]
    points = {point for points in lists for point in points}
    fields = set(_fields_of(path, message))
    assert len(fields) > 10
    assert set(NO_POINT[kind]) <= fields
    where = {"journal": ["journal", "journalled"], "command": ["command"], "report": ["report"]}[kind]
    for field in fields:
        for part in where:
            held = {p for p in points if p.endswith(f":{part}:{field}")}
            assert bool(held) != (field in NO_POINT[kind]), f"{part}:{field}: {held}"
    # What is told to nodes is held on both sides.
    if kind == "command":
        for field in fields - set(NO_POINT[kind]) - {"pin_update"}:
            assert any(p == f"coordinator:command:{field}" for p in points) or field == "define_layout"
            assert any(p == f"node:command:{field}" for p in points), field


def _run_one(tmp_path, *words):
    """A whole run of one trial: (exit code, what --json wrote)."""
    programs = str(readme.ROOT / "bazel-bin")
    path = tmp_path / "run.json"
    keep = str(tmp_path / "kept")
    words = ["--trials", "1", "--nodes", "3", "--programs", programs, "--keep", keep, *words]
    code = chaos.main([*words, "--json", str(path)])
    return code, json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_run_without_root_says_what_it_leaves_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(network, "available", lambda: False)
    monkeypatch.setattr(chaos.limits, "small_disks", lambda: False)
    code, totals = _run_one(tmp_path, "--kinds", "kill worker")
    told = capsys.readouterr().out
    assert code == 0, told
    assert "No root: process faults only, all daemons on this host." in told
    for kind in ("link cut", "edge cut", "memory limit", "disk full"):
        assert re.search(f"^left out: {kind}: ", told, re.MULTILINE), told
    assert (totals["trials"], totals["asked"], totals["mixed"], totals["stuck"]) == (1, 1, 0, 0)


@pytest.mark.slow
def test_what_is_found_before_the_first_trial_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(network, "available", lambda: False)
    recover, calls = chaos.Run.recover, []

    def with_a_mix(self, bound, version=None):
        ok, seconds = recover(self, bound, version)
        if not calls:
            self._found.append(checker.Violation(checker.MIXED, "one", 0, "planted"))
            ok = False
        calls.append(bound)
        return ok, seconds

    monkeypatch.setattr(chaos.Run, "recover", with_a_mix)
    code, totals = _run_one(tmp_path, "--kinds", "kill worker")
    told = capsys.readouterr().out
    assert code == 1
    assert (totals["mixed"], totals["stuck"]) == (1, 1), told
    assert re.search(r"FINDING trial 0, .*: MIXED one: planted", told)
    assert re.search(r"FINDING trial 0, .*: STUCK: a new cluster did not come up: ", told)


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


@pytest.mark.parametrize("planted", ["CommitForgotten", "MixedReplica"])
def test_a_seed_that_fails_replays_exactly_in_another_process(planted):
    simulate = readme.ROOT / "bazel-bin/tests/chaos/simulation/simulate"

    def run(*words):
        return subprocess.run([simulate, f"--planted={planted}", *words], capture_output=True, text=True, timeout=120)

    search = run("--histories=4000", "--failures=1")
    assert search.returncode == 1, search.stdout
    seed = re.search(r"^seed (\d+):$", search.stdout, re.MULTILINE)[1]
    violation = search.stdout.split(f"seed {seed}:\n", 1)[1].splitlines()[0].strip()
    histories = []
    for _ in range(2):
        replay = run(f"--seed={seed}", "--trace")
        assert replay.returncode == 1
        # All but how long it took.
        histories.append(replay.stdout.split(f"\nseed {seed}:\n", 1)[0])
    assert histories[0] == histories[1]
    assert f"VIOLATION {violation}" in histories[0]
    assert len(histories[0].splitlines()) > 20
    # A good coordinator has none in it.
    assert subprocess.run([simulate, f"--seed={seed}"], capture_output=True, check=False).returncode == 0


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
def test_a_commit_that_its_journal_loses_is_found(run):
    run.recover(30)
    coordinator, path = run.cluster.daemons[0], f"{run.cluster.state_dir(0)}/coordinator.journal"
    point = "coordinator:journalled:update_committed"
    run._armed, run._hit = 1, None
    run.cluster.tell("n0", {"cmd": "arm", "id": 1, "point": point, "skip": 0})
    run.publish()
    assert run.cluster.run_until(lambda: run._hit is not None, 10)
    # It was told to nobody yet.
    coordinator.wanted = False
    coordinator.signal(signal.SIGKILL)
    coordinator.popen.wait()
    assert run.judge() == []
    data = pathlib.Path(path).read_bytes()
    last, _ = list(journal.frames(data))[-1]
    assert len(journal.commits(journal.parse(data[:last]))) == len(journal.read(path)) - 1
    pathlib.Path(path).write_bytes(data[:last])
    coordinator.wanted = True
    coordinator.start()
    found = set()

    def undone():
        found.update(violation.kind for violation in run.judge())
        return checker.UNDONE in found

    assert run.cluster.run_until(undone, 20), found


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
