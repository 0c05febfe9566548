"""Checkpoints as transformers reads and writes them: what weightsync saves, AutoModelForCausalLM loads equal; what
save_pretrained writes, in several files with their index, weightsync loads and a worker serves."""

import json
import os
import subprocess

import pytest
import torch

# Nothing is fetched.
os.environ["HF_HUB_OFFLINE"] = "1"

import transformers  # noqa: E402
import weightsync  # noqa: E402

import cluster  # noqa: E402

pytestmark = pytest.mark.slow  # transformers takes its time to be imported


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def daemons(root):
    with cluster.Cluster(nodes=2, flags=("--store_budget_bytes=500000000", f"--checkpoint_root={root}")) as here:
        yield here


def tiny(seed, tied=False):
    """A random model of two layers."""
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def answers(model):
    with torch.no_grad():
        return model(torch.arange(12).reshape(1, 12)).logits


def assert_equal(left, right):
    ours, theirs = left.state_dict(), right.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    assert torch.equal(answers(left), answers(right))


def ctl(daemons, *words):
    done = subprocess.run(
        [cluster.CTL, *words, "--json", f"--address={daemons.nodes[0].socket}", "--timeout=60s"],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_loads_what_is_saved(daemons, root, tied):
    name = "tied" if tied else "untied"
    trained, served = tiny(1, tied), tiny(2, tied)
    trained.config.save_pretrained(root / f"{name}-template")
    with weightsync.Worker(name, "r", served, address=daemons.nodes[1].socket) as worker:
        worker.wait_registered()
        with weightsync.Trainer(name, address=daemons.nodes[0].socket) as trainer:
            trainer.register(trained)
            trainer.publish().wait(60)
        assert_equal(trained, served)
        for shard_bytes in (4096, 1 << 30):
            saved = ctl(
                daemons,
                "save",
                f"{name}/1",
                f"{name}-{shard_bytes}",
                f"--template={name}-template",
                f"--max_shard_bytes={shard_bytes}",
            )
            path = root / f"{name}-{shard_bytes}"
            assert (saved["shardCount"] > 1) == (path / "model.safetensors.index.json").exists() == (
                shard_bytes == 4096
            )
            loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype="auto", output_loading_info=True
            )
            assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
            assert_equal(trained, loaded.eval())


def test_what_transformers_saves_is_loaded_and_served(daemons, root):
    trained, served = tiny(3), tiny(4)
    trained.save_pretrained(root / "theirs", max_shard_size="5KB")
    assert (root / "theirs/model.safetensors.index.json").exists()
    with weightsync.Worker("theirs", "r", served, address=daemons.nodes[1].socket) as worker:
        worker.wait_registered()
        assert ctl(daemons, "load", "theirs", "theirs")["state"] == "STATE_ACTIVE"
        assert_equal(trained, served)
        # A directory that transformers wrote is replaced at once.
        ctl(daemons, "save", "theirs/latest", "theirs", "--overwrite", "--template=theirs")
    assert_equal(trained, transformers.AutoModelForCausalLM.from_pretrained(root / "theirs", dtype="auto").eval())
