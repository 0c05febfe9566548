"""Names in the Python package and in weightsyncctl: rules, and what they check."""

import json
import subprocess
import sys

import numpy
import pytest
import safetensors.numpy
import weightsync
from weightsync import __main__ as command, names
from weightsync.enums import DType
from weightsync.names import Drop, Fuse, Rename, Split, split_gate_up, split_qkv
from weightsync.tensors import Part, Shard, parts_of

import cluster


def parts(**tensors):
    return [part for name, tensor in tensors.items() for part in parts_of(name.replace("__", "."), tensor)]


def assembled(found):
    """name -> the whole tensor, from its boxes; every element must come exactly once."""
    whole, seen = {}, {}
    for part in found:
        array = whole.setdefault(part.name, numpy.zeros(part.shape, part.array.dtype))
        count = seen.setdefault(part.name, numpy.zeros(part.shape, int))
        offset = part.offset or (0,) * len(part.shape)
        box = tuple(slice(o, o + n) for o, n in zip(offset, part.box_extent))
        assert array[box].shape == part.array.shape
        array[box] = part.array
        count[box] += 1
    assert all((count == 1).all() for count in seen.values()), seen
    return whole


def test_rules_are_applied_in_order():
    rules = [
        Rename(r"^transformer\.h\.(\d+)\.", r"model.layers.\1."),
        (r"\.attn\.", ".self_attn."),
        Drop(r"inv_freq$"),
        # On what the first one left.
        Rename(r"^model\.layers\.0\.", "first."),
    ]
    tensors = {
        "transformer.h.0.attn.w": numpy.zeros(1),
        "transformer.h.1.attn.w": numpy.zeros(1),
        "transformer.h.1.inv_freq": numpy.zeros(1),
    }
    found = names.apply(rules, [p for n, t in tensors.items() for p in parts_of(n, t)])
    assert [part.name for part in found] == ["first.self_attn.w", "model.layers.1.self_attn.w"]


@pytest.mark.parametrize(
    "rule, reason",
    [
        (lambda: Rename(r"a(?=b)", ""), "PATTERN_INVALID"),
        (lambda: Rename(r"(a)\1", ""), "PATTERN_INVALID"),
        (lambda: Rename(r"(a", ""), "PATTERN_INVALID"),
        (lambda: Rename(r"(a)", r"\2"), "PATTERN_INVALID"),
        (lambda: Fuse("q|k", ("q", "k"), "qk", (1, 1)), "PATTERN_INVALID"),
        (lambda: Fuse("(q|k)", ("q", "k"), "qk"), "SPLIT_INVALID"),
        (lambda: split_qkv(heads=6, kv_heads=4, head_dim=8), "SPLIT_INVALID"),
        (lambda: Split("w", ("a", "b"), (1,)), "SPLIT_INVALID"),
        (lambda: Split("w", ("a", "b"), (1, 0)), "SPLIT_INVALID"),
    ],
)
def test_rules_are_checked_when_they_are_made(rule, reason):
    with pytest.raises(ValueError) as error:
        rule()
    assert error.value.reason == reason


@pytest.mark.parametrize(
    "rules, reason, what",
    [
        ([Rename("nothing_like_it", "x")], "RULE_UNUSED", "a.w"),
        ([Rename(r"^[ab]\.", "c.")], "DUPLICATE_NAME", "c.w"),
        ([Split("w", ("x", "y"), (3, 3))], "SPLIT_INVALID", "4 rows"),
        ([Split("w", ("x", "y"), dim=2)], "SPLIT_INVALID", "dimension 2"),
        ([Fuse(r"(a|b)\.w", ("a", "c"), "ac.w", (4, 4))], "SPLIT_INVALID", "'b'"),
        ([Fuse(r"(a|b)\.w", ("a", "b"), "ab.w", (4, 5))], "SPLIT_INVALID", "b.w"),
    ],
)
def test_rules_are_checked_against_the_tensors(rules, reason, what):
    with pytest.raises(ValueError, match=what) as error:
        names.apply(rules, parts(a__w=numpy.zeros((4, 2)), b__w=numpy.zeros((4, 2))))
    assert error.value.reason == reason


