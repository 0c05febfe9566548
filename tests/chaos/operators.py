"""What operators do while something breaks: beside the fault of a trial, and not because of it.

Each of them asks for something, by weightsyncctl at some daemon, before or while an update is under
way; asks again where the call fails, as an operator would; and takes it back when the fault is over.
The judge is told when the calls were answered.
"""

import time

# A call that fails is made again after so long.
AGAIN = 0.2
CALL_TIMEOUT = 3


class Nothing:
    name = "-"
    # Replicas that need not follow what is published.
    excluded = frozenset()
    # What all others serve instead of what is published.
    content = None
    # The calls cannot succeed, for a reason that is right.
    void = False
    # Beside it nothing is published until it stands.
    alone = False
    begun = False

    def __init__(self, run):
        self.run, self.cluster, self.rng = run, run.cluster, run.rng

    def begin(self):
        pass

    def stands(self):
        """Goes on with what was begun; whether it is so, or cannot be."""
        return True

    def as_wanted(self):
        """Whether those that it is about do what it asked for."""
        return True

    def taken_back(self):
        """Goes on with taking it back; whether that was answered."""
        return True

    def finish(self):
        """Everything is as it was without it."""

    def describe(self):
        return ""


class _Scenario(Nothing):
    # Reasons of a call that will not succeed when it is made again.
    hopeless = frozenset()

    def __init__(self, run):
        super().__init__(run)
        self._call = None
        self._standing = self._ending = self._over = False
        self._not_before = 0.0
        self.last = ""

    def words(self):
        raise NotImplementedError

    def undo_words(self):
        raise NotImplementedError

    def asked(self):
        pass

    def answered(self, t):
        """It was, with OK, not later than at `t`."""

    def undone(self, t):
        """Will be asked for at `t`."""

    def begin(self):
        self.begun = True
        self.asked()
        self._pursue(self.words())

    def _pursue(self, words):
        """The call that was answered with OK; None, and another one, until then."""
        call, now = self._call, self.cluster.now()
        if call is None:
            if now >= self._not_before:
                node = self.rng.choice(sorted(self.cluster.daemons))
                self._call = self.cluster.call(*words, timeout=CALL_TIMEOUT, node=node)
            return None
        if not call.done:
            return None
        self._call = None
        self.run.calls[f"{words[0]}: {'OK' if call.ok else call.reason}"] += 1
        if call.ok:
            return call
        self.last = call.error
        self._not_before = now + AGAIN
        self.void = self.void or call.reason in self.hopeless
        return None

    def stands(self):
        if not self.begun or self._standing or self.void:
            return True
        call = self._pursue(self.words())
        if call:
            self._standing = True
            self.answered(call.answered)
        return self._standing or self.void

    def taken_back(self):
        if not self.begun or self._over:
            return True
        if not self._ending:
            self._ending = True
            if self._call:
                self._call.end()
                self._call = None
            self.undone(time.monotonic_ns())
        self._over = bool(self._pursue(self.undo_words()))
        return self._over


class Hold(_Scenario):
    """Keeps a replica paused."""

    name = "held"

    def __init__(self, run):
        super().__init__(run)
        self.replica = self.rng.choice(sorted(self.cluster.engines))
        self.mode = self.rng.choice(["abort", "drain", "keep"])

    def words(self):
        return "pause", f"chaos/{self.replica}", f"--mode={self.mode}"

    def undo_words(self):
        return "resume", f"chaos/{self.replica}"

    def asked(self):
        self.excluded = {self.replica}

    def answered(self, t):
        self.run.checker.held(self.replica, t)

    def as_wanted(self):
        if self._ending or not self._standing:
            return True
        return self.run.checker.paused(self.replica)

    def undone(self, t):
        self.run.checker.resumed(self.replica, t)
        self.excluded = frozenset()

    def describe(self):
        return f"{self.replica} is held"


class Rollback(_Scenario):
    """Has an older version installed and held."""

    name = "rolled back"
    hopeless = {"NO_HOLDER", "VERSION_NOT_COMMITTED", "VERSION_UNKNOWN"}

    def __init__(self, run):
        super().__init__(run)
        run.judge()
        commits = sorted(run.checker.committed.values(), key=lambda commit: commit.version)
        # Mostly one that stores still have.
        back = 2 if self.rng.random() < 0.85 else 3
        self.commit = commits[-back] if len(commits) >= back else None
        self.void = self.commit is None
        self.alone = not self.void and self.rng.random() < 0.5

    def words(self):
        return "rollback", f"chaos/{self.commit.version}"

    def undo_words(self):
        return "release", "chaos"

    def begin(self):
        if not self.void:
            super().begin()

    def asked(self):
        self.run.checker.allow_rollback(self.commit.version)

    def answered(self, t):
        self.run.checker.rollback_stands(t)
        self.content = self.commit.step

    def undone(self, t):
        self.run.checker.release_asked(t)
        self.content = None

    def finish(self):
        self.run.checker.end_rollback()

    def describe(self):
        return f"rolled back to {self.commit.version}" if self.commit else "no rollback"


class Drain(_Scenario):
    """Takes a node with replicas out."""

    name = "drained"

    def __init__(self, run):
        super().__init__(run)
        nodes = {node for engine in self.cluster.engines.values() for node in engine.nodes}
        self.node = self.rng.choice(sorted(nodes))
        self.replicas = {
            replica
            for replica, engine in self.cluster.engines.items()
            if self.node in engine.worker_nodes
        }

    def words(self):
        return "drain", f"n{self.node}"

    def undo_words(self):
        return "drain", f"n{self.node}", "--undo"

    def asked(self):
        # An engine that is started meanwhile is refused where its control process is.
        self.excluded = {
            replica
            for replica, engine in self.cluster.engines.items()
            if self.node in engine.nodes
        }

    def answered(self, t):
        self.run.checker.drained(self.replicas, t)

    def undone(self, t):
        self.run.checker.undrained(self.replicas, t)
        self.excluded = frozenset()

    def describe(self):
        return f"n{self.node} is drained"


class Adopter:
    """Looks whether the coordinator says JOURNAL_LOST, and adopts the cluster where it does."""

    BETWEEN_LOOKS = 0.3

    def __init__(self, run):
        self._run, self._cluster = run, run.cluster
        self._call = None
        self._next_look = 0.0
        self.adopted = False

    def poll(self):
        call, now = self._call, self._cluster.now()
        if call is None:
            if now >= self._next_look:
                self._call = self._cluster.call("status", timeout=1)
        elif call.done:
            self._call = None
            self._next_look = now + self.BETWEEN_LOOKS
            if call.words == ("adopt",):
                self._run.calls[f"adopt: {'OK' if call.ok else call.reason}"] += 1
                self.adopted = self.adopted or call.ok
            elif "JOURNAL_LOST" in call.output:
                self._call = self._cluster.call("adopt", timeout=1)
        return self.adopted


# (weight, kind)
KINDS = [(4, Nothing), (2, Hold), (2, Rollback), (2, Drain)]


def usable(keeps_holds, named=None):
    """What can be drawn beside a fault: after one that loses holds, nothing is asked for."""
    kinds = KINDS if keeps_holds else KINDS[:1]
    return [entry for entry in kinds if named in entry[1].name] if named else kinds


def draw(run, kinds):
    if not kinds:
        return Nothing(run)
    return run.rng.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0](run)
