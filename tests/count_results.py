#!/usr/bin/env python3
"""Counts test cases from what the runners wrote down.

Usage: count_results.py bazel EVENTS.json   (--build_event_json_file of `bazel test`)
       count_results.py junit RESULTS.xml   (pytest --junit-xml)
       count_results.py chaos RUN.json      (tests/chaos/run.sh --json)
       count_results.py model RUN.json      (tests/model/run.sh --json)
Prints `PASSED FAILED SKIPPED` on stdout, and what failed on stderr.
"""

import json
import pathlib
import sys
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ElementTree


def count_xml(path):
    """Counts the cases of one file. Returns (passed, names of failed, skipped)."""
    passed, failed, skipped = 0, [], 0
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = ".".join(filter(None, [case.get("classname"), case.get("name")]))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif case.find("skipped") is not None or case.get("result") in ("skipped", "suppressed"):
            skipped += 1
        elif case.get("status") == "notrun":
            # A disabled case of gtest.
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def count_bazel(events_path):
    """Counts the cases of every test target that one `bazel test` ran, built or not.

    A target that failed as a whole (it did not build, crashed, ran out of time) counts as one
    failed case beyond those that its file names; a test that does not fit this machine (without
    nvcc, for one) as one that was skipped.
    """
    passed, failed, skipped = 0, [], 0
    results = {}  # label -> paths of the test.xml files of its shards
    status = {}  # label -> overall status
    broken = []  # labels that did not build
    tests = set()  # labels of targets that are tests
    finished = None
    for line in pathlib.Path(events_path).read_text(encoding="utf-8").splitlines():
        if not line.strip():
            continue
        event = json.loads(line)
        identity = event.get("id", {})
        if "testResult" in identity:
            label = identity["testResult"]["label"]
            outputs = event.get("testResult", {}).get("testActionOutput", [])
            xml = [o.get("uri", "") for o in outputs if o.get("name") == "test.xml"]
            # A later attempt at the same shard replaces the earlier one.
            shard = identity["testResult"].get("shard", 1)
            results.setdefault(label, {})[shard] = xml[-1] if xml else ""
        elif "testSummary" in identity:
            label = identity["testSummary"]["label"]
            status[label] = event.get("testSummary", {}).get("overallStatus", "NO_STATUS")
        elif "targetConfigured" in identity:
            if event.get("configured", {}).get("testSize"):
                tests.add(identity["targetConfigured"]["label"])
        elif "targetCompleted" in identity:
            label = identity["targetCompleted"]["label"]
            if event.get("aborted", {}).get("reason") == "SKIPPED" and label in tests:
                skipped += 1
            if "completed" in event and not event["completed"].get("success", False):
                broken.append(identity["targetCompleted"]["label"])
        elif "buildFinished" in identity:
            finished = event.get("finished", {})

    for label in sorted(set(results) | set(status)):
        target_failed = []
        for uri in results.get(label, {}).values():
            path = urllib.request.url2pathname(urllib.parse.urlparse(uri).path)
            if not uri.startswith("file://") or not pathlib.Path(path).is_file():
                continue
            try:
                case_passed, case_failed, case_skipped = count_xml(path)
            except ElementTree.ParseError:
                # Cut off in the middle: the status below tells.
                continue
            passed += case_passed
            skipped += case_skipped
            target_failed += [f"{label}: {name}" for name in case_failed]
        overall = status.get(label, "NO_STATUS")
        if overall not in ("PASSED", "FLAKY") and not target_failed:
            target_failed = [f"{label}: {overall}"]
        failed += target_failed
    seen = {name.split(": ")[0] for name in failed}
    failed += [f"{label}: did not build" for label in sorted(broken) if label not in seen]
    if finished is None:
        failed.append("bazel: it did not finish")
    elif not finished.get("overallSuccess", False) and not failed:
        name = finished.get("exitCode", {}).get("name", "unknown error")
        # Nothing of what was asked for is a test: the caller says whether that is right.
        if name != "NO_TESTS_FOUND":
            failed.append(f"bazel: {name}")
    return passed, failed, skipped


def count_chaos(path):
    """Every trial of a chaos run is a test; so is that each kind of fault hit an update."""
    with open(path, encoding="utf-8") as file:
        run = json.load(file)
    findings = run.get("findings", {})
    failed = [
        f"chaos: seed {run['seed']}, trial {number}: {trial[0]}, {trial[1]}: "
        f"{findings.get(str(number), 'see the run')}"
        for number, trial in enumerate(run["each"])
        if trial[2] or trial[3]
    ]
    passed = len(run["each"]) - len(failed)
    failed += [f"chaos: {kind}: never hit an update in flight" for kind in run["never_hit"]]
    if len(run["each"]) < run["asked"]:
        failed.append(f"chaos: {len(run['each'])} of {run['asked']} trials ran")
    return passed, failed, 0


def count_model(path):
    """Every configuration and every mutant of the protocol's model is a test."""
    with open(path, encoding="utf-8") as file:
        run = json.load(file)
    failed = [f"model: {name}" for name in run["failed"]]
    if not run["passed"] and not failed:
        failed.append("model: nothing was searched")
    return len(run["passed"]), failed, 0


def main(arguments):
    kinds = {"bazel": count_bazel, "junit": count_xml, "chaos": count_chaos, "model": count_model}
    if len(arguments) != 2 or arguments[0] not in kinds:
        print(__doc__, file=sys.stderr)
        return 2
    kind, path = arguments
    try:
        passed, failed, skipped = kinds[kind](path)
    except (OSError, ValueError, ElementTree.ParseError) as error:
        # A runner that died before it wrote anything has failed.
        passed, failed, skipped = 0, [f"{kind}: no results in {path}: {error}"], 0
    for name in failed:
        print(f"FAILED {name}", file=sys.stderr)
    print(passed, len(failed), skipped)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
