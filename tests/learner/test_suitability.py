"""A model is trained only if the learner computes its log-probabilities: each refused one here is wrong without it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cusearch_async.config import STARTER
from cusearch_async.errors import ConfigError
from cusearch_async.learner.model import SampledLogprobs
from cusearch_async.learner.suitability import refuse_other_models, refuse_unsuitable_policy

pytestmark = pytest.mark.system  # it builds models of transformers, which takes long

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def policy_of(kind, dtype=torch.float32, attention="sdpa", **settings):
    """Random, and surer of its tokens than a fresh one."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL | settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return SampledLogprobs(model, 4096)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama", {}),
        ("mistral", {"sliding_window": 8}),
        ("gemma3_text", {"sliding_window": 8}),
        ("olmo2", {}),
        ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}),
    ],
)
def test_usual_models_are_taken_padded_and_packed(kind, settings, dtype):
    policy = policy_of(kind, dtype, **settings)
    refuse_unsuitable_policy(policy, "org/m", packing=True)
    assert policy.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("kind", "dtype", "settings"),
    [
        ("granite", torch.float32, {"logits_scaling": 8.0}),
        ("granite", torch.bfloat16, {"logits_scaling": 8.0}),
        ("cohere", torch.bfloat16, {"logit_scale": 0.0625}),
        ("cohere2", torch.float32, {"logit_scale": 0.25, "sliding_window": 8}),
        ("gemma2", torch.float32, {"final_logit_softcapping": 2.0, "sliding_window": 8}),
    ],
)
def test_a_model_that_changes_its_logits_is_refused(kind, dtype, settings):
    with pytest.raises(ConfigError, match=r"model\.path 'org/m' cannot be trained: log-probabilities of its own"):
        refuse_unsuitable_policy(policy_of(kind, dtype, **settings), "org/m", packing=False)


@pytest.mark.parametrize(
    ("kind", "dtype", "settings"),
    [
        ("opt", torch.float32, {"ffn_dim": 64, "word_embed_proj_dim": 32}),
        ("lfm2", torch.float32, {"layer_types": ["conv", "full_attention"]}),
        ("jamba", torch.bfloat16, {}),
    ],
)
def test_a_model_in_which_packed_trajectories_see_each_other_is_refused_with_packing_only(kind, dtype, settings):
    policy = policy_of(kind, dtype, **settings)
    refuse_unsuitable_policy(policy, "org/m", packing=False)
    with pytest.raises(
        ConfigError, match=r"packing cannot be used with model\.path 'org/m': a trajectory sees the one"
    ):
        refuse_unsuitable_policy(policy, "org/m", packing=True)


def test_a_model_with_flash_attention_is_asked_without_and_keeps_it():
    """Its kernels are not the CPU's, where a model lies before it is divided among the ranks."""
    policy = policy_of("qwen2")
    policy.model.config._attn_implementation = "flash_attention_2"
    asked = []
    policy.model.set_attn_implementation = lambda name: (
        asked.append(name),
        setattr(policy.model.config, "_attn_implementation", name),
    )
    refuse_unsuitable_policy(policy, "org/m", packing=True)
    assert asked == ["sdpa", "flash_attention_2"]


def test_a_model_that_keeps_its_positions_from_flash_attention_is_refused_with_packing():
    """It is asked with another attention, which sees them, and would be trained on rows that see each other."""
    policy = policy_of("ministral3")
    refuse_unsuitable_policy(policy, "org/m", packing=True)
    policy.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match=r"of a ministral3 would not know .*; set learner\.attention to 'sdpa'"):
        refuse_unsuitable_policy(policy, "org/m", packing=True)


@pytest.mark.parametrize(("theirs", "is_refused"), [("{own}", False), ("", False), ("9 bytes (0)", True)])
def test_ranks_with_other_weights_are_named(theirs, is_refused):
    """Their share was trained towards another reference, and nothing showed it."""
    ranks = SimpleNamespace(gather=lambda own: [own, theirs.format(own=own)])
    with pytest.raises(ConfigError, match=r"other weights on rank 1 than on rank 0") if is_refused else nullcontext():
        refuse_other_models(ranks, str(STARTER))
