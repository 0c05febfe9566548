"""Judges what replicas served, from the logs of a chaos run alone.

It knows, by the trainers' lines written before each publish, what every worker must hash that holds
some content; by the coordinator's journal, which contents were ever committed; and by the engines'
lines, what each step saw in live memory. It believes no daemon and no client library.

A step must have seen exactly one committed update, the same in all workers of the replica, and none
older than what the replica served before, unless a rollback was asked for. While an operator holds a
replica it takes no step; and what is published under a rollback's hold, or while the replica's node is
drained, does not come to it. When operators asked and were answered, the run says by its own clock.
"""

import collections
import time

from tests.chaos import journal

MIXED = "MIXED"  # bytes of no update, or of several
UNCOMMITTED = "UNCOMMITTED"  # of an update that nobody committed
OLDER = "OLDER"  # of an update before the one it served last
MISLABELED = "MISLABELED"  # the engine was told another update than its memory holds
WROTE_WHILE_SERVING = "WROTE_WHILE_SERVING"  # live memory was written under a running engine
HELD = "HELD"  # the engine ran while an operator held its pause
KEPT_BACK = "KEPT_BACK"  # an update that a rollback's hold or a drained node keeps from it
UNDONE = "UNDONE"  # a commit that was in the journal, and an abort of the same update after it
EARLY = "EARLY"  # somebody acted on a commit before it was in the journal

Violation = collections.namedtuple("Violation", "kind who t detail")

# What an engine came with.
OWN = 0

FOREVER = float("inf")


class Span:
    """From when a call of an operator was answered until the call that takes it back is made.

    What happens between a call and its answer may be of before or after.
    """

    def __init__(self, began):
        self.began, self.ended = began, FOREVER

    def covers(self, t):
        return self.began < t < self.ended


