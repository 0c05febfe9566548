"""A real model is served over HTTP, with requests in flight all the time, while its weights are replaced.

Two replicas of all-MiniLM-L6-v2 (tests/serving/minilm.py) on two nodes. Every answer must be, bit for bit,
that of one version; versions never go back; no request is lost; only ABORT ends requests, with an error that
may be tried again.
"""

import collections
import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time

import numpy
import pytest
import weightsync

import cluster

sys.path.insert(0, str(cluster.ROOT / "tests/serving"))
import minilm  # noqa: E402

pytestmark = pytest.mark.slow

SERVER = cluster.ROOT / "tests/serving/minilm.py"
LOCKSTEP = {}
EVICT = {"on_straggler": "evict"}
ROLLING = {"rolling": 1}

# Of replicas that are written to in place; then of those that swap between two sets.
IN_PLACE = [
    dict(update_mode=update, pause_mode=pause, **policy)
    for update in ("stage", "stream")
    for pause in ("drain", "keep", "abort")
    for policy in (LOCKSTEP, EVICT, ROLLING)
    if not (update == "stream" and policy is ROLLING)  # COMMIT_POLICY_UNIMPLEMENTED
]
SWAPPING = [
    dict(update_mode="stage", pause_mode=pause, **policy)
    for pause in ("none", "drain")
    for policy in (LOCKSTEP, ROLLING)
]
# Each with the trainer's tensors copied, or read where they lie; and delivered in turn, or if nothing newer waits.
for _updates in (IN_PLACE, SWAPPING):
    for _number, _options in enumerate(_updates):
        _options["publish_mode"] = ("snapshot", "in_place")[_number % 2]
        _options["delivery_policy"] = ("queue", "latest")[_number // 2 % 2]

Answer = collections.namedtuple("Answer", "server start end status version retries")


@pytest.fixture(scope="module")
def answers():
    """What each version answers to each sentence, by a process that never saw weightsync."""
    versions = range(len(IN_PLACE) + 1)
    said = subprocess.run(
        [sys.executable, SERVER, "answer", *map(str, versions)],
        check=True,
        capture_output=True,
        timeout=300,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    ).stdout
    return {int(version): [bytes.fromhex(text) for text in found] for version, found in json.loads(said).items()}


def test_it_is_the_real_model(answers):
    """Sentences that mean the same are close, others are not."""
    cat, other_cat, bank, _ = (numpy.frombuffer(text, numpy.float32) for text in answers[0])
    assert cat @ other_cat > 0.6
    assert cat @ bank < 0.2
    assert len({text for found in answers.values() for text in found}) == len(answers) * len(minilm.SENTENCES)


class Clients:
    """Ask the servers for as long as they are told to; note every answer."""

    def __init__(self, ports, answers, per_server=2):
        self._versions = {text: version for version, found in answers.items() for text in found}
        self._texts = [{found[i]: version for version, found in answers.items()} for i in range(len(minilm.SENTENCES))]
        self._requests = [json.dumps(minilm.tokens(sentence)) for sentence in minilm.SENTENCES]
        self._stop = threading.Event()
        self.answers, self.problems = [], []
        self._threads = [
            threading.Thread(target=self._ask, args=(server, port, first))
            for server, port in enumerate(ports)
            for first in range(per_server)
        ]

    def _ask(self, server, port, number):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while not self._stop.is_set():
            number = (number + 1) % len(self._requests)
            start, retries = time.monotonic(), 0
            while True:
                try:
                    connection.request("POST", "/embed", self._requests[number])
                    response = connection.getresponse()
                    body = response.read()
                except OSError as error:
                    self.problems.append(f"server {server} lost a request: {error!r}")
                    return
                if response.status != 503 or not json.loads(body)["retryable"] or "Retry-After" not in response.headers:
                    break
                retries += 1
            version = self._texts[number].get(body)
            if response.status != 200 or version is None:
                self.problems.append(f"server {server} answered {response.status} with a mix: {body[:40]!r}")
            self.answers.append(Answer(server, start, time.monotonic(), response.status, version, retries))

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive(), "a request has no answer"


def never_back(answers):
    """Of two requests of which one ended before the other began, the later has no older version."""
    newest, ended = 0, collections.deque(sorted(answers, key=lambda a: a.end))
    for answer in sorted(answers, key=lambda a: a.start):
        while ended and ended[0].end < answer.start:
            newest = max(newest, ended.popleft().version)
        assert answer.version >= newest, (answer, newest)


@contextlib.contextmanager
def served(answers, swap):
    """(trainer, clients that ask all the time): two servers on two nodes."""
    with cluster.Cluster(nodes=2) as here:
        servers = [
            here.start(
                f"server-{i}",
                "env",
                "OPENBLAS_NUM_THREADS=1",
                sys.executable,
                SERVER,
                "serve",
                f"--address={here.nodes[i].socket}",
                f"--replica=r{i}",
                *(["--swap"] if swap else []),
            )
            for i in range(2)
        ]
        for server in servers:
            cluster.wait_until(server.lines, "a server did not start", 60, servers)
        ports = [int(server.lines()[0]) for server in servers]
        with weightsync.Trainer("minilm", address=here.nodes[0].socket) as trainer, Clients(ports, answers) as clients:
            yield trainer, clients, servers
        assert not clients.problems, clients.problems[:5]


def stream(updates, answers, swap):
    weights = minilm.load()
    spans = []
    with served(answers, swap) as (trainer, clients, servers):
        for version, options in enumerate(updates, 1):
            before = time.monotonic()
            result = trainer.publish(tensors=minilm.version_of(weights, version), **options).wait(120)
            assert result.version == version and result.replica_count == 2
            spans.append((version, options, before, time.monotonic()))
            # Served for a while, before the next one comes.
            enough = len(clients.answers) + 16
            cluster.wait_until(
                lambda: len(clients.answers) >= enough or clients.problems, f"{options}: no answers", 60, servers
            )
    found = clients.answers
    for server in range(2):
        mine = [answer for answer in found if answer.server == server]
        never_back(mine)
        assert {answer.version for answer in mine} >= set(range(1, len(updates) + 1)), "a version never answered"
    for version, options, before, after in spans:
        # Requests that were in flight while this update came.
        met = [answer for answer in found if answer.start < after and answer.end > before]
        assert met, "no request was in flight"
        if options["pause_mode"] != "abort":
            assert not any(answer.retries for answer in met), options
        if "rolling" not in options:
            # In lockstep nobody answers with the old one when somebody has answered with the new one.
            never_back([answer for answer in met if answer.version >= version - 1])
    aborted = [o for _, o, b, a in spans if any(x.retries and x.start < a and x.end > b for x in found)]
    return found, aborted


def test_in_place(answers):
    found, aborted = stream(IN_PLACE, answers, swap=False)
    assert len(found) > 16 * len(IN_PLACE)
    assert aborted and all(options["pause_mode"] == "abort" for options in aborted), "ABORT met no request"


def test_swapping(answers):
    found, aborted = stream(SWAPPING, answers, swap=True)
    assert not aborted
    assert len(found) > 16 * len(SWAPPING)


@pytest.mark.parametrize("publish_mode", ["snapshot", "in_place"])
def test_only_the_latest(answers, publish_mode):
    """Published faster than they are served: some are passed over, the last one never, and no answer is of a mix."""
    weights, last = minilm.load(), max(answers)
    with served(answers, swap=False) as (trainer, clients, servers):
        updates = [
            trainer.publish(
                tensors=minilm.version_of(weights, version), delivery_policy="latest", publish_mode=publish_mode
            )
            for version in range(1, last + 1)
        ]
        assert updates[-1].wait(120).version == last
        enough = len(clients.answers) + 16
        cluster.wait_until(lambda: len(clients.answers) >= enough or clients.problems, "no answers", 60, servers)
        states = []
        for update in updates:
            try:
                states.append(update.wait(60).state)
            except weightsync.AbortedError as error:
                assert error.reason == "SUPERSEDED", error
                states.append(weightsync.State.SUPERSEDED)
    served_versions = {version for version, state in enumerate(states, 1) if state == weightsync.State.ACTIVE}
    assert last in served_versions
    assert {answer.version for answer in clients.answers} <= served_versions | {0}
    assert not any(answer.retries for answer in clients.answers)
    for server in range(2):
        mine = [answer for answer in clients.answers if answer.server == server]
        never_back(mine)
        assert max(mine, key=lambda answer: answer.start).version == last
