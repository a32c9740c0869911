"""Engines of other models than the starter: they have all that the learner publishes, and turns end at their tags."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cusearch_async.config import STARTER, load_config
from cusearch_async.learner.model import as_in_files, load_causal_lm, saved_tensors, tied_names
from cusearch_async.lifecycle.placement import configure_process
from cusearch_async.weights.folder import WeightStore
from cusearch_async.weights.interface import Canary
from tests.system.forked import forked_engines
from tests.system.test_engine import STOPS, logprobs_of, with_engine

pytestmark = pytest.mark.system

SIZES: dict[str, Any] = {
    **{"vocab_size": 384, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
ROUTED = EXPERTS | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "head_dim": 32, "tie_word_embeddings": False}


def shaken(model: Any, seed: int) -> None:
    """Other weights, far from uniform, and other routing biases."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, tensor in saved_tensors(model):
            if tensor.dim() > 1 or tensor.shape == (8,):
                tensor.copy_(torch.randn(tensor.shape, generator=draws) * (0.08 if tensor.dim() > 1 else 1.0))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("glm4_moe", ROUTED), ("gpt2", {"n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 2048})],
    ids=["experts-with-a-routing-bias", "tied-to-an-embedding-of-another-name"],
)
def test_an_engine_has_all_that_is_published(atlas_config, tmp_path, kind, settings):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | settings)).eval()
    shaken(model, 0)
    store = WeightStore(tmp_path / "store")

    async def body(engine, text):
        policy = load_causal_lm(str(tmp_path / "model"), "float32")
        turns = [asyncio.create_task(engine.generate([*text, i], 300, 1.0, i, STOPS)) for i in range(4)]
        for version in range(2):
            shaken(policy, 1 + version)
            tensors = {name: tensor.detach().clone() for name, tensor in saved_tensors(policy)}
            tensors |= {other: tensors[name] for other, name in tied_names(policy).items()}
            canary = Canary(text, logprobs_of(policy, text), 1e-3)
            await engine.load(store, store.publish(version, 1, as_in_files(policy, tensors), canary), check=True)
        await asyncio.gather(*turns)
        np.testing.assert_allclose(await engine.score([*text, 6]), logprobs_of(policy, [*text, 6]), atol=1e-3)

    with_engine(atlas_config, tmp_path, model, body)


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
