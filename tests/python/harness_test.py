"""The test harness itself: a check that cannot fail checks nothing."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import readme

sys.path.insert(0, str(readme.ROOT / "tests"))
import check_includes  # noqa: E402
import count_results  # noqa: E402


@pytest.mark.parametrize(
    "path, line, allowed",
    [
        ("schedule/plan.cc", '#include "schedule/box.h"', True),
        ("schedule/plan.cc", "#include <vector>", True),
        ("schedule/plan.cc", '#include "transport/group.h"', False),
        ("schedule/plan.cc", '#include "weightsync/v1/types.pb.h"', False),
        ("transport/tcp/chain.cc", '#include "transport/group.h"', True),
        ("transport/tcp/chain.cc", '#include "daemon/node/store.h"', False),
        ("transport/tcp/chain.cc", '#include "client/cc/worker.h"', False),
        ("transport/tcp/chain.cc", "#include <cuda_runtime.h>", False),
        ("transport/nccl/group.cc", "#include <nccl.h>", True),
        ("transport/cuda/memory.cc", "#include <cuda_runtime_api.h>", True),
        ("transport/host/arena.cc", '#  include "nccl.h"', False),
        ("daemon/main.cc", '#include "transport/group.h"', True),
        ("daemon/main.cc", '#include "weightsync/v1/types.pb.h"', True),
        ("daemon/main.cc", '#include "client/cc/worker.h"', False),
        ("client/cc/worker.cc", '#include "transport/host/arena.h"', True),
        ("client/cc/worker.cc", '#include "daemon/node/store.h"', False),
        ("client/cc/worker.cc", '#include "schedule/box.h"', False),
        ("client/ctl/plan.cc", '#include "schedule/box.h"', True),
        ("proto/status.cc", '#include "transport/error.h"', True),
        ("proto/status.cc", '#include "transport/group.h"', False),
        ("proto/status.cc", '#include "daemon/main.h"', False),
        ("tests/e2e/demo.cc", '#include "client/cc/worker.h"', True),
        # Not an include.
        ("schedule/plan.cc", '// #include "transport/group.h"', True),
    ],
)
def test_include_rules(tmp_path, path, line, allowed):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(f"// A file.\n{line}\n")
    breaches = check_includes.check(tmp_path, [path])
    assert (breaches == []) == allowed
    assert all(breach.startswith(f"{path}:2: ") for breach in breaches)


def write_events(tmp_path, *events):
    path = tmp_path / "events.json"
    path.write_text("\n".join(json.dumps(event) for event in events))
    return str(path)


def test_result(label, xml_path):
    outputs = [{"name": "test.log", "uri": "file:///none"}]
    if xml_path:
        outputs.append({"name": "test.xml", "uri": f"file://{xml_path}"})
    return {
        "id": {"testResult": {"label": label, "run": 1, "shard": 1, "attempt": 1}},
        "testResult": {"testActionOutput": outputs},
    }


test_result.__test__ = False


def summary(label, status):
    return {"id": {"testSummary": {"label": label}}, "testSummary": {"overallStatus": status}}


def finished(success, name="SUCCESS"):
    return {
        "id": {"buildFinished": {}},
        "finished": {"overallSuccess": success, "exitCode": {"name": name}},
    }


GTEST_XML = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites tests="4" failures="1" disabled="1" errors="0" name="AllTests">
  <testsuite name="Box" tests="4" failures="1" disabled="1" skipped="1" errors="0">
    <testcase name="Fits" status="run" result="completed" time="0" classname="Box" />
    <testcase name="Splits" status="run" result="completed" time="0" classname="Box">
      <failure message="no" type=""><![CDATA[no]]></failure>
    </testcase>
    <testcase name="NeedsRoot" status="run" result="skipped" time="0" classname="Box">
      <skipped message="no root"><![CDATA[no root]]></skipped>
    </testcase>
    <testcase name="DISABLED_Later" status="notrun" result="suppressed" time="0" classname="Box" />
  </testsuite>
</testsuites>
"""


def test_cases_of_gtest_are_counted(tmp_path):
    xml = tmp_path / "test.xml"
    xml.write_text(GTEST_XML)
    events = write_events(
        tmp_path, test_result("//a:b", xml), summary("//a:b", "FAILED"), finished(False, "TESTS_FAILED")
    )
    assert count_results.count_bazel(events) == (1, ["//a:b: Box.Splits"], 2)


def test_a_target_without_results_has_failed(tmp_path):
    events = write_events(
        tmp_path,
        test_result("//a:crash", None),
        summary("//a:crash", "FAILED"),
        summary("//a:slow", "TIMEOUT"),
        {"id": {"targetCompleted": {"label": "//a:typo"}}, "completed": {}},
        finished(False, "BUILD_FAILURE"),
    )
    assert count_results.count_bazel(events) == (
        0,
        ["//a:crash: FAILED", "//a:slow: TIMEOUT", "//a:typo: did not build"],
        0,
    )


def test_a_target_that_does_not_fit_this_machine_is_no_failure(tmp_path):
    events = write_events(
        tmp_path,
        {
            "id": {"targetConfigured": {"label": "//a:gpu_test"}},
            "configured": {"targetKind": "cc_test rule", "testSize": "SMALL"},
        },
        {"id": {"targetCompleted": {"label": "//a:gpu_test"}}, "aborted": {"reason": "SKIPPED"}},
        {"id": {"targetConfigured": {"label": "//a:gpu"}}, "configured": {"targetKind": "cc_library rule"}},
        {"id": {"targetCompleted": {"label": "//a:gpu"}}, "aborted": {"reason": "SKIPPED"}},
        finished(True),
    )
    # Other targets than tests are nothing that is counted.
    assert count_results.count_bazel(events) == (0, [], 1)


