"""Bad input through the public RPCs: a clear code, a reason and a sentence; nothing else disturbed.

Every case is followed by a whole update of another model on the same cluster.
"""

import os
import re
import subprocess
import sys
import uuid

import grpc
from google.protobuf import text_format
import pytest

import cluster
import raw_client
import readme

BF16 = 9
F32 = 12
MIB = 1 << 20
BUDGET = 64 * MIB


@pytest.fixture(scope="module")
def running():
    """One daemon with short deadlines, and a replica of the model "bench" that takes updates."""
    flags = [
        f"--store_budget_bytes={BUDGET}",
        "--gather_timeout=2s",
        "--publish_timeout=3s",
        "--apply_timeout=2s",
        "--pause_timeout=2s",
        "--resume_timeout=2s",
    ]
    with cluster.Cluster(flags=flags) as here:
        worker = here.start(
            "good-worker",
            cluster.BIN / "tests/bench/product_bench",
            "--role=worker",
            f"--address={here.nodes[0].socket}",
            f"--bytes={MIB}",
            "--stay",
        )
        cluster.wait_until(lambda: "ready" in worker.lines(), "no worker", processes=[worker])
        yield here


@pytest.fixture
def client(running):
    made = raw_client.Client(running.nodes[0].socket)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def an_update_still_works(running):
    yield
    trainer = running.start(
        f"good-trainer-{uuid.uuid4().hex}",
        cluster.BIN / "tests/bench/product_bench",
        "--role=trainer",
        f"--address={running.nodes[0].socket}",
        f"--bytes={MIB}",
        "--warm_up=0",
        "--runs=1",
    )
    assert trainer.wait(60) == 0, trainer.story()
    assert running.nodes[0].process.running()


@pytest.fixture
def model():
    return f"bad-{uuid.uuid4().hex[:12]}"


def parameter(client, name="w", dtype=BF16, shape=(4, 8)):
    return client.message("Parameter", name=name, dtype=dtype, shape=shape)


def shard(client, region=0, offset_bytes=0, box=None, strides=(), **fields):
    made = client.message(
        "TensorShard", parameter=parameter(client, **fields), region=region, offset_bytes=offset_bytes
    )
    if box:
        made.box.offset.extend(box[0])
        made.box.extent.extend(box[1])
    made.strides.extend(strides)
    return made


def wanted(client, name="w", dtype=BF16, shape=(4, 8), box=None):
    made = client.message("WantedTensor", name=name, dtype=dtype, shape=shape)
    if box:
        made.box.offset.extend(box[0])
        made.box.extent.extend(box[1])
    return made


class Rank:
    """A trainer rank with an arena."""

    def __init__(self, client, model, rank=0, world_size=1, arena_bytes=4096):
        self.client = client
        self.stream, self.session = client.trainer(model, rank, world_size)
        self.arena_bytes = arena_bytes
        try:
            self.arena = client.call(
                "TrainerService.AllocateArena", session=self.session, size_bytes=arena_bytes
            ).arena
        except grpc.RpcError:
            self.stream.close()
            raise
        self.arena_id = self.arena.arena_id

    def register(self, *shards):
        region = self.client.message("MemoryRegion", size_bytes=self.arena_bytes)
        region.memory.arena.arena_id = self.arena_id
        return self.client.call(
            "TrainerService.RegisterShards", session=self.session, regions=[region], shards=shards
        )

    def publish(self, **fields):
        return self.client.call("TrainerService.PublishVersion", session=self.session, **fields)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stream.close()


def refused(code, *reasons, naming=""):
    """The call inside ends with this code and one of these reasons, and its sentence names that."""

    class Refused:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, _):
            assert kind is not None, "it was accepted"
            if not isinstance(error, grpc.RpcError):
                return False
            got_code, got_reason, sentence = raw_client.error_of(error)
            assert (got_code, got_reason) in [(code, reason) for reason in reasons], sentence
            assert naming in sentence, sentence
            self.sentence = sentence
            assert len(sentence.split()) >= 4, f"not a sentence: {sentence!r}"
            return True

    return Refused()


