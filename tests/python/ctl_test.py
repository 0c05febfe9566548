"""weightsyncctl: tables for people, JSON for programs, exit codes for scripts."""

import json
import subprocess

import pytest

import cluster


def ctl(node, *arguments, timeout=60):
    return subprocess.run(
        [str(cluster.CTL), *arguments, "--address", node.socket],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(params=[0, 1], ids=["coordinator", "other"])
def node(demo, request):
    """Any daemon of the cluster answers."""
    return demo.nodes[request.param]


COMMANDS = ["status", "models", "versions", "replicas", "nodes"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_table_for_people(demo, node, command):
    run = ctl(node, command)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert "\x1b" not in run.stdout, "colours belong on terminals alone"
    word = "node1" if command == "nodes" else demo.model
    assert word in run.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_json_for_programs(node, command):
    run = ctl(node, command, "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)


def test_status_has_everything(demo, node):
    status = json.loads(ctl(node, "status", "--json").stdout)
    assert {"cluster", "nodes", "models", "replicas", "versions"} <= set(status)
    assert {one["name"] for one in status["nodes"]} == {"nodes/node0", "nodes/node1"}
    assert [one["name"] for one in status["models"]] == [f"models/{demo.model}"]
    assert all(one["state"] == "STATE_SERVING" for one in status["replicas"])


def test_one_of_each(demo, node):
    for arguments, word in [
        (["models", demo.model], f"models/{demo.model}"),
        (["versions", f"{demo.model}/latest"], "STATE_ACTIVE"),
        (["versions", f"{demo.model}/3"], "STATE_ACTIVE"),
        (["nodes", "node1"], "nodes/node1"),
    ]:
        run = ctl(node, *arguments, "--json")
        assert run.returncode == 0, run.stderr
        assert word in run.stdout
        assert ctl(node, *arguments).returncode == 0


def test_watching_a_version_that_has_ended(demo, node):
    run = ctl(node, "watch", f"{demo.model}/3", "--json")
    assert run.returncode == 0, run.stderr
    last = json.loads(run.stdout.splitlines()[-1])
    assert last["state"] == "STATE_ACTIVE"
    assert ctl(node, "watch", f"{demo.model}/3").returncode == 0


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["models", "none"], 4),
        (["versions", "none/1"], 4),
        (["replicas", "none/r"], 4),
        (["nodes", "none"], 4),
        (["frobnicate"], 2),
        (["status", "--jsn"], 2),
    ],
    ids=str,
)
def test_exit_codes(node, arguments, code):
    run = ctl(node, *arguments)
    assert run.returncode == code, run.stderr
    assert run.stdout == ""
    assert run.stderr


def test_a_daemon_that_is_not_there(tmp_path):
    run = subprocess.run(
        [str(cluster.CTL), "status", "--address", f"unix:{tmp_path}/none", "--timeout", "500ms"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert run.returncode == 3, run.stderr
    assert run.stdout == ""


def test_the_plan_of_a_registered_model(demo, node):
    run = ctl(node, "plan", "--registered", demo.model)
    assert run.returncode == 0, run.stderr
    assert f"models/{demo.model} as it would run now" in run.stdout
    planned = json.loads(ctl(node, "plan", "--registered", demo.model, "--json").stdout)
    assert planned["policy"] == "SHARDED"
    latest = json.loads(ctl(node, "versions", f"{demo.model}/latest", "--json").stdout)
    assert planned["wire_bytes"] == int(latest["wireBytes"])
    run = ctl(node, "plan", "--registered", "nobody")
    assert (run.returncode, "MODEL_UNKNOWN" in run.stderr) == (4, True)