class Checker:
    """Fed with lines in the order of their time; `violations` grows."""

    def __init__(self):
        self.violations = []
        # (workers, index, hash) -> content
        self._contents = {}
        # content -> journal.Commit
        self.committed = {}
        self._commit_of_update = {}
        # Of the first coordinator's journal: the last adoption, the updates that it has ever committed
        # since, and those whose commit was found undone.
        self._adopted, self._decided, self._undone = None, set(), set()
        # update -> when the coordinator began to write the commit
        self._committing = {}
        # Updates that go straight into live memory, before the commit (STREAM).
        self._streaming = set()
        # who -> its latest "engine" or "worker" line
        self._identity = {}
        # (replica, incarnation) -> whether the engine stands paused
        self._paused = {}
        # (replica, incarnation, index) -> hash of what it came with
        self._own = {}
        # replica -> (incarnation, version) of the newest update it served
        self._served = {}
        # replica -> (content, line) of the last step
        self.serving = {}
        # The version that a rollback asked for, from its call until its release was answered; whether
        # that was asked for, and when the coordinator began to write it down: a call that has not
        # reached it releases nothing.
        self._rollback = None
        self._release_asked = False
        self._released = FOREVER
        # Replicas that have served something newer since.
        self._returned = set()
        # Spans in which a rollback stands; replica -> those of its holds, and of drained nodes.
        self._rollbacks = []
        self._holds = collections.defaultdict(list)
        self._drains = collections.defaultdict(list)
        # content -> when it was about to be published
        self._published = {}
        # (replica, incarnation) -> when it began; those that have paused, ever
        self._began = {}
        self._has_paused = set()
        # Steps that engines took; those of which no line tells saw what the one before saw.
        self.steps = 0
        self._steps_of = {}

    def commits(self, commits):
        """What a journal holds; may be called again and again."""
        for commit in commits:
            self.committed[commit.step] = commit
            self._commit_of_update[commit.update] = commit

    def journal(self, records):
        """What the first coordinator's holds, in order; may be called again and again. What another one
        decides is fenced; what a lost one decided is what the nodes make of it when they are adopted."""
        adopted = None
        for at, record in enumerate(records):
            if isinstance(record, journal.Adopted):
                adopted, since = record, at + 1
        if adopted is not None:
            records = records[since:]
        if adopted != self._adopted and adopted is not None:
            self._adopted, self._decided = adopted, set()
        for record in records:
            if isinstance(record, journal.Commit):
                # Remembered, though the file may lose it.
                self._decided.add(record.update)
            elif record.update in self._decided and record.update not in self._undone:
                self._undone.add(record.update)
                line = {"who": "n0", "t": time.monotonic_ns()}
                self._report(UNDONE, line, f"update {record.update} was committed, and then aborted")

    # ---- what operators asked for ----

    def held(self, replica, t):
        """It was answered that the engine has paused."""
        self._holds[replica].append(Span(t))

    def resumed(self, replica, t):
        """Its resume is asked for now."""
        for span in self._holds[replica]:
            span.ended = min(span.ended, t)

    def drained(self, replicas, t):
        for replica in replicas:
            self._drains[replica].append(Span(t))

    def undrained(self, replicas, t):
        for replica in replicas:
            for span in self._drains[replica]:
                span.ended = min(span.ended, t)

    def allow_rollback(self, version):
        """Replicas may serve `version` although they served newer ones."""
        self._rollback, self._released = version, FOREVER
        self._release_asked = False
        self._returned.clear()

    def rollback_stands(self, t):
        """It was answered: all replicas serve it."""
        self._rollbacks.append(Span(t))

    def release_asked(self, t):
        self._release_asked = True
        for span in self._rollbacks:
            span.ended = min(span.ended, t)

    def end_rollback(self):
        """The release was answered: all replicas serve the newest."""
        self._rollback = None

    def paused(self, replica):
        """Whether the engine that lives now stands paused, by its own log."""
        engine = max(
            (engine for engine in self._began if engine[0] == replica),
            key=self._began.get,
            default=None,
        )
        return self._paused.get(engine, False)

    # ---- what is found ----

    def feed(self, line):
        handler = getattr(self, "_on_" + line["ev"], None)
        if handler:
            handler(line)

    def _report(self, kind, line, detail):
        self.violations.append(Violation(kind, line["who"], line["t"], detail))

    def _on_content(self, line):
        self._published.setdefault(line["content"], line["t"])
        for workers in (1, 2):
            for index, value in enumerate(line[f"hashes{workers}"]):
                self._contents[(workers, index, value)] = line["content"]

    def _on_point(self, line):
        if line["point"] == "coordinator:journal:update_committed":
            self._committing.setdefault(line["update"], line["t"])
        elif line["point"] == "coordinator:journalled:stream_begun":
            self._streaming.add(line["update"])
        elif line["point"] == "coordinator:journal:hold_released" and self._release_asked:
            self._released = min(self._released, line["t"])

    def _on_engine(self, line):
        self._identity[line["who"]] = line
        engine = (line["replica"], line["incarnation"])
        self._paused[engine] = line["paused"]
        self._began[engine] = line["t"]
        if line["paused"]:
            self._has_paused.add(engine)

    def _on_worker(self, line):
        self._identity[line["who"]] = line
        self._own[(line["replica"], line["incarnation"], line["index"])] = line["own"]

    def _engine_of(self, line):
        identity = self._identity.get(line["who"])
        return identity and (identity["replica"], identity["incarnation"])

    def _on_paused(self, line):
        self._paused[self._engine_of(line)] = True
        self._has_paused.add(self._engine_of(line))

    def _on_resumed(self, line):
        self._paused[self._engine_of(line)] = False

    def _on_writing(self, line):
        engine = self._engine_of(line)
        # An engine that never came up serves nothing.
        if not self._paused.get(engine, True):
            self._report(
                WROTE_WHILE_SERVING, line, f"update {line['update']} is written, not paused"
            )
        if line["update"] not in self._streaming:
            self._check_decided(line, "written")

    def _on_swapped(self, line):
        # The engine may run: it has another set of tensors to go over to.
        self._check_decided(line, "there")

    def _check_decided(self, line, what):
        began = self._committing.get(line["update"])
        if began is None or line["t"] < began:
            self._report(EARLY, line, f"update {line['update']} is {what} before its commit is")

    def _on_step(self, line):
        identity = self._identity[line["who"]]
        replica, incarnation = identity["replica"], identity["incarnation"]
        engine = (replica, incarnation)
        self.steps += line["step"] - self._steps_of.get(engine, 0)
        self._steps_of[engine] = line["step"]
        count = identity["workers"]
        contents = []
        for index, worker in enumerate(line["workers"]):
            if worker["hash"] == self._own.get((replica, incarnation, index)):
                contents.append(OWN)
            else:
                contents.append(self._contents.get((count, index, worker["hash"])))
        if None in contents or len(set(contents)) != 1:
            self.serving.pop(replica, None)
            self._report(MIXED, line, f"{replica}: the workers hold contents {contents}")
            return
        content = contents[0]
        for span in self._holds[replica]:
            # One that has just begun, and runs, is asked to pause as soon as it is known.
            known = engine in self._has_paused or self._began[engine] < span.began
            if known and span.covers(line["began"]):
                self._report(HELD, line, f"{replica}: a step while an operator holds it")
        last_incarnation, last_version = self._served.get(replica, (None, 0))
        if content == OWN:
            self.serving[replica] = (OWN, line)
            # A new incarnation may begin with what it loaded by itself.
            if last_incarnation == incarnation:
                self._report(OLDER, line, f"{replica}: what it came with, after {last_version}")
            return
        self.serving[replica] = (content, line)
        commit = self.committed.get(content)
        if commit is None:
            self._report(UNCOMMITTED, line, f"{replica}: content {content}")
            return
        began = self._committing.get(commit.update)
        if began is not None and line["began"] < began:
            self._report(EARLY, line, f"{replica}: version {commit.version} before its commit")
        if line["update"] != commit.update:
            self._report(
                MISLABELED,
                line,
                f"{replica}: told {line['update']} (version {line['version']}), "
                f"holds {commit.update} (version {commit.version})",
            )
        published = self._published.get(content, 0)
        for what, spans in (("rollback", self._rollbacks), ("drain", self._drains[replica])):
            if any(span.covers(line["began"]) and span.began < published for span in spans):
                self._report(
                    KEPT_BACK, line, f"{replica}: version {commit.version} in spite of a {what}"
                )
        if commit.version < last_version and not self._goes_back(replica, commit.version):
            self._report(
                OLDER, line, f"{replica}: version {commit.version} after {last_version}"
            )
            return
        if self._rollback and commit.version > self._rollback and line["began"] > self._released:
            self._returned.add(replica)
        self._served[replica] = (incarnation, commit.version)

    def _goes_back(self, replica, version):
        return version == self._rollback and replica not in self._returned