INVALID = grpc.StatusCode.INVALID_ARGUMENT
NEWEST_PROTOCOL = int(
    re.search(r"kNewestProtocolVersion = (\d+)", (cluster.ROOT / "daemon/options.h").read_text()).group(1)
)
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
NOT_FOUND = grpc.StatusCode.NOT_FOUND
TAKEN = grpc.StatusCode.ALREADY_EXISTS
TOO_LATE = grpc.StatusCode.DEADLINE_EXCEEDED
ABORTED = grpc.StatusCode.ABORTED
LATER = grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("dtype", [0, 16, 99, -1])
def test_unknown_dtype(client, model, dtype):
    with Rank(client, model) as rank, refused(INVALID, "DTYPE_UNKNOWN", naming="w"):
        rank.register(shard(client, dtype=dtype))


@pytest.mark.parametrize(
    "shape",
    [(-4, 8), (4, 0), (0,), ((1 << 31) + 1, 1), (1 << 31, 1 << 31, 1 << 31)],
    ids=["negative", "zero", "zero-only", "too-long", "overflow"],
)
def test_bad_shapes(client, model, shape):
    with Rank(client, model) as rank, refused(INVALID, "SHAPE_INVALID", naming="w"):
        rank.register(shard(client, shape=shape))
    with client.worker(model, "r", [wanted(client, shape=shape)]) as worker:
        with refused(INVALID, "SHAPE_INVALID", naming="w"):
            worker.next_of("registered")


@pytest.mark.parametrize(
    "box",
    [([0, 0], [5, 8]), ([4, 0], [1, 8]), ([-1, 0], [2, 8]), ([0, 0], [0, 8]), ([0], [4])],
    ids=["too-long", "behind", "before", "empty", "flat"],
)
def test_boxes_outside_of_their_tensor(client, model, box):
    with Rank(client, model) as rank, refused(INVALID, "BOX_OUT_OF_RANGE", "SHAPE_INVALID", naming="w"):
        rank.register(shard(client, box=box))
    with client.worker(model, "r", [wanted(client, box=box)]) as worker:
        with refused(INVALID, "BOX_OUT_OF_RANGE", "SHAPE_INVALID", naming="w"):
            worker.next_of("registered")


@pytest.mark.parametrize(
    "where",
    [
        {"offset_bytes": 4096 - 63},
        {"offset_bytes": 4096},
        {"offset_bytes": -2},
        {"offset_bytes": (1 << 63) - 2},
        {"shape": (64, 64)},
        {"strides": (2048, 1)},
        {"strides": (1 << 61, 1)},
        {"region": 1},
        {"region": -1},
    ],
    ids=str,
)
def test_memory_outside_of_its_segment(client, model, where):
    with Rank(client, model) as rank:
        with refused(INVALID, "MEMORY_OUT_OF_RANGE", "STRIDES_INVALID", "REGION_OUT_OF_RANGE"):
            rank.register(shard(client, **where))


def test_region_larger_than_its_arena(client, model):
    with Rank(client, model) as rank:
        rank.arena_bytes *= 2
        with refused(INVALID, "MEMORY_OUT_OF_RANGE"):
            rank.register(shard(client))


def test_arena_of_nobody(client, model):
    with Rank(client, model) as rank:
        rank.arena_id = "no-such-arena"
        with refused(NOT_FOUND, "ARENA_UNKNOWN"):
            rank.register(shard(client))


def test_arena_of_another_rank(client, model):
    with Rank(client, model, 0, 2) as first, Rank(client, model, 1, 2) as second:
        second.arena_id = first.arena_id
        with refused(NOT_FOUND, "ARENA_UNKNOWN"):
            second.register(shard(client))


@pytest.mark.parametrize("size", [0, -1])
def test_arena_of_no_size(client, model, size):
    with refused(INVALID, "ARENA_SIZE_INVALID"):
        Rank(client, model, arena_bytes=size)


def test_no_memory_for_an_arena(client, model):
    with refused(EXHAUSTED, "MEMORY_EXHAUSTED"):
        Rank(client, model, arena_bytes=1 << 44)


def test_more_than_the_store_may_take(client, model):
    rows = 2 * BUDGET // 2048
    with Rank(client, model, arena_bytes=2 * BUDGET) as rank:
        # Found out when it registers, not in the middle of an update.
        with refused(EXHAUSTED, "NO_STORE_ROOM", naming=str(BUDGET)):
            rank.register(shard(client, shape=(rows, 1024)))


