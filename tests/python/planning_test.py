"""README.md's section on planning: its commands are run, and print what it shows."""

import json
import re
import resource
import shlex
import subprocess

import pytest

import cluster
import readme

# How long planning took differs from run to run, and nothing else does.
MADE_IN = re.compile(r"made in [\d.]+ \w+")


def section():
    text = readme.README.read_text(encoding="utf-8")
    start = text.index("\n## Planning\n")
    return text[start : text.index("\n## ", start + 1)]


def examples():
    """Each command with the output that is shown under it."""
    found = re.findall(r"^```sh\n(.*?)^```\n+```text\n(.*?)^```$", section(), re.M | re.S)
    assert len(found) >= 2
    return [(shlex.split(command.replace("\\\n", " ")), output) for command, output in found]


@pytest.mark.parametrize("number", range(len(examples())))
def test_the_readme_shows_what_plan_prints(number, tmp_path):
    command, output = examples()[number]
    assert command[:2] == ["weightsyncctl", "plan"]
    (config,) = readme.blocks("textproto", section())
    (tmp_path / "plan.textproto").write_text(config, encoding="utf-8")
    run = subprocess.run(
        [str(cluster.CTL), *command[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        # No daemon is asked.
        env={"WEIGHTSYNC_ADDRESS": "127.0.0.1:1"},
    )
    assert run.returncode == 0, run.stderr
    assert MADE_IN.sub("made in -", run.stdout) == MADE_IN.sub("made in -", output)


def plan(*options):
    return subprocess.run(
        [str(cluster.CTL), "plan", *options],
        capture_output=True,
        text=True,
        timeout=60,
        env={"WEIGHTSYNC_ADDRESS": "127.0.0.1:1"},
    )


SMALL = (
    "--model=qwen2.5-0.5b",
    "--training_sharding=zero3",
    "--training_gpus=4",
    "--inference_replicas=8",
    "--inference_tp=1",
)
DEEPSEEK = (
    "--model=deepseek-v3",
    "--training_sharding=fsdp",
    "--training_gpus=2048",
    "--training_pp=4",
    "--training_ep=64",
    "--inference_replicas=128",
    "--inference_tp=8",
)


def test_auto_plans_deepseek_in_two_seconds_of_one_core():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = plan(*DEEPSEEK, "--json")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.returncode == 0, run.stderr
    made = json.loads(run.stdout)
    assert made["num_tensors"] == 45395
    assert [weighed["policy"] for weighed in made["policies"]] == ["SHARDED", "PAIRED", "BROADCAST"]
    # What others do on the machine is not counted.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    assert after.ru_maxrss < 1 << 20  # KiB


def test_auto_says_why_paired_cannot_be_had():
    run = plan(*SMALL)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("SHARDED: ")
    assert "PAIRED cannot be had (TOO_FEW_TRAINERS): training_gpus is 4; " in run.stdout
    paired = json.loads(plan(*SMALL, "--json").stdout)["policies"][1]
    assert paired["reason"] == "TOO_FEW_TRAINERS"
    assert "8" in paired["message"]


@pytest.mark.parametrize(
    "options, code, reason, status",
    [
        (["--bucket_size=16"], "RESOURCE_EXHAUSTED", "PLAN_TOO_LARGE", 1),
        (["--training_pp=0"], "INVALID_ARGUMENT", "INVALID_COUNT", 1),
        (["--policy=paired"], "INVALID_ARGUMENT", "TOO_FEW_TRAINERS", 1),
        (["--catalog=/"], "INVALID_ARGUMENT", "USAGE", 2),
        (["--training_tp=many"], "INVALID_ARGUMENT", "USAGE", 2),
        (["--config=/nowhere"], "NOT_FOUND", "FILE_UNKNOWN", 4),
    ],
)
def test_errors_are_json_under_json(options, code, reason, status):
    run = plan(*SMALL, *options, "--json")
    assert run.returncode == status
    assert run.stdout == ""
    error = json.loads(run.stderr)
    assert (error["code"], error["reason"]) == (code, reason)
    assert error["message"]
    # For people it is a sentence, with the same status.
    told = plan(*SMALL, *options)
    assert told.returncode == status
    assert error["message"] in told.stderr
