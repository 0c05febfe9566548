"""Judges what replicas served, from the logs of a chaos run alone.

It knows, by the trainers' lines written before each publish, what every worker must hash that holds
some content; by the coordinator's journal, which contents were ever committed; and by the engines'
lines, what each step saw in live memory. It believes no daemon and no client library.

A step must have seen exactly one committed update, the same in all workers of the replica, and none
older than what the replica served before, unless a rollback was asked for.
"""

import collections

MIXED = "MIXED"  # bytes of no update, or of several
UNCOMMITTED = "UNCOMMITTED"  # of an update that nobody committed
OLDER = "OLDER"  # of an update before the one it served last
MISLABELED = "MISLABELED"  # the engine was told another update than its memory holds
WROTE_WHILE_SERVING = "WROTE_WHILE_SERVING"  # live memory was written under a running engine
EARLY = "EARLY"  # somebody acted on a commit before it was in the journal

Violation = collections.namedtuple("Violation", "kind who t detail")

# What an engine came with.
OWN = 0


class Checker:
    """Fed with lines in the order of their time; `violations` grows."""

    def __init__(self):
        self.violations = []
        # (workers, index, hash) -> content
        self._contents = {}
        # content -> journal.Commit
        self.committed = {}
        self._commit_of_update = {}
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
        self._rollback_floor = None
        # Steps that engines took; those of which no line tells saw what the one before saw.
        self.steps = 0
        self._steps_of = {}

    def commits(self, commits):
        """What a journal holds; may be called again and again."""
        for commit in commits:
            self.committed[commit.step] = commit
            self._commit_of_update[commit.update] = commit

    def allow_rollback(self, version):
        """Replicas may serve `version` although they served newer ones."""
        self._rollback_floor = version

    def end_rollback(self):
        self._rollback_floor = None

    def feed(self, line):
        handler = getattr(self, "_on_" + line["ev"], None)
        if handler:
            handler(line)

    def _report(self, kind, line, detail):
        self.violations.append(Violation(kind, line["who"], line["t"], detail))

    def _on_content(self, line):
        for workers in (1, 2):
            for index, value in enumerate(line[f"hashes{workers}"]):
                self._contents[(workers, index, value)] = line["content"]

    def _on_point(self, line):
        if line["point"] == "coordinator:journal:update_committed":
            self._committing.setdefault(line["update"], line["t"])
        elif line["point"] == "coordinator:journalled:stream_begun":
            self._streaming.add(line["update"])

    def _on_engine(self, line):
        self._identity[line["who"]] = line
        self._paused[(line["replica"], line["incarnation"])] = line["paused"]

    def _on_worker(self, line):
        self._identity[line["who"]] = line
        self._own[(line["replica"], line["incarnation"], line["index"])] = line["own"]

    def _engine_of(self, line):
        identity = self._identity.get(line["who"])
        return identity and (identity["replica"], identity["incarnation"])

    def _on_paused(self, line):
        self._paused[self._engine_of(line)] = True

    def _on_resumed(self, line):
        self._paused[self._engine_of(line)] = False

    def _on_writing(self, line):
        engine = self._engine_of(line)
        # An engine that never came up serves nothing.
        if not self._paused.get(engine, True):
            self._report(
                WROTE_WHILE_SERVING, line, f"update {line['update']} is written, not paused"
            )
        began = self._committing.get(line["update"])
        if line["update"] not in self._streaming and (began is None or line["t"] < began):
            self._report(EARLY, line, f"update {line['update']} is written before its commit is")

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
        if commit.version < last_version and self._rollback_floor != commit.version:
            self._report(
                OLDER, line, f"{replica}: version {commit.version} after {last_version}"
            )
            return
        self._served[replica] = (incarnation, commit.version)