def test_tokens_of_descriptors(client, model):
    with Rank(client, model) as rank:
        arena = rank.arena
        assert raw_client.redeem(arena.descriptor_socket, "0" * 32) == (5, "TOKEN_UNKNOWN")
        # Not from another process than the one that the session named.
        code = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys, raw_client; code, what = raw_client.redeem(*sys.argv[1:]); print(what);"
                " sys.exit(code)",
                arena.descriptor_socket,
                arena.token,
            ],
            cwd=readme.ROOT / "tests/python",
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (code.returncode, code.stdout.strip()) == (7, "TOKEN_OTHER_PROCESS"), code
        code, descriptor = raw_client.redeem(arena.descriptor_socket, arena.token)
        assert code == 0, descriptor
        # Nobody can shrink it under the daemon.
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)
        assert raw_client.redeem(arena.descriptor_socket, arena.token) == (9, "TOKEN_REDEEMED")


def test_sessions_of_nobody(client):
    with refused(NOT_FOUND, "SESSION_UNKNOWN"):
        client.call("TrainerService.AllocateArena", session="nobody", size_bytes=4096)
    with refused(NOT_FOUND, "SESSION_UNKNOWN"):
        client.call("TrainerService.RegisterShards", session="nobody")
    with refused(NOT_FOUND, "SESSION_UNKNOWN"):
        client.call("TrainerService.PublishVersion", session="nobody")


def test_duplicate_names(client, model):
    with Rank(client, model) as rank:
        with refused(INVALID, "DUPLICATE_NAME", "SHARDS_OVERLAP", naming="w"):
            rank.register(shard(client), shard(client, offset_bytes=64))
    with client.worker(model, "r", [wanted(client), wanted(client)]) as worker:
        with refused(INVALID, "DUPLICATE_NAME", naming="w"):
            worker.next_of("registered")


def test_shards_that_overlap(client, model):
    with Rank(client, model, 0, 2) as first, Rank(client, model, 1, 2) as second:
        first.register(shard(client, box=([0, 0], [3, 8])))
        # Rows 2 and 3: row 2 is there twice, but not the same box, which would be a replica of it.
        with refused(INVALID, "SHARDS_OVERLAP", naming="w"):
            second.register(shard(client, box=([2, 0], [2, 8])))


def test_shards_that_leave_a_hole(client, model):
    with Rank(client, model, 0, 2) as first, Rank(client, model, 1, 2) as second:
        first.register(shard(client, box=([0, 0], [2, 8])))
        with refused(INVALID, "SHARDS_HOLE", naming="w"):
            second.register(shard(client, box=([3, 0], [1, 8])))


def test_ranks_that_disagree_on_the_catalog(client, model):
    with Rank(client, model, 0, 2) as first, Rank(client, model, 1, 2) as second:
        first.register(shard(client, box=([0, 0], [2, 8])))
        with refused(INVALID, "CATALOG_MISMATCH", naming="w"):
            second.register(shard(client, dtype=F32, box=([2, 0], [2, 8])))


def test_ranks_that_disagree_on_their_number(client, model):
    with Rank(client, model, 0, 2) as first:
        first.register(shard(client, box=([0, 0], [2, 8])))
        with refused(PRECONDITION, "WORLD_SIZE_MISMATCH"):
            with Rank(client, model, 1, 3) as second:
                second.register(shard(client, box=([2, 0], [2, 8])))


@pytest.mark.parametrize("rank, world_size", [(1, 1), (-1, 1), (0, 0), (0, -1)])
def test_ranks_out_of_range(client, model, rank, world_size):
    with refused(INVALID, "RANK_OUT_OF_RANGE"):
        client.trainer(model, rank, world_size)


def test_a_rank_that_is_taken(client, model):
    with Rank(client, model), refused(TAKEN, "RANK_TAKEN"):
        client.trainer(model)


@pytest.mark.parametrize("name", ["", "UPPER", "a/b", "-a", "a" * 64])
def test_names_of_models(client, name):
    with refused(INVALID, "MODEL_NAME_INVALID"):
        client.trainer(name)


def test_a_protocol_that_nobody_speaks(client, model):
    # Who is newer, or older, learns what it may speak.
    for version in (99, -1):
        with refused(PRECONDITION, "PROTOCOL_UNSUPPORTED", naming=f"speaks 1 to {NEWEST_PROTOCOL};") as refusal:
            client.trainer(model, protocol_version=version)
        assert f"protocol version {version} " in refusal.sentence
    for version in range(1, NEWEST_PROTOCOL + 1):
        client.trainer(f"{model}-{version}", protocol_version=version)


