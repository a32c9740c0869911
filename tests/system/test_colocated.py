"""Learner and engines that have the same GPUs in turn; on a CPU, where sleeping frees nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from cusearch_async.config import STARTER, load_config
from cusearch_async.errors import EngineDied
from cusearch_async.lifecycle.gpu_share import GpuLock
from cusearch_async.lifecycle.placement import configure_process
from cusearch_async.run import folder as run_folder
from tests.conftest import wait_until
from tests.system.conftest import Run, finish
from tests.system.forked import forked_engines
from tests.system.test_learner import train

pytestmark = pytest.mark.system

LORA = ("--learner.lora.rank", "4")


@pytest.mark.parametrize(
    ("ranks", "stage", "dtype", "lora"),
    [
        pytest.param(1, 1, "float32", (), marks=pytest.mark.slow),
        (2, 1, "bfloat16", ()),
        pytest.param(2, 2, "float32", (), marks=pytest.mark.slow),
        (1, 1, "float32", LORA),
        pytest.param(2, 2, "bfloat16", LORA, marks=pytest.mark.slow),
    ],
)
def test_a_learner_that_was_offloaded_makes_the_same_updates_bit_for_bit(tmp_path, ranks, stage, dtype, lora):
    settings = ("--learner.zero_stage", str(stage), "--model.dtype", dtype, "--learner.reference", "cpu", *lora)
    stayed = train(tmp_path, "stayed", "--save", str(tmp_path / "a"), ranks=ranks, settings=settings)
    moved = train(tmp_path, "moved", "--offload", "--save", str(tmp_path / "b"), ranks=ranks, settings=settings)
    assert stayed.keys() == moved.keys()
    assert all(torch.equal(stayed[name], moved[name]) for name in stayed)
    saved = sorted((tmp_path / "a" / "deepspeed").iterdir())
    assert len(saved) == ranks
    for path in saved:
        held, of_moved = load_file(path), load_file(tmp_path / "b" / "deepspeed" / path.name)
        assert held.keys() == of_moved.keys()
        assert all(torch.equal(held[name], of_moved[name]) for name in held), path.name


async def test_an_engine_that_cannot_wake_up_has_died(monkeypatch):
    """vLLM gives the error of its process without a type, which cost every ticket in flight an attempt."""
    configure_process([])
    from cusearch_async.rollout.engine import Engine

    async def fail() -> None:
        raise Exception("Call to wake_up method failed: CUDA error: out of memory\nand more")

    engine = Engine.__new__(Engine)
    engine._llm = SimpleNamespace(wake_up=fail)
    with pytest.raises(EngineDied, match=r"^the vLLM engine cannot wake up: Call to wake_up .*: out of memory$"):
        await engine._wake_up()


@pytest.mark.slow
async def test_an_engine_sleeps_until_it_is_needed_and_the_gpus_are_free(tmp_path):
    from cusearch_async.rollout.engine import Engine

    path = Path(__file__).parents[2] / "configs" / "atlas.toml"
    config = load_config(path, ["--rollout.max_num_seqs", "4", "--run.folder", str(tmp_path)])
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    prompt = tokenizer("Which river", add_special_tokens=False)["input_ids"]
    lock, learner = GpuLock(tmp_path, "engine", 60), GpuLock(tmp_path, "learner", 60)
    await lock.take()
    with forked_engines():
        engine = Engine.start(str(STARTER), tokenizer, config, lock)
    try:

        async def generate():
            async with engine.active():
                return await engine.generate(prompt, 8, 1.0, 5, ["</answer>"])

        first = await generate()
        await learner.take()
        assert await engine._llm.is_sleeping()
        playing = asyncio.create_task(generate())
        for _ in range(20):
            await asyncio.sleep(0)
        assert await engine._llm.is_sleeping(), "the learner has the GPUs"
        assert not playing.done()
        learner.release()
        again = await playing
        assert (again.token_ids, again.logprobs.tolist()) == (first.token_ids, first.logprobs.tolist())
        await learner.take()
        assert await engine._llm.is_sleeping()
    finally:
        engine.close()


@pytest.mark.long
def test_a_run_takes_turns_from_its_start_to_its_end(run: Run):
    """Before anything is loaded, learner and worker wait for each other, here for this test in their place."""
    run_folder.mark(run.folder, "atlas")
    learner = GpuLock(run.folder, "learner", 60)
    asyncio.run(learner.take())
    settings = {"run__colocate": "true", "learner__reference": "cpu", "pool__max_staleness": 1, "eval__every": 3}
    launched = run.cusearch("launch", run__steps=3, **settings)
    for process, others in (("rollout-0", "the learner"), ("learner", "the engines")):
        waits = f"waiting for {others} to give back the GPUs: 5 s"
        wait_until(lambda process=process, waits=waits: waits in run.log(process) or launched.poll() is not None, 120)
        assert launched.poll() is None, finish(launched)
    assert "waiting for vLLM" not in run.log("rollout-0")
    assert "to be loaded" not in run.log("learner")
    learner.release()
    status, output = finish(launched)
    assert status == 0, output
    assert [row["step"] for row in run.metrics()] == [0, 1, 2]
    assert max(row["staleness/max"] for row in run.metrics()) <= 1
    assert "loaded weights v000002-e1" in run.log("rollout-0")
    assert "version 3: EM" in run.log("evaluator")
