"""What tests/engines/vllm_cpu.sh runs in its virtual environment; see there.

  vllm_cpu.py                    the test
  vllm_cpu.py fresh CHECKPOINT   what a fresh engine answers, as JSON
"""

import asyncio
import json
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
VERSIONS = 3
TOKENS = 24
# Longer than several blocks of the prefix cache, and equal for a long way.
PROMPTS = [[(7 * i) % 499 + 1 for i in range(150)] + [tail] for tail in (3, 400, 77)]


def make_model(version):
    import torch
    import transformers

    torch.manual_seed(version)
    config = transformers.Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    # Sharper than at the start of training: tokens that weights decide and not rounding.
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.dim() > 1 else 1
    return model


def arguments(checkpoint, **more):
    return dict(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=4,
        seed=0,
        **more,
    )


def sampling():
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=TOKENS, min_tokens=TOKENS, detokenize=False)


def fresh(checkpoint):
    from vllm import LLM, TokensPrompt

    engine = LLM(**arguments(checkpoint))
    # One at a time, as the other engine is asked.
    answers = [
        list(engine.generate([TokensPrompt(prompt_token_ids=prompt)], sampling(), use_tqdm=False)[0].outputs[0].token_ids)
        for prompt in PROMPTS
    ]
    # vLLM prints, too.
    print("answers", json.dumps(answers), flush=True)


async def ask(engine, name):
    from vllm import TokensPrompt

    answers = []
    for i, prompt in enumerate(PROMPTS):
        last = None
        async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), sampling(), f"{name}-{i}"):
            last = output
        answers.append(list(last.outputs[0].token_ids))
    return answers


async def served(checkpoint, models, address):
    """What one engine answers with the version that it loaded, and after each update."""
    import weightsync
    import weightsync.vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**arguments(checkpoint, worker_extension_cls="weightsync.vllm.WorkerExtension"))
    )
    found = [await ask(engine, "v0")]
    controller = weightsync.vllm.Controller(engine, "tiny", "vllm", address=address)
    with weightsync.Trainer("tiny", address=address) as trainer:
        trainer.register(models[1])
        await controller.start()
        for version, mode in zip(range(1, VERSIONS), ("drain", "keep")):
            # In flight while the version comes: they must end, whatever they say.
            running = asyncio.create_task(ask(engine, f"running-{version}"))
            await asyncio.sleep(0.05)
            update = trainer.publish(tensors=models[version], pause_mode=mode)
            result = await asyncio.to_thread(update.wait, 120)
            found.append(await ask(engine, f"v{version}"))
            await running
            print(
                f"version {result.version} ({mode}): stall {result.stall_seconds * 1e3:.1f} ms, "
                f"pause {result.pause_seconds * 1e3:.1f} ms",
                flush=True,
            )
        assert await engine.collective_rpc("weightsync_version") == [VERSIONS - 1]
        await controller.stop()
    engine.shutdown()
    return found


def check_transfer_engine():
    """The backend for weight transfer fits this release: nothing abstract is left, and it is registered."""
    import weightsync.vllm
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    engine = weightsync.vllm.TransferEngine
    assert issubclass(engine, WeightTransferEngine) and not engine.__abstractmethods__
    weightsync.vllm.register()
    assert "weightsync" in WeightTransferEngineFactory._registry


def main():
    sys.path.insert(0, str(ROOT / "tests/python"))
    import cluster
    import vllm

    print(f"vLLM {vllm.__version__}", flush=True)
    check_transfer_engine()
    with tempfile.TemporaryDirectory() as scratch, cluster.Cluster() as here:
        models = [make_model(version) for version in range(VERSIONS)]
        checkpoints = [pathlib.Path(scratch, f"v{version}") for version in range(VERSIONS)]
        for model, checkpoint in zip(models, checkpoints):
            model.save_pretrained(checkpoint)
        found = asyncio.run(served(checkpoints[0], models, here.nodes[0].socket))
        for version, checkpoint in enumerate(checkpoints):
            said = subprocess.run(
                [sys.executable, __file__, "fresh", checkpoint], check=True, stdout=subprocess.PIPE, timeout=600
            ).stdout
            (line,) = [line for line in said.decode().splitlines() if line.startswith("answers ")]
            expected = json.loads(line.partition(" ")[2])
            assert found[version] == expected, f"version {version}:\n{found[version]}\n{expected}"
            assert all(len(answer) == TOKENS for answer in expected)
        assert len({json.dumps(answers) for answers in found}) == VERSIONS, "the versions answer alike: this tests nothing"
    print(f"OK: {VERSIONS} versions, {len(PROMPTS)} prompts each, all tokens equal to those of fresh engines")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "fresh":
        fresh(sys.argv[2])
    else:
        main()