@pytest.mark.parametrize(
    "want, reason",
    [
        ({"name": "v"}, "PARAMETER_UNKNOWN"),
        ({"dtype": F32}, "DTYPE_MISMATCH"),
        ({"shape": (8, 4)}, "SHAPE_MISMATCH"),
    ],
    ids=str,
)
@pytest.mark.parametrize("trainer_first", [True, False])
def test_a_worker_that_wants_what_there_is_not(client, model, want, reason, trainer_first):
    name = want.get("name", "w")
    with Rank(client, model) as rank:
        if trainer_first:
            rank.register(shard(client))
        with client.worker(model, "r", [wanted(client, **want)]) as worker:
            with refused(PRECONDITION, reason, naming=name):
                if not trainer_first:
                    worker.next_of("registered")
                    rank.register(shard(client))
                while worker.next() is not None:
                    pass
        # It was the worker's fault: the trainer goes on without it.
        rank.publish()


def test_a_version_that_is_not_newer(client, model):
    with Rank(client, model) as rank:
        rank.register(shard(client))
        name = rank.publish(version=5).version_name
        client.call("TrainerService.WaitVersion", name=name)
        for version in (5, 4, 1):
            with refused(PRECONDITION, "VERSION_NOT_NEWER", naming=str(version)):
                rank.publish(version=version)
        with refused(INVALID, "VERSION_INVALID"):
            rank.publish(version=-1)
        assert rank.publish().version == 6


def test_a_repeated_request_publishes_nothing(client, model):
    with Rank(client, model) as rank:
        rank.register(shard(client))
        first = rank.publish(request_id="once")
        client.call("TrainerService.WaitVersion", name=first.version_name)
        again = rank.publish(request_id="once")
        assert (again.version, again.update_id) == (first.version, first.update_id)
        listed = client.call("AdminService.ListVersions", parent=f"models/{model}").versions
        assert [version.version for version in listed] == [first.version]
        with refused(INVALID, "REQUEST_ID_INVALID"):
            rank.publish(request_id="x" * 129)


def test_publishing_before_registering(client, model):
    with Rank(client, model) as rank, refused(PRECONDITION, "NOT_REGISTERED"):
        rank.publish()


def test_a_rank_that_never_registers(client, model):
    with Rank(client, model, 0, 2) as rank:
        rank.register(shard(client, box=([0, 0], [2, 8])))
        with refused(TOO_LATE, "WORLD_INCOMPLETE", naming="1"):
            rank.publish()


def test_a_rank_that_never_arrives(client, model):
    with Rank(client, model, 0, 2) as first, Rank(client, model, 1, 2) as second:
        first.register(shard(client, box=([0, 0], [2, 8])))
        second.register(shard(client, box=([2, 0], [2, 8])))
        name = first.publish().version_name
        with refused(ABORTED, "GATHER_TIMEOUT", naming="1"):
            client.call("TrainerService.WaitVersion", name=name)
        # The rank that comes too late is told so, and never opens the number alone.
        first.publish()
        with refused(ABORTED, "GATHER_TIMEOUT"):
            second.publish()
        assert client.call(
            "TrainerService.WaitVersion", name=second.publish().version_name
        ).state == 9


def test_a_worker_that_never_acknowledges(client, model):
    with Rank(client, model) as rank:
        rank.register(shard(client))
        with client.worker(model, "r", [wanted(client)]) as worker:
            worker.next_of("registered")
            with client.replica(model, "r") as replica:
                replica.next_of("registered")
                update = rank.publish()
                pause = replica.next_of("pause")
                answer = client.message("ReplicaReport")
                answer.paused.command_id = pause.command_id
                replica.send(answer)
                worker.next_of("apply")

                # It says nothing: its replica is fenced, or lost, with a reason; never resumed.
                def given_up():
                    listed = client.call("AdminService.ListReplicas", parent=f"models/{model}")
                    for one in listed.replicas:
                        if one.state in (7, 8) and one.last_failure.reason:
                            return one
                    return None

                one = cluster.wait_until(given_up, "the worker is still waited for")
                assert one.last_failure.reason in ("APPLY_TIMEOUT", "WORKER_LOST"), one
                assert "within 2s" in one.last_failure.message, one
                assert client.call(
                    "TrainerService.WaitVersion", name=update.version_name
                ).state == 9
                assert "resume" not in [answer.WhichOneof("command") for answer in replica.heard()]