def test_a_build_that_did_not_finish_has_failed(tmp_path):
    events = write_events(tmp_path, summary("//a:b", "PASSED"))
    assert count_results.count_bazel(events) == (0, ["bazel: it did not finish"], 0)
    assert count_results.main(["bazel", str(tmp_path / "none.json")]) == 0


def test_configurations_of_the_model_are_counted(tmp_path):
    run = tmp_path / "model.json"
    run.write_text(json.dumps({"passed": ["crashes", "any_term"], "failed": ["breaks"]}))
    assert count_results.count_model(run) == (2, ["model: breaks"], 0)
    run.write_text(json.dumps({"passed": [], "failed": []}))
    assert count_results.count_model(run) == (0, ["model: nothing was searched"], 0)


def test_a_chaos_run_that_stops_early_has_failed(tmp_path):
    path = tmp_path / "run.json"
    each = [["kill worker", "MOVING", False, False, 1.0, "-"], ["kill worker", "idle", True, False, 1.0, "-"]]
    run = {"seed": 3, "asked": 2, "each": each, "findings": {"1": "MIXED"}, "never_hit": []}
    path.write_text(json.dumps(run))
    mixed = "chaos: seed 3, trial 1: kill worker, idle: MIXED"
    assert count_results.count_chaos(path) == (1, [mixed], 0)
    path.write_text(json.dumps({**run, "asked": 30}))
    assert count_results.count_chaos(path) == (1, [mixed, "chaos: 2 of 30 trials ran"], 0)
    path.write_text(json.dumps({**run, "asked": 30, "each": []}))
    assert count_results.count_chaos(path) == (0, ["chaos: 0 of 30 trials ran"], 0)


def test_run_sh_fails_when_nothing_ran():
    run = subprocess.run(
        [str(readme.ROOT / "tests/run.sh"), "--filter", "no such name anywhere"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 1
    assert run.stdout.splitlines()[-1] == "0 passed, 0 failed"


def test_run_sh_refuses_unknown_arguments():
    run = subprocess.run(
        [str(readme.ROOT / "tests/run.sh"), "--fsat"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 2
    assert "--fsat" in run.stderr


README_SAMPLE = """
# Title
```sh
deploy/quickstart.sh --keep   # a comment
grpc_cli call localhost:1 weightsync.v1.AdminService.GetModel \\
  'name: "models/demo"'
```
```cpp
grpc_cli is not here
```
```sh
grpc_cli call localhost:1 a.B.C 'parent: "models/-"
page_size: 2'
```
"""


def test_readme_commands_are_found():
    assert readme.commands("grpc_cli", README_SAMPLE) == [
        ["grpc_cli", "call", "localhost:1", "weightsync.v1.AdminService.GetModel", 'name: "models/demo"'],
        ["grpc_cli", "call", "localhost:1", "a.B.C", 'parent: "models/-"\npage_size: 2'],
    ]
    assert readme.blocks("cpp", README_SAMPLE) == ["grpc_cli is not here\n"]


def test_no_file_is_left_out_of_the_python_tests():
    """run.sh finds *_test.py: a test file of another name would never run."""
    for path in pathlib.Path(__file__).parent.glob("*.py"):
        if not path.name.endswith("_test.py"):
            assert "\ndef test_" not in path.read_text(encoding="utf-8"), path.name


@pytest.mark.parametrize(
    "bazel, pip, last, told",
    [
        ("exit 0", 0, "1 passed, 0 failed", None),
        ("exit 0", 1, "0 passed, 1 failed", "client/python could not be built"),
        # Programs of before would be tried.
        ('[[ "$1" != build ]]', 0, "0 passed, 1 failed", "client/python could not be built"),
        # Targets that nobody can list are not tested.
        ('[[ "$1" != query ]]', 0, "1 passed, 1 failed", "could not be listed"),
    ],
)
def test_what_is_not_of_this_tree_does_not_count(tmp_path, bazel, pip, last, told):
    """What was built or installed before would be tried in its place."""

    def script(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    for name in ("run.sh", "count_results.py"):
        path = tmp_path / "tests" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((readme.ROOT / "tests" / name).read_bytes())
        path.chmod(0o755)
    script(tmp_path / "deploy/install_deps.sh", "exit 0")
    script(tmp_path / "bin/bazel", bazel)
    script(tmp_path / ".venv/bin/python", f'exec "{sys.executable}" "$@"')
    script(tmp_path / ".venv/bin/pip", f"exit {pip}")
    for path in ("tests/requirements.txt", ".venv/requirements.txt"):
        (tmp_path / path).write_text("none\n")
    (tmp_path / "tests/python").mkdir()
    (tmp_path / "tests/python/one_test.py").write_text("def test_one():\n    pass\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "tests"], cwd=tmp_path, check=True)
    done = subprocess.run(
        [tmp_path / "tests/run.sh", "--filter", "one_test"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
    )
    assert done.stdout.splitlines()[-1] == last, done.stdout + done.stderr
    assert done.returncode == (1 if told else 0)
    assert told is None or told in done.stdout
