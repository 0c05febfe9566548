"""What a chaos run tells of its trials."""

import collections
import json

from tests.chaos import faults, gpus, operators

# From the end of the fault until every living replica serves a version published after it.
BOUND = 30.0
# A kind of fault with so many trials must have hit an update in flight.
ENOUGH_TRIALS = 5

IDLE = "idle"
STATES = [
    *(IDLE, "GATHERING", "PREPARING", "MOVING", "PAUSING"),
    *("COMMITTING", "COMMITTED", "APPLYING", "RESUMING"),
]
# No update is under way, and an older one is being installed.
ROLLBACK = "ROLLBACK"

EVERY_KIND = {**faults.KINDS, **gpus.KINDS, **gpus.NCCL_KINDS}


class Trial:
    def __init__(self, number, kind):
        self.number, self.kind = number, kind
        self.state = IDLE
        self.point = ""
        self.detail = ""
        self.scenario = operators.Nothing.name
        self.recovery = None
        self.violations = []
        self.stuck = ""

    def findings(self):
        """Sentences: the first of what was seen wrong."""
        found = [f"{v.kind} {v.who}: {v.detail}" for v in self.violations[:5]]
        return found + ([f"STUCK: {self.stuck}"] if self.stuck else [])


def table(trials):
    """Fault x state of the update at the hit."""
    every = list(EVERY_KIND)
    width = max(len(kind) for kind in every) + 1
    kinds = sorted({trial.kind for trial in trials}, key=every.index)
    counts = collections.Counter((trial.kind, trial.state) for trial in trials)
    states = [*STATES, ROLLBACK]
    lines = ["".ljust(width) + " ".join(state.rjust(10) for state in states)]
    for kind in kinds:
        row = [str(counts[(kind, state)] or "-").rjust(10) for state in states]
        lines.append(kind.ljust(width) + " ".join(row))
    lines.append("")
    lines.append(
        f"{'fault'.ljust(width)} {'trials':>7} {'in flight':>9} {'mixed':>6} {'stuck':>6} "
        f"{'worst recovery':>15}"
    )
    for kind in kinds:
        mine = [trial for trial in trials if trial.kind == kind]
        in_flight = sum(trial.state not in (IDLE, ROLLBACK) for trial in mine)
        worst = max(trial.recovery for trial in mine)
        lines.append(
            f"{kind.ljust(width)} {len(mine):>7} {in_flight:>9} "
            f"{sum(bool(t.violations) for t in mine):>6} {sum(bool(t.stuck) for t in mine):>6} "
            f"{worst:>13.1f} s"
        )
    lines.append("")
    lines.append(f"{'operators'.ljust(width)} {'trials':>7} {'mixed':>6} {'stuck':>6}")
    for scenario in sorted({trial.scenario for trial in trials}):
        mine = [trial for trial in trials if trial.scenario == scenario]
        lines.append(
            f"{scenario.ljust(width)} {len(mine):>7} {sum(bool(t.violations) for t in mine):>6} "
            f"{sum(bool(t.stuck) for t in mine):>6}"
        )
    return "\n".join(lines)


def outcomes(calls):
    """What the ranks' publishes were drawn with, and how these and operators' calls ended."""
    drawn, ended = collections.Counter(), collections.Counter()
    for key, count in calls.items():
        words, result = key.rsplit(": ", 1)
        if "=" not in words and words != "defaults":
            ended[key] += count
            continue
        ended[f"publish: {result}"] += count
        for word in words.split():
            drawn[word] += count
    lines = [""]
    for title, counts in (("drawn with", drawn), ("ended", ended)):
        lines.append(title)
        lines += [f"  {key:44} {count:>7}" for key, count in sorted(counts.items())]
    return "\n".join(lines)


def missed(trials):
    """Kinds of fault that had enough trials and never hit an update in flight."""
    counts = collections.Counter(trial.kind for trial in trials)
    hits = {trial.kind for trial in trials if trial.state not in (IDLE, ROLLBACK)}
    return sorted(k for k, count in counts.items() if count >= ENOUGH_TRIALS and k not in hits)


def add_up(paths):
    """Runs by seed, as one: what --json wrote of each."""
    trials, totals, calls = [], collections.Counter(), collections.Counter()
    for path in paths:
        with open(path, encoding="utf-8") as file:
            part = json.load(file)
        calls.update(part["calls"])
        for kind, state, mixed, stuck, recovery, scenario in part["each"]:
            trial = Trial(len(trials), kind)
            trial.scenario = scenario
            trial.state, trial.violations = state, ["one"] if mixed else []
            trial.stuck, trial.recovery = "so" if stuck else "", recovery
            trials.append(trial)
        totals.update({k: part[k] for k in ("trials", "mixed", "stuck", "steps_checked", "restarts")})
    print(table(trials))
    print(outcomes(calls))
    never = missed(trials)
    worst = round(max(trial.recovery for trial in trials), 2)
    print(json.dumps({**totals, "never_hit": never, "worst_recovery_s": worst, "bound_s": BOUND}))
    return 1 if totals["mixed"] or totals["stuck"] or never else 0
