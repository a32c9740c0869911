"""Attention within the trajectories of a packed row: what padded rows compute, without the rest of the row."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, Phi3Config, Qwen2Config, Qwen3NextConfig

from cusearch_async.config import STARTER
from cusearch_async.errors import ConfigError
from cusearch_async.learner import attention
from cusearch_async.learner.attention import VARLEN, attend, refuse_unsuitable
from cusearch_async.learner.batching import Packed, collate
from cusearch_async.learner.model import SampledLogprobs, load_causal_lm, recompute_layers
from tests.strategies import make_trajectory

pytestmark = pytest.mark.system  # it builds models of transformers, which takes long

LENGTHS = (4, 31, 12, 1, 60)
SMALL = {"vocab_size": 380, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def grouped_policy(name: str, checkpointing: bool = False) -> SampledLogprobs:
    """Four query heads on two of keys and values, so that heads cannot be confused unseen."""
    torch.manual_seed(0)
    config = Qwen2Config(**SMALL, **HEADS, attn_implementation=name, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if checkpointing:
        recompute_layers(model)
    return SampledLogprobs(model, 4096)


def trajectories(**changes: int):
    """With one token of a trajectory exchanged: `at` of `row`."""
    rng = np.random.default_rng(0)
    made = [
        make_trajectory(i, sampled=n, token_ids=rng.integers(0, 380, n + 5).astype(np.int32))
        for i, n in enumerate(LENGTHS)
    ]
    if changes:
        made[changes["row"]].token_ids[changes["at"]] += 1
    return made


def gradient(policy: SampledLogprobs, packing: bool) -> torch.Tensor:
    policy.zero_grad()
    batch = collate(trajectories(), packing)
    logprobs, _ = policy(batch.token_ids, batch.sampled, 1.0, batch.packed)
    weights = torch.linspace(-1, 1, len(logprobs))
    (logprobs * weights).mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_the_gradient_is_that_of_padded_rows(packing, checkpointing):
    wanted = gradient(grouped_policy("sdpa"), packing=False)
    found = gradient(grouped_policy(VARLEN, checkpointing), packing)
    assert wanted.abs().max() > 0.01
    assert (found - wanted).abs().max() < 1e-6


def test_a_packed_trajectory_sees_itself_only():
    policy, lengths = grouped_policy(VARLEN), torch.tensor(LENGTHS)
    found = []
    for batch in (collate(trajectories(), True), collate(trajectories(row=1, at=7), True)):
        with torch.no_grad():
            logprobs, _ = policy(batch.token_ids, batch.sampled, 1.0, batch.packed)
        found.append(logprobs.split(lengths.tolist()))
    same = [torch.equal(*pair) for pair in zip(*found, strict=True)]
    assert same == [True, False, True, True, True]


def test_no_attention_reaches_beyond_a_trajectory(monkeypatch):
    """The work grows with the sum of the squares of lengths, not with the square of the sum."""
    seen = []

    def watched(query, *arguments, **named):
        assert "attn_mask" not in named
        seen.append(query.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(query, *arguments, **named)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    gradient(grouped_policy(VARLEN), packing=True)
    assert seen == [n + 5 for n in LENGTHS] * SMALL["num_hidden_layers"]


def rows(device: str = "cpu"):
    """Query, key, value of one row, and how trajectories of 3, 5 and 1 tokens lie in it."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8, generator=generator).to(device) for heads in (4, 2, 2))
    bounds = torch.tensor([0, 3, 8, 9], dtype=torch.int32, device=device)
    return query, key, value, Packed(torch.arange(9)[None], bounds, (3, 5, 1))


def kernel(query, key, value, bounds_q, bounds_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """What torch documents of `varlen_attn`, for [L, H, D]."""
    assert (max_q, max_k, window_size) == (5, 5, (-1, 0)), "causal"
    assert bounds_q.tolist() == bounds_k.tolist() == [0, 3, 8, 9]
    assert enable_gqa == (len(query[0]) != len(key[0]))
    key, value = (tensor.repeat_interleave(len(query[0]) // len(tensor[0]), dim=1) for tensor in (key, value))
    attended = torch.empty_like(query)
    for begin, end in itertools.pairwise(bounds_q):
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], key[begin:end]) * scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        shares = scores.masked_fill(future, -torch.inf).softmax(-1)
        attended[begin:end] = torch.einsum("hqk,khd->qhd", shares, value[begin:end])
    return attended


def old_kernel(query, key, value, bounds_q, bounds_k, max_q, max_k, *, scale, window_size):
    """Before torch 2.13."""
    return kernel(query, key, value, bounds_q, bounds_k, max_q, max_k, scale=scale, window_size=window_size)


@pytest.mark.parametrize("of_torch", [kernel, old_kernel])
def test_the_kernel_is_given_the_rows_as_it_wants_them(monkeypatch, of_torch):
    """Of a stand-in for the kernel, which runs on CUDA only."""
    query, key, value, packed = rows()
    wanted, _ = attend(None, query, key, value, None, scaling=0.3, packed=packed)
    monkeypatch.setattr(attention, "_has_kernel", lambda query: True)
    monkeypatch.setattr(attention.varlen, "varlen_attn", of_torch)
    monkeypatch.setattr(attention, "_GROUPED", {"enable_gqa": True} if of_torch is kernel else {})
    found, _ = attend(None, query, key, value, None, scaling=0.3, packed=packed)
    assert found.shape == wanted.shape == (1, 9, 4, 8)
    torch.testing.assert_close(found, wanted)


def test_torch_takes_the_call_forward_and_backward():
    """On the meta device: names of arguments and shapes, no numbers."""
    query, key, value, packed = rows("meta")
    query, key, value = (tensor.to(torch.bfloat16).requires_grad_() for tensor in (query, key, value))
    found = attention._by_kernel(query[0], key[0], value[0], packed, 0.3)
    assert found.shape == (9, 4, 8)
    found.sum().backward()
    assert (query.grad.shape, key.grad.shape) == (query.shape, key.shape)
    assert bool(attention._GROUPED) == ("enable_gqa" in inspect.signature(varlen.varlen_attn).parameters)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MistralConfig(**SMALL, **HEADS, sliding_window=8), "sliding_attention"),
        (Gemma2Config(**SMALL, **HEADS), "sliding_attention, softcapping of attention scores"),
        (Qwen3NextConfig(**SMALL, **HEADS), "linear_attention, attention layers that cannot be replaced"),
    ],
)
def test_a_model_with_other_attention_is_refused_by_name(config, named):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=VARLEN)
    with pytest.raises(ConfigError, match=f"'varlen' cannot be used with model.path 'org/m', which has {named}; set"):
        refuse_unsuitable(model, "org/m")


def test_a_window_as_long_as_the_context_cuts_nothing():
    """Phi-4-mini's was refused."""
    config = Phi3Config(**SMALL, **HEADS, pad_token_id=0, sliding_window=4096, max_position_embeddings=4096)
    with torch.device("meta"):
        refuse_unsuitable(AutoModelForCausalLM.from_config(config, attn_implementation=VARLEN), "org/m")


def test_a_model_that_ignores_the_attention_is_refused():
    """Its packed trajectories would see each other."""
    model = grouped_policy(VARLEN).model
    model._supports_attention_backend = False
    with pytest.raises(ConfigError, match="which has attention layers that cannot be replaced; set"):
        refuse_unsuitable(model, "org/m")


def test_the_attention_is_no_part_of_a_saved_model(tmp_path):
    load_causal_lm(str(STARTER), "float32", VARLEN).save_pretrained(tmp_path)
    assert VARLEN not in (tmp_path / "config.json").read_text()