def test_a_replica_that_does_not_pause(client, model):
    with Rank(client, model) as rank:
        rank.register(shard(client))
        with client.worker(model, "r", [wanted(client)]) as worker:
            worker.next_of("registered")
            with client.replica(model, "r") as replica:
                replica.next_of("registered")
                name = rank.publish().version_name
                replica.next_of("pause")
                with refused(ABORTED, "PAUSE_TIMEOUT", naming="r"):
                    client.call("TrainerService.WaitVersion", name=name)


@pytest.mark.parametrize(
    "options, code, reason",
    [
        # STREAM writes into all replicas at once, while they stand still.
        ("update_mode: 2 commit_policy { rolling { max_unavailable: 1 } }", LATER,
         "COMMIT_POLICY_UNIMPLEMENTED"),
        ("update_mode: 2 pause_mode: 4", LATER, "PAUSE_MODE_UNIMPLEMENTED"),
        ("commit_policy { rolling { } }", INVALID, "MAX_UNAVAILABLE_INVALID"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_say_so(client, model, options, code, reason):
    with Rank(client, model) as rank:
        rank.register(shard(client))
        with refused(code, reason):
            rank.publish(options=text_format.Parse(options, client.message("UpdateOptions")))
        # The model goes on.
        assert rank.publish().version == 1


@pytest.mark.parametrize(
    "method, fields, code, reason",
    [
        ("GetModel", {"name": "nonsense"}, INVALID, "RESOURCE_NAME_INVALID"),
        ("GetModel", {"name": "models/none"}, NOT_FOUND, "MODEL_UNKNOWN"),
        ("GetNode", {"name": "nodes/none"}, NOT_FOUND, "NODE_UNKNOWN"),
        ("GetReplica", {"name": "models/bench/replicas/none"}, NOT_FOUND, "REPLICA_UNKNOWN"),
        ("GetVersion", {"name": "models/bench/versions/999999"}, NOT_FOUND, "VERSION_UNKNOWN"),
        ("ListModels", {"page_size": -1}, INVALID, "PAGE_SIZE_INVALID"),
        ("ListNodes", {"page_token": "nonsense"}, INVALID, "PAGE_TOKEN_INVALID"),
    ],
)
def test_questions_that_have_no_answer(client, method, fields, code, reason):
    with refused(code, reason):
        client.call(f"AdminService.{method}", **fields)


def start_daemon(running, *flags):
    """Starts one that should refuse to; returns (exit code, what it said)."""
    directory = running.directory / uuid.uuid4().hex
    directory.mkdir()
    run = subprocess.run(
        [
            str(cluster.DAEMON),
            "--node=second",
            "--listen=127.0.0.1:0",
            f"--state_dir={directory}/state",
            f"--unix_socket={directory}/s.sock",
            *flags,
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )
    return run.returncode, run.stderr


def test_a_second_daemon_on_the_same_socket(running):
    socket = running.nodes[0].socket[len("unix:") :]
    code, said = start_daemon(running, f"--unix_socket={socket}")
    assert code != 0
    assert "SOCKET_IN_USE" in said, said


def test_an_address_for_data_that_no_other_machine_reaches(running):
    code, said = start_daemon(running, "--coordinator_address=192.0.2.4:7670")
    assert code != 0
    assert "ADDRESS_INVALID" in said and "--data_address=127.0.0.1" in said, said


@pytest.mark.parametrize(
    "flag",
    ["--bucket_bytes=0", "--bucket_bytes=-1", f"--bucket_bytes={1 << 50}"],
)
def test_sizes_of_buckets(running, flag):
    code, said = start_daemon(running, flag)
    assert code != 0
    assert "bucket_bytes" in said and ("FLAG_INVALID" in said or "BUCKET_BYTES" in said), said


def test_an_address_for_others_needs_insecure(running):
    code, said = start_daemon(running, "--listen=0.0.0.0:0")
    assert code != 0
    assert "--insecure" in said, said