def test_a_fused_qkv_with_gqa_is_split_into_views():
    heads, kv_heads, dim, hidden = 6, 2, 4, 3
    q, k, v = (
        numpy.random.default_rng(i).random((n * dim, hidden)) for i, n in enumerate((heads, kv_heads, kv_heads))
    )
    fused = numpy.concatenate([q, k, v])
    rule = split_qkv(r"\.qkv\.", heads, kv_heads, dim, names=(".q.", ".k.", ".v."))
    found = names.apply([rule], parts(l__qkv__w=fused))
    whole = assembled(found)
    for name, expected in zip("qkv", (q, k, v)):
        assert numpy.array_equal(whole[f"l.{name}.w"], expected)
    assert all(part.array.base is not None and numpy.shares_memory(part.array, fused) for part in found)
    assert found[0].offset is None, "a part that is whole says so"
    # Megatron's order: each key/value head behind its query heads.
    groups = [
        part.reshape(kv_heads, -1, hidden)[group]
        for group in range(kv_heads)
        for part in (q, k, v)
    ]
    interleaved = split_qkv(r"\.qkv\.", heads, kv_heads, dim, (".q.", ".k.", ".v."), interleaved=True)
    whole = assembled(names.apply([interleaved], parts(l__qkv__w=numpy.concatenate(groups))))
    for name, expected in zip("qkv", (q, k, v)):
        assert numpy.array_equal(whole[f"l.{name}.w"], expected)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("interleaved", [False, True])
