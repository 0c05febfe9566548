"""README.md says what is: its programs are compiled and run, its flags are the daemon's."""

import re
import subprocess
import sys

import cluster
import readme

EXAMPLES = ["tests/readme/trainer.cc", "tests/readme/worker.cc"]
PYTHON_EXAMPLES = ["client/python/examples/first_trainer.py", "client/python/examples/first_worker.py"]


def test_the_programs_in_the_readme_are_the_ones_that_are_built():
    assert readme.blocks("cpp") == [
        (readme.ROOT / path).read_text(encoding="utf-8") for path in EXAMPLES
    ]


def test_the_programs_do_what_the_readme_says():
    with cluster.Cluster() as here:
        worker = here.start("worker", cluster.BIN / "tests/readme/worker", here.nodes[0].socket)
        ctl = [str(cluster.CTL), f"--address={here.nodes[0].socket}", "--json", "replicas"]

        def serving():
            listed = subprocess.run(ctl, capture_output=True, text=True, timeout=30)
            return "STATE_SERVING" in listed.stdout

        cluster.wait_until(serving, "the replica does not serve", processes=[worker])
        trainer = here.start(
            "trainer", cluster.BIN / "tests/readme/trainer", here.nodes[0].socket
        )
        assert trainer.wait(60) == 0, trainer.story()
        assert trainer.lines() == [
            f"step {i}: 1 replica serves models/first/versions/{i}" for i in (1, 2, 3)
        ]
        # Before the trainer heard of it, every replica had resumed.
        assert [line for line in worker.lines() if "version 0" not in line] == [
            f"version {i}: weights are {i}" for i in (1, 2, 3)
        ]


def test_the_python_programs_are_the_examples_and_do_what_the_readme_says():
    assert readme.blocks("python") == [
        (readme.ROOT / path).read_text(encoding="utf-8") for path in PYTHON_EXAMPLES
    ]
    trainer, worker = (readme.ROOT / path for path in PYTHON_EXAMPLES)
    with cluster.Cluster() as here:
        serving = here.start("worker", sys.executable, worker, here.nodes[0].socket)
        cluster.wait_until(serving.lines, "the worker does not step", 120, [serving])
        training = here.start("trainer", sys.executable, trainer, here.nodes[0].socket)
        assert training.wait(120) == 0, training.story()
        assert training.lines() == [
            f"step {i}: 1 replica serves models/first/versions/{i}" for i in (1, 2, 3)
        ]
        cluster.wait_until(
            lambda: "a step with version 3" in serving.lines(), "it is not at version 3", 30, [serving]
        )
        versions = [int(line.rpartition(" ")[2]) for line in serving.lines()]
        assert versions == sorted(versions)


# -name (What it does.) type: string default: "value"
HELP = re.compile(r"^\s+-(\w+) \((.*?)\)\s+type: \w+\s+default:\s+(\S+)", re.MULTILINE | re.DOTALL)

# | `--name` | `value` | what it does |
ROW = re.compile(r"^\| `--(\w+)` \| `([^`]*)` \|", re.MULTILINE)


def flags_of_the_daemon():
    helped = subprocess.run(
        [str(cluster.DAEMON), "--help"], capture_output=True, text=True, timeout=30
    )
    assert helped.returncode == 0, helped.stderr
    found = {name: default.strip('"') for name, _, default in HELP.findall(helped.stdout)}
    assert "node" in found and "listen" in found, helped.stdout
    return found


def test_the_readme_lists_every_flag_with_its_default():
    listed = dict(ROW.findall(readme.README.read_text(encoding="utf-8")))
    listed = {name: default.strip('"') for name, default in listed.items()}
    assert listed == flags_of_the_daemon()


def test_every_deadline_is_in_the_readme():
    text = readme.README.read_text(encoding="utf-8")
    for name in flags_of_the_daemon():
        if name.endswith(("_timeout", "_grace", "_interval")):
            assert f"`--{name}`" in text, name


# absl::Duration name = absl::Seconds(5)
DURATION = re.compile(
    r"absl::Duration\s+(\w+)\s*=\s*absl::(Hours|Minutes|Seconds|Milliseconds)\((\d+)\)"
)
# The same where a call is given a time without a name.
NAMELESS = re.compile(r"absl::(?:Hours|Minutes|Seconds)\(\d+\)")
# | what is waited for | 5s | `path` `name` | why it has no flag |
WAIT = re.compile(r"^\| .+ \| (\w+) \| `([\w/.]+)` `(\w+)` \| .+ \|$", re.MULTILINE)

# Options whose defaults are those of flags: the daemon sets them.
FLAGGED = {
    "daemon/options.h": {
        "heartbeat": "heartbeat_timeout",
        "peer": "peer_timeout",
        "barrier": "barrier_timeout",
    },
    "daemon/coordinator/options.h": {},
    "daemon/coordinator/update_machine.h": {"queue_timeout": "publish_timeout"},
    "daemon/coordinator/replica_machine.h": {},
    "daemon/node/mover.h": {"peer_deadline": "peer_timeout"},
    "daemon/service/node_link.h": {},
    "transport/group.h": {"peer_deadline": "peer_timeout"},
    "transport/tcp/hop.h": {"peer_deadline": "peer_timeout"},
    "transport/tcp/endpoint.h": {"handshake_deadline": "handshake_timeout"},
    "transport/cuda/agent/agent_memory.h": {"timeout": "device_timeout"},
    "transport/cuda/agent/device_agent.h": {"start_deadline": "device_timeout"},
}

