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
# Of the prefix cache on a CPU.
BLOCK = 128
# Longer than two blocks, and equal for that long.
PROMPTS = [[(7 * i) % 499 + 1 for i in range(2 * BLOCK + 40)] + [tail] for tail in (3, 400, 77)]
# Shares no block with them.
RUNNING = [(11 * i) % 487 + 5 for i in range(BLOCK + 10)]
# Far more than are made until the pause comes.
RUNNING_TOKENS = 350


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
        max_model_len=512,
        max_num_seqs=4,
        seed=0,
        **more,
    )


def sampling(tokens=TOKENS):
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, detokenize=False)


def fresh(checkpoint):
    from vllm import LLM, TokensPrompt

    engine = LLM(**arguments(checkpoint))
    # One at a time, as the other engine is asked.
    outputs = [
        engine.generate([TokensPrompt(prompt_token_ids=prompt)], sampling(), use_tqdm=False)[0] for prompt in PROMPTS
    ]
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    # vLLM prints, too.
    print("answers", json.dumps(answers), flush=True)


async def generate(engine, prompt, name, tokens=TOKENS, began=None):
    from vllm import TokensPrompt

    last = None
    async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), sampling(tokens), name):
        last = output
        if began is not None:
            began.set()
    return last


async def ask(engine, name):
    """The answers; the cache has nothing for the first prompt, and what that one left for the others."""
    answers = []
    for i, prompt in enumerate(PROMPTS):
        last = await generate(engine, prompt, f"{name}-{i}")
        cached = last.num_cached_tokens
        if i == 0:
            assert cached == 0, f"{name}: {cached} tokens of the prefix are from before"
        else:
            assert cached >= 2 * BLOCK, f"{name}: {cached} tokens cached: without a prefix cache this tests nothing"
        answers.append(list(last.outputs[0].token_ids))
    # And the first one again, before the next switch: it is in the cache.
    again = await generate(engine, PROMPTS[0], f"{name}-again")
    assert again.num_cached_tokens >= 2 * BLOCK, again.num_cached_tokens
    return answers


async def served(checkpoint, models, address):
    """What one engine answers with the version that it loaded, and after each update."""
    import weightsync
    import weightsync.vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    class Controller(weightsync.vllm.Controller):
        running = None

        async def pause(self, request):
            assert not self.running.done(), "the request has ended: this tests no pause"
            return await super().pause(request)

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**arguments(checkpoint, worker_extension_cls="failing_extension.FailingExtension"))
    )
    found = [await ask(engine, "v0")]
    controller = Controller(engine, "tiny", "vllm", address=address)
    with weightsync.Trainer("tiny", address=address) as trainer:
        trainer.register(models[1])
        await controller.start()
        for version, mode in zip(range(1, VERSIONS), ("drain", "keep")):
            # In flight while the version comes: it must end, whatever it says.
            began = asyncio.Event()
            running = asyncio.create_task(generate(engine, RUNNING, f"running-{version}", RUNNING_TOKENS, began))
            controller.running = running
            await began.wait()
            # The first attempt ends with half of a layer; the update is applied again.
            await engine.collective_rpc("weightsync_test_fail_once")
            update = trainer.publish(tensors=models[version], pause_mode=mode)
            result = await asyncio.to_thread(update.wait, 120)
            found.append(await ask(engine, f"v{version}"))
            assert len((await running).outputs[0].token_ids) == RUNNING_TOKENS
            assert await engine.collective_rpc("weightsync_test_failures") == [1]
            print(
                f"version {result.version} ({mode}): stall {result.stall_seconds * 1e3:.1f} ms, "
                f"pause {result.pause_seconds * 1e3:.1f} ms",
                flush=True,
            )
        assert await engine.collective_rpc("weightsync_version") == [VERSIONS - 1]
        await controller.stop()
    engine.shutdown()
    return found


async def transferred(checkpoint, models, address):
    """The same by vLLM's own interface for weight transfer, whose sessions vLLM's worker runs."""
    import weightsync
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            **arguments(checkpoint, weight_transfer_config=WeightTransferConfig(backend="weightsync"))
        )
    )
    found = [await ask(engine, "t0")]
    replica = weightsync.Replica("moved", "vllm", address=address)
    with weightsync.Trainer("moved", address=address) as trainer:
        trainer.register(models[1])
        info = dict(model="moved", replica="vllm", incarnation=replica.incarnation, workers=1, address=address)
        await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        for version in range(1, VERSIONS):
            await engine.pause_generation(mode="wait")
            await engine.start_weight_update()
            update = trainer.publish(tensors=models[version])
            await engine.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
            await engine.finish_weight_update(weight_version=str(version))
            assert await engine.reset_prefix_cache() is not False
            await engine.resume_generation()
            assert await engine.get_weight_version() == str(version)
            await asyncio.to_thread(update.wait, 120)
            found.append(await ask(engine, f"t{version}"))
        await engine.shutdown_weight_transfer_engine()
    await asyncio.to_thread(replica.close)
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
        address = here.nodes[0].socket
        found = asyncio.run(served(checkpoints[0], models, address))
        moved = asyncio.run(transferred(checkpoints[0], models, address))
        for version, checkpoint in enumerate(checkpoints):
            said = subprocess.run(
                [sys.executable, __file__, "fresh", checkpoint], check=True, stdout=subprocess.PIPE, timeout=600
            ).stdout
            (line,) = [line for line in said.decode().splitlines() if line.startswith("answers ")]
            expected = json.loads(line.partition(" ")[2])
            for name, answers in ("WorkerExtension", found), ("TransferEngine", moved):
                assert answers[version] == expected, f"{name}, version {version}:\n{answers[version]}\n{expected}"
            assert all(len(answer) == TOKENS for answer in expected)
        assert len({json.dumps(answers) for answers in found}) == VERSIONS, "the versions answer alike: this tests nothing"
    print(f"OK: {VERSIONS} versions, {len(PROMPTS)} prompts each, all tokens equal to those of fresh engines")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "fresh":
        fresh(sys.argv[2])
    else:
        main()