def test_shards_are_split_where_they_are(ranks, interleaved):
    """Each rank has some rows of the fused tensor (or none), and gives the boxes that they are."""
    heads, kv_heads, dim, hidden = 4, 2, 2, 3
    rows = (heads + 2 * kv_heads) * dim
    fused = numpy.arange(rows * hidden).reshape(rows, hidden)
    rule = split_qkv("qkv", heads, kv_heads, dim, ("q", "k", "v"), interleaved)
    whole = assembled(names.apply([rule], parts(qkv=fused)))
    size = -(-rows // ranks)
    found = []
    for rank in range(ranks):
        mine = fused[rank * size : (rank + 1) * size]
        found += names.apply([rule], parts_of("qkv", Shard(mine, (rank * size, 0), fused.shape)))
    again = assembled(found)
    assert again.keys() == whole.keys()
    assert all(numpy.array_equal(again[name], whole[name]) for name in whole)


def test_gate_up():
    fused = numpy.arange(24).reshape(8, 3)
    whole = assembled(names.apply([split_gate_up()], parts(m__gate_up_proj__w=fused)))
    assert numpy.array_equal(whole["m.gate_proj.w"], fused[:4])
    assert numpy.array_equal(whole["m.up_proj.w"], fused[4:])


@pytest.mark.parametrize("groups", [1, 2])
def test_what_is_split_can_be_fused_again(groups):
    fused = numpy.arange(48).reshape(16, 3)
    split = Split(r"qkv", ("q_proj", "k_proj", "v_proj"), (8 // groups, 4 // groups, 4 // groups), groups)
    apart = names.apply([split], parts(a__qkv__w=fused))
    fuse = Fuse(
        r"(q|k|v)_proj", ("q", "k", "v"), "qkv", (8 // groups, 4 // groups, 4 // groups), groups
    )
    whole = assembled(names.apply([fuse], apart))
    assert numpy.array_equal(whole["a.qkv.w"], fused)


def test_leftovers():
    assert names.leftovers(["a", "b"], ["b", "c"]) == (["a"], ["c"])


def test_a_part_describes_what_must_stay():
    part = parts(w=numpy.zeros((4, 2), numpy.float32))[0]
    assert isinstance(part, Part)
    other = parts(w=numpy.zeros((4, 2), numpy.float64))[0]
    assert part.describe() != other.describe()
    assert part.size_bytes == 32 and part.span_bytes() == 32


# ---- python -m weightsync names ----


@pytest.fixture
def files(tmp_path):
    """A trainer's checkpoint in two files with an index, and an engine's in one."""
    trainer = {
        "h.0.qkv.weight": numpy.zeros((8, 2), numpy.float32),
        "h.0.rope": numpy.zeros((3,), numpy.float32),
        "h.0.extra": numpy.zeros((3,), numpy.float32),
        "h.0.same": numpy.zeros((3,), numpy.float32),
    }
    engine = {
        "layers.0.q.weight": numpy.zeros((4, 2), numpy.float32),
        "layers.0.k.weight": numpy.zeros((2, 2), numpy.float32),
        "layers.0.v.weight": numpy.zeros((2, 2), numpy.float16),
        "layers.0.bias": numpy.zeros((3,), numpy.float32),
        "layers.0.same": numpy.zeros((3,), numpy.float32),
    }
    names_of = {}
    for i, name in enumerate(trainer):
        file = f"model-{i % 2}.safetensors"
        names_of[name] = file
    for file in set(names_of.values()):
        safetensors.numpy.save_file({n: trainer[n] for n in trainer if names_of[n] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names_of}))
    safetensors.numpy.save_file(engine, tmp_path / "engine.safetensors")
    rules = tmp_path / "rules.json"
    rules.write_text(
        json.dumps(
            [
                {"rename": [r"^h\.", "layers."]},
                {"drop": "rope$"},
                {"split": {"pattern": "qkv", "names": ["q", "k", "v"], "sizes": [4, 2, 2]}},
            ]
        )
    )
    return index, tmp_path / "engine.safetensors", rules


def run_names(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "weightsync", "names", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


def test_the_mapping_is_shown(files):
    index, engine, rules = files
    done = run_names(index, engine, "--rules", rules)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert "h.0.qkv.weight  layers.0.k.weight" in lines
    sections = done.stdout.split("\n\n")[1:]
    assert [section.splitlines()[0] for section in sections] == [
        "dropped by a rule: 1",
        "only the trainer has: 1",
        "only the engine has: 1",
        "differ in shape or type (trainer and engine): 1",
    ]
    assert "layers.0.extra" in sections[1] and "layers.0.bias" in sections[2]
    assert "layers.0.v.weight: F32 [2, 2] and F16 [2, 2]" in sections[3]
    found = json.loads(run_names(index, engine, "--rules", rules, "--json").stdout)
    assert found["only_trainer"] == ["layers.0.extra"]
    assert run_names(engine, engine).returncode == 0


@pytest.mark.parametrize(
    "case", json.loads((cluster.ROOT / "client/ctl/testdata/names_cases.json").read_text()), ids=lambda case: case["name"]
)
def test_what_weightsyncctl_says_is_said_here(case):
    """client/ctl/mapping_test.cc holds `weightsyncctl names` to the same cases."""

    def side(rows):
        return {name: (tuple(shape), DType[dtype]) for name, dtype, shape in rows}

    try:
        found = command.compare(
            side(case["trainer"]), side(case["engine"]), [command.make_rule(rule) for rule in case["rules"]]
        )
    except weightsync.WeightsyncError as error:
        # What RE2 has and Python's expressions have not is refused here alone.
        assert error.reason == case.get("error", case.get("python_error")), error
    else:
        assert "error" not in case and "python_error" not in case
        assert command.render(found) == case["text"] and json.loads(json.dumps(found)) == case["json"]


def test_both_commands_print_the_same(files, tmp_path):
    index, engine, rules = files
    for arguments in [(index, engine), (index, engine, "--rules", rules), (index, index), (engine, index, "--json")]:
        ours = run_names(*arguments)
        theirs = subprocess.run([cluster.CTL, "names", *arguments], capture_output=True, text=True, timeout=60)
        assert (theirs.returncode, theirs.stdout) == (ours.returncode, ours.stdout), theirs.stderr


def test_names_of_a_model_and_of_a_replica(tmp_path):
    """What trainers registered, and what workers take, as well as files."""
    with cluster.Cluster() as here:
        address = here.nodes[0].listen
        given = {"a.weight": numpy.zeros((4, 2), numpy.float32), "b": numpy.zeros((3,), numpy.float32)}
        live = {"a.weight": numpy.zeros((4, 2), numpy.float32)}
        with weightsync.Trainer("m", address=address) as trainer, weightsync.Worker(
            "m", "r", live, address=address, partial=True
        ) as worker:
            trainer.register(given)
            worker.wait_registered()

            def said(*arguments):
                return subprocess.run(
                    [cluster.CTL, "names", *arguments, "--address", address, "--json"],
                    capture_output=True, text=True, timeout=60,
                )

            done = said("models/m", "models/m/replicas/r")
            found = json.loads(done.stdout)
            assert done.returncode == 1 and found["only_trainer"] == ["b"] and not found["differ"]
            safetensors.numpy.save_file(given, tmp_path / "given.safetensors")
            assert said(tmp_path / "given.safetensors", "models/m").returncode == 0
            assert said("models/m", "models/nowhere").returncode == 4


@pytest.mark.parametrize(
    "rules, sentence",
    [
        ('[{"rename": ["nowhere", "x"]}]', "RULE_UNUSED"),
        ('[{"turn": 1}]', "is no rule"),
        ('[{"split": {"pattern": "q"}}]', "names"),
        ("[", "Expecting"),
    ],
)
def test_bad_rules_are_said(files, tmp_path, rules, sentence):
    bad = tmp_path / "bad.json"
    bad.write_text(rules)
    done = run_names(files[0], files[1], "--rules", bad)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr


@pytest.mark.parametrize(
    "data",
    [b"", b"1234567", (1 << 40).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]", b"\2" + bytes(7) + b"{"],
)
def test_bad_files_are_said(files, tmp_path, data):
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(data)
    done = run_names(bad, files[1])
    assert done.returncode == 2 and "FILE_INVALID" in done.stderr, done.stderr
    index = tmp_path / "evil.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "../../etc/passwd"}}))
    done = run_names(index, files[1])
    assert done.returncode == 2 and "does not lie beside it" in done.stderr
