"""Engines of other models than the starter: they have all that the learner publishes, and turns end at their tags."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cusearch_async.config import STARTER, load_config
from cusearch_async.errors import ConfigError
from cusearch_async.learner.batching import collate
from cusearch_async.learner.model import (
    SampledLogprobs,
    as_in_files,
    load_causal_lm,
    recompute_layers,
    save_model,
    saved_tensors,
    tied_names,
)
from cusearch_async.learner.suitability import refuse_unsuitable_policy
from cusearch_async.lifecycle.placement import configure_process
from cusearch_async.weights.folder import WeightStore
from cusearch_async.weights.interface import Canary
from tests.strategies import make_trajectory
from tests.system.forked import forked_engines
from tests.system.model_kinds import KINDS, SIZES, Kind
from tests.system.test_engine import STOPS, with_engine

pytestmark = pytest.mark.system

EVERY_TIME = ("Qwen2.5", "Qwen3 MoE")
"""Each unlike the others in its layers or the names in its files."""


def shaken(model: Any, seed: int) -> None:
    """Other weights, far from uniform, and other routing biases."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, tensor in saved_tensors(model):
            if tensor.dim() > 1 or tensor.shape == (8,):
                tensor.copy_(torch.randn(tensor.shape, generator=draws) * (0.08 if tensor.dim() > 1 else 1.0))


def made(kind: Kind) -> Any:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind.model_type, **SIZES | kind.settings)).eval()
    shaken(model, 0)
    return model


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=kind.name, marks=[] if kind.name in EVERY_TIME else pytest.mark.slow)
        for kind in KINDS
        if not kind.refused
    ],
)
def test_an_engine_has_all_that_a_learner_publishes_of_a_family(atlas_config, tmp_path, kind):
    """And what a checkpoint holds is loaded as it was."""
    store = WeightStore(tmp_path / "store")

    async def body(engine, text):
        policy = load_causal_lm(str(tmp_path / "model"), "float32")
        module = SampledLogprobs(policy, 4096)
        refuse_unsuitable_policy(module, kind.name, packing=True)
        np.testing.assert_allclose(await engine.score([*text, 6]), scored(module, [*text, 6]), atol=1e-4)
        turns = [asyncio.create_task(engine.generate([*text, i], 300, 1.0, i, STOPS)) for i in range(4)]
        for version in range(2):
            shaken(policy, 1 + version)
            tensors = {name: tensor.detach().clone() for name, tensor in saved_tensors(policy)}
            save_model(policy, dict(tensors), AutoTokenizer.from_pretrained(STARTER), tmp_path / f"saved-{version}")
            tensors |= {other: tensors[name] for other, name in tied_names(policy).items()}
            canary = Canary(text, scored(module, text), 1e-3)
            await engine.load(store, store.publish(version, 1, as_in_files(policy, tensors), canary), check=True)
        await asyncio.gather(*turns)
        np.testing.assert_allclose(await engine.score([*text, 6]), scored(module, [*text, 6]), atol=1e-4)
        again = SampledLogprobs(load_causal_lm(str(tmp_path / "saved-1"), "float32"), 4096)
        assert scored(again, [*text, 6]) == scored(module, [*text, 6])

    with_engine(atlas_config, tmp_path, made(kind), body)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.refused], ids=lambda kind: kind.name)
def test_the_gradient_of_a_family_is_that_of_transformers_own_cross_entropy(kind):
    """Of packed trajectories with layers computed again, against one after another, plainly."""
    draws = np.random.default_rng(0)
    rows = [
        make_trajectory(i, sampled=n, token_ids=draws.integers(3, SIZES["vocab_size"], n + 5).astype(np.int32))
        for i, n in enumerate((40, 23))
    ]
    plain, policy = made(kind), made(kind)
    for row in rows:
        ids = torch.from_numpy(row.token_ids[None].astype(np.int64))
        targets = torch.where(torch.from_numpy(row.sampled), ids[0], -100)
        logits = plain(input_ids=ids, use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, targets[1:], reduction="sum").backward()
    module, inputs = SampledLogprobs(policy, 16), collate(rows, packing=True)
    recompute_layers(policy)
    (-module(inputs.token_ids, inputs.sampled, 1.0, inputs.packed)[0]).sum().backward()
    for (name, wanted), (_, found) in zip(plain.named_parameters(), policy.named_parameters(), strict=True):
        assert (found.grad - wanted.grad).norm() <= 1e-5 * wanted.grad.norm(), name


def scored(module: SampledLogprobs, token_ids: list[int]) -> list[float]:
    """As the learner computes them."""
    with torch.no_grad():
        log_p, _ = module(torch.tensor([token_ids]), torch.arange(1, len(token_ids)), 1.0, wants_entropy=False)
    return [float(value) for value in log_p]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.refused], ids=lambda kind: kind.name)
def test_a_family_that_would_be_trained_wrongly_is_refused_in_one_line(tmp_path, kind):
    made(kind).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(kind.refused)) as refused:
        refuse_unsuitable_policy(SampledLogprobs(load_causal_lm(str(tmp_path), "float32"), 4096), kind.name, True)
    assert "\n" not in str(refused.value)


def test_a_turn_ends_at_a_tag_that_is_a_special_token_and_at_one_that_is_not(atlas_config, tmp_path):
    """</search> is one, </answer> is spelled in pieces; the starter writes the first."""
    configure_process([])
    from cusearch_async.rollout.engine import Engine

    AutoModelForCausalLM.from_pretrained(STARTER).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(STARTER).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    known = json.loads(file.read_text())
    known["added_tokens"] = [
        {**token, "special": token["content"] == "</search>" or token["special"]}
        for token in known["added_tokens"]
        if token["content"] != "</answer>"
    ]
    file.write_text(json.dumps(known))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    end = tokenizer.convert_tokens_to_ids("</search>")
    assert tokenizer.decode([end], skip_special_tokens=True) == ""
    assert len(tokenizer("</answer>")["input_ids"]) > 1
    prompt = tokenizer("Question: What is the currency of the country of Pinsk?\n")["input_ids"]

    async def session() -> None:
        with forked_engines():
            engine = Engine.start(str(tmp_path), tokenizer, load_config(atlas_config))
        try:
            turn = await engine.generate(prompt, 80, 0.0, None, STOPS)
        finally:
            engine.close()
        assert turn.token_ids.index(end) == len(turn.token_ids) - 1

    asyncio.run(session())


def test_a_turn_ends_at_a_tag_that_is_written_letter_by_letter():
    configure_process([])
    from cusearch_async.rollout.engine import tokens_to_first

    tokenizer = AutoTokenizer.from_pretrained(STARTER)

    def ids(text: str) -> list[int]:
        return [i for letter in text for i in tokenizer(letter)["input_ids"]]

    tag = tokenizer("</search>")["input_ids"]
    assert len(tag) == 1
    for written, rest in ((ids("<search>x</search>"), ids(" and on</answer>")), ([*ids("<search>x"), *tag], [])):
        assert tokens_to_first(STOPS, written + rest, tokenizer) == len(written)
    assert tokens_to_first(STOPS, ids("no tag"), tokenizer) == len(ids("no tag"))
    assert tokens_to_first(STOPS, [], tokenizer) == 0
