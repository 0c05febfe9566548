"""README.md's section on planning: its commands are run, and print what it shows."""

import re
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