# How often somebody looks, and how long something is remembered: nobody waits for these.
NO_WAIT = {
    "daemon/coordinator/core_fetch.cc": {"kEdgeMemory"},
    "daemon/coordinator/core_forget.cc": {"kInterval"},
    "daemon/coordinator/journal.cc": {"kForgetInterval"},
    "daemon/coordinator/options.h": {"request_ttl", "lost_replica_ttl"},
    "daemon/coordinator/update_plan.cc": {"kTellingTime"},
    "daemon/node/mover.h": {"report_interval"},
    "daemon/node/node_update_ranks.cc": {"kLook"},
    "daemon/service/coordinator_loop.cc": {"kTick"},
    "daemon/daemon.cc": {"kLongestPatience"},
    "daemon/service/loop.cc": {"kFarAway", "kLook"},
    "daemon/service/node_link.h": {"first_backoff"},
    "daemon/service/version_watch.cc": {"kWatchInterval"},
    "transport/cuda/agent/device_agent.cc": {"kStopEvery"},
    "transport/cuda/agent/device_agent.h": {"backoff", "max_backoff"},
    "transport/cuda/agent/device_agents.h": {"usage_interval"},
    "transport/cuda/device_core.cc": {"kRetry"},
    "transport/nccl/nccl_device.cc": {"kLookEvery"},
    "transport/tcp/endpoint.h": {"heartbeat"},
    "transport/tcp/hop.h": {"heartbeat"},
}

# Looks that are bounded by something else, and arithmetic.
NAMELESS_IN = {
    "daemon/coordinator/convert.cc",  # absl::IDivDuration
    "daemon/coordinator/core_checkpoint.cc",  # what is longer is none
    "daemon/service/answer.h",  # what is longer is none
    "daemon/service/proto_time.h",  # absl::IDivDuration
    "transport/cuda/agent/agent_wire.cc",  # one look of `timeout`
    "transport/cuda/agent/device_agent.cc",  # one look of hang_deadline
    "transport/cuda/device_core.cc",  # one look of a thread that waits for work
    "transport/host/fd_server.cc",  # one look at tokens that expire
}


def seconds(text):
    """ "90s", "1m30s", "10m", "250ms" in seconds."""
    units = {"h": 3600, "m": 60, "s": 1, "ms": 0.001}
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|h|m|s)", text)
    assert parts and "".join(number + unit for number, unit in parts) == text, text
    return sum(float(number) * units[unit] for number, unit in parts)


def sources():
    """Of the daemon and of transport/, without tests and what stands in for something."""
    for room in ("daemon", "transport"):
        for path in sorted((readme.ROOT / room).rglob("*")):
            if path.suffix not in (".h", ".cc"):
                continue
            if re.search(r"test|fake|conformance|bench|sim_|^eventually", path.name):
                continue
            name = str(path.relative_to(readme.ROOT))
            if not name.startswith("transport/fault/"):
                yield name, path.read_text(encoding="utf-8")


def durations():
    """(path, name) -> seconds: every time that has a name in the sources."""
    units = {"Hours": 3600, "Minutes": 60, "Seconds": 1, "Milliseconds": 0.001}
    return {
        (path, name): int(number) * units[unit]
        for path, text in sources()
        for name, unit, number in DURATION.findall(text)
    }


def test_every_wait_has_a_flag_or_its_reason_in_the_readme():
    listed = {
        (path, name): seconds(value)
        for value, path, name in WAIT.findall(readme.README.read_text(encoding="utf-8"))
    }
    assert len(listed) > 30
    found = durations()
    flags = flags_of_the_daemon()
    rest = {}
    for (path, name), value in found.items():
        flag = FLAGGED.get(path, {}).get(name)
        if flag is None and path in FLAGGED and name not in NO_WAIT.get(path, ()):
            flag = next((f for f in (name, name + "_timeout") if f in flags), None)
        if flag is not None:
            assert seconds(flags[flag]) == value, f"{path}: {name} is not --{flag}'s default"
        elif name not in NO_WAIT.get(path, ()):
            rest[path, name] = value
    # What the README says beyond the sources, what it lacks, and what differs.
    assert rest == listed


def test_the_lists_of_this_test_are_of_what_there_is():
    found = durations()
    named = [(p, n) for p, names in FLAGGED.items() for n in names]
    named += [(p, n) for p, names in NO_WAIT.items() for n in names]
    assert [entry for entry in named if entry not in found] == []


def test_no_wait_of_the_sources_is_without_a_name():
    nameless = {path for path, text in sources() if NAMELESS.search(DURATION.sub("", text))}
    assert nameless == NAMELESS_IN


def test_the_paths_that_the_readme_names_exist():
    text = readme.README.read_text(encoding="utf-8")
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (readme.ROOT / path).exists(), path
    for block in readme.blocks("sh"):
        for path in re.findall(r"^(?:deploy|tests)/[\w./]+", block, re.MULTILINE):
            assert (readme.ROOT / path).exists(), path
