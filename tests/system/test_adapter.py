"""LoRA for real: vLLM swaps adapters under running requests, DeepSpeed trains them at every stage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from cusearch_async.config import STARTER, LoraConfig, load_config
from cusearch_async.config.engines import VLLM_REFUSED, VllmConfig
from cusearch_async.errors import ConfigError, WeightsMismatch
from cusearch_async.learner.adapter import Adapter
from cusearch_async.lifecycle.placement import configure_process
from cusearch_async.weights.folder import WeightStore
from cusearch_async.weights.interface import Canary
from tests.system.test_engine import STOPS, logprobs_of, small_model, with_engine

pytestmark = pytest.mark.system


def adapted(base: Any, seed: int, size: float, targets: tuple[str, ...] = ("all-linear",)) -> tuple[Any, Adapter]:
    """A copy of `base` with an adapter whose B is of `size`, and that adapter."""
    model = type(base)(base.config)
    model.load_state_dict(base.state_dict())
    adapter = Adapter.into(model.eval(), LoraConfig(rank=8, alpha=64, targets=targets), str(STARTER), seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=size, generator=torch.Generator().manual_seed(seed)) if size else None
    return model, adapter


def merged(base: Any, model: Any, adapter: Adapter) -> Any:
    """A model without an adapter that has the merged weights."""
    plain = type(base)(base.config).eval()
    plain.load_state_dict(adapter.merged(dict(model.named_parameters())), strict=not base.config.tie_word_embeddings)
    return plain


def publish(store: WeightStore, model: Any, adapter: Adapter, version: int, text: list[int], shift: float = 0) -> str:
    tensors = adapter.by_peft_names({name: p.detach() for name, p in model.named_parameters()})
    canary = Canary(text, [value + shift for value in logprobs_of(model, text)], 1e-3)
    return store.publish(version, 1, tensors, canary, adapter=adapter.config)


@pytest.fixture
def adapter_config(atlas_config: Path, tmp_path: Path) -> Path:
    path = tmp_path / "adapter.toml"
    path.write_text(atlas_config.read_text() + "\n[learner.lora]\nrank = 8\nalpha = 64\n")
    return path


@pytest.mark.parametrize(
    ("tied", "targets"),
    [(False, ("all-linear",)), pytest.param(True, ("q_proj", "v_proj", "down_proj"), marks=pytest.mark.slow)],
)
def test_an_adapter_is_swapped_under_running_requests(tied, targets, adapter_config, tmp_path):
    """The first version computes as the model alone. After each swap tokens have the new version, and the
    log-probabilities that a model with the new weights gives them after the same tokens: nothing old is left in the
    KV cache."""
    store, base = WeightStore(tmp_path / "store"), small_model(tied, 0)
    none, old, new = (adapted(base, seed, size, targets) for seed, size in ((1, 0.0), (2, 0.05), (3, 0.05)))

    async def body(engine: Any, text: list[int]) -> None:
        np.testing.assert_allclose(await engine.score(text), logprobs_of(base, text), atol=1e-3)
        await engine.load(store, publish(store, *none, 0, text), check=True)
        np.testing.assert_allclose(await engine.score(text), logprobs_of(base, text), atol=1e-3)
        await engine.load(store, publish(store, *old, 1, text), check=True)
        newer = publish(store, *new, 2, text)
        long = (text * 20)[:200]
        await engine.generate(long, 8, 1.0, 5, STOPS)
        turns = [asyncio.create_task(engine.generate([*text, i], 80, 1.0, i, STOPS)) for i in range(16)]
        await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
        await engine.load(store, newer, check=True)
        await asyncio.gather(*turns)
        again = await engine.generate(long, 8, 1.0, 5, STOPS)
        assert set(again.versions.tolist()) == {2}
        plain = {1: merged(base, *old), 2: merged(base, *new)}
        of_new = logprobs_of(plain[2], [*long, *again.token_ids])[len(long) - 1 :]
        np.testing.assert_allclose(again.logprobs, of_new, atol=1e-3, err_msg="its prefix was in the cache")
        crossing = 0
        for number, turn in enumerate([await turn for turn in turns]):
            assert list(turn.versions) == sorted(turn.versions)
            crossing += len(set(turn.versions.tolist())) == 2
            ids = [*text, number, *turn.token_ids]
            expected = {version: np.array(logprobs_of(model, ids))[len(text) :] for version, model in plain.items()}
            for version, logprobs in expected.items():
                own = turn.versions == version
                np.testing.assert_allclose(turn.logprobs[own], logprobs[own], atol=1e-3)
            assert np.abs(expected[1] - expected[2]).mean() > 0.05, "the versions differ"
        assert crossing, "some turns saw both versions"
        with pytest.raises(WeightsMismatch, match="differ from the learner's by"):
            await engine.load(store, publish(store, *old, 3, text, shift=0.01), check=True)

    with_engine(adapter_config, tmp_path, base, body)


@pytest.mark.slow  # test_engine has the same of whole weights
def test_without_recomputing_new_turns_never_use_what_an_older_adapter_has_cached(adapter_config, tmp_path):
    store, base = WeightStore(tmp_path / "store"), small_model(True, 0)
    old, new = (adapted(base, seed, 0.05) for seed in (2, 3))

    async def body(engine: Any, text: list[int]) -> None:
        text = text * 20
        await engine.load(store, publish(store, *old, 0, text), check=True)
        newer = publish(store, *new, 1, text)
        turns = [asyncio.create_task(engine.generate([*text, i], 80, 1.0, i, STOPS)) for i in range(16)]
        await asyncio.wait(turns, return_when=asyncio.FIRST_COMPLETED)
        await engine.load(store, newer, check=True)
        await asyncio.gather(*turns)
        again = await engine.generate([*text, 0], 8, 1.0, 5, STOPS)
        assert set(again.versions.tolist()) == {1}
        expected = logprobs_of(merged(base, *new), [*text, 0, *again.token_ids])[len(text) :]
        np.testing.assert_allclose(again.logprobs, expected, atol=1e-3)

    with_engine(adapter_config, tmp_path, base, body, "--rollout.recompute_kv", "false")


@pytest.mark.parametrize(("rank", "largest"), [(1, 1), (8, 8), (9, 16), (32, 32), (200, 256), (512, 512)])
def test_an_engine_has_room_for_one_adapter_of_the_rank(rank, largest, atlas_config):
    configure_process([])
    from vllm.config.lora import MaxLoRARanks

    from cusearch_async.rollout import engine

    arguments = engine.engine_arguments("m", load_config(atlas_config, ["--learner.lora.rank", str(rank)]), is_cpu=True)
    names = ("enable_lora", "max_loras", "max_lora_rank")
    assert [arguments[name] for name in names] == [True, 1, largest]
    assert "enable_lora" not in engine.engine_arguments("m", load_config(atlas_config), is_cpu=True)
    assert get_args(MaxLoRARanks) == engine.ADAPTER_RANKS


def test_an_engine_adapts_the_layers_that_the_learner_names(atlas_config):
    """It had room for an adapter in every layer, experts included, and computed it for each token."""
    configure_process([])
    from cusearch_async.rollout import engine

    adapted = ["--learner.lora.rank", "8"]
    some = load_config(atlas_config, [*adapted, "--learner.lora.targets", "q_proj,v_proj"])
    assert engine.engine_arguments("m", some, is_cpu=True)["lora_target_modules"] == ["q_proj", "v_proj"]
    whole = engine.engine_arguments("m", load_config(atlas_config, adapted), is_cpu=True)
    assert "lora_target_modules" not in whole


def test_a_batch_on_a_cpu_has_room_for_a_token_of_each_request(atlas_config):
    configure_process([])
    from cusearch_async.rollout import engine

    config = load_config(atlas_config, ["--rollout.max_num_seqs", "100000"])
    assert engine.engine_arguments("m", config, is_cpu=True)["max_num_batched_tokens"] == 100_000


def test_a_float32_adapter_on_a_gpu_is_refused(atlas_config):
    configure_process([])
    from cusearch_async.rollout import engine

    with pytest.raises(ConfigError, match=r"learner.lora needs model.dtype = 'bfloat16' on a GPU"):
        engine.engine_arguments("m", load_config(atlas_config, ["--learner.lora.rank", "8"]), is_cpu=False)


def test_what_the_run_sets_for_vllm_cannot_be_set(atlas_config):
    """`tokenizer_mode` was taken, and overwritten."""
    configure_process([])
    from cusearch_async.rollout import engine

    set_here = {"model", "dtype"}
    for rank, is_cpu in ((0, True), (8, True), (0, False)):
        config = load_config(atlas_config, ["--learner.lora.rank", str(rank)])
        set_here |= engine.engine_arguments("m", config, is_cpu).keys()
    defaults = {"enable_prefix_caching", "use_tqdm_on_load"}
    assert set_here - VllmConfig.model_fields.keys() - VLLM_REFUSED.keys() == defaults


def test_a_target_that_the_model_does_not_have_is_named():
    for targets, known in ((("q_proj", "c_attn"), "down_proj, gate_proj"), (("mlp",), "down_proj")):
        with pytest.raises(ConfigError, match=f"no linear layer {targets[-1]!r}; it has {known}"):
            adapted(small_model(False, 0), 1, 0.0, targets)
