"""The policy module: log-probabilities of the sampled tokens, whatever the padding and the chunking."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._inductor import config as inductor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, GPT2Config, OPTConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from cusearch_async.config import STARTER
from cusearch_async.errors import ConfigError
from cusearch_async.learner import matmul
from cusearch_async.learner.batching import collate
from cusearch_async.learner.model import (
    SampledLogprobs,
    as_in_files,
    compile_layers,
    load_causal_lm,
    recompute_layers,
    save_model,
    saved_tensors,
    tied_names,
    train_upper_layers,
    try_to_save,
)
from cusearch_async.models import check_context, load_tokenizer
from tests.strategies import make_trajectory


@pytest.fixture(scope="module")
def policy() -> SampledLogprobs:
    return SampledLogprobs(load_causal_lm(str(STARTER), "float32").eval(), 4096)


@pytest.fixture
def attending(policy):
    """Switch the attention of the policy."""
    yield policy.model.set_attn_implementation
    policy.model.set_attn_implementation("sdpa")


def trajectories():
    rng = np.random.default_rng(0)
    lengths = (4, 31, 12)
    return [
        make_trajectory(i, sampled=n, token_ids=rng.integers(0, 380, n + 5).astype(np.int32))
        for i, n in enumerate(lengths)
    ]


def expected(policy: SampledLogprobs, trajectory, temperature: float = 1.0) -> torch.Tensor:
    """By the definition: one trajectory, all logits, no padding."""
    ids = torch.tensor(trajectory.token_ids[None].astype(np.int64))
    log_all = torch.log_softmax(policy.model(ids).logits[0].double() / temperature, -1)
    chosen = log_all[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
    return chosen[torch.tensor(trajectory.sampled[1:])]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_definition_in_row_major_order(policy, attending, temperature, attention, packing):
    attending(attention)
    batch = collate([trajectories()[i] for i in (2, 0, 1)], packing)
    with torch.no_grad():
        found, _ = policy(batch.token_ids, batch.sampled, temperature, batch.packed)
        wanted = torch.cat([expected(policy, trajectories()[i], temperature) for i in (2, 0, 1)])
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=0)


def test_entropy_is_that_of_the_whole_distribution(policy):
    batch = collate(trajectories()[:1], packing=False)
    _, entropy = policy(batch.token_ids, batch.sampled, 1.0)
    with torch.no_grad():
        distribution = torch.distributions.Categorical(logits=policy.model(batch.token_ids).logits[0, :-1])
    torch.testing.assert_close(entropy, distribution.entropy()[batch.sampled - 1], atol=1e-5, rtol=1e-4)
    assert not entropy.requires_grad, "without a bonus nothing is kept for it"


@pytest.mark.parametrize("at_once", [4096, 5])
def test_the_gradient_of_the_entropy_is_that_of_finite_differences(policy, at_once):
    """Of the sum of all entropies, in ten weights of the LM head, by central differences in float64."""
    with_gradient = SampledLogprobs(policy.model, at_once, entropy_has_gradient=True)
    batch = collate(trajectories()[:2], packing=False)
    policy.zero_grad()
    _, entropy = with_gradient(batch.token_ids, batch.sampled, 0.7)
    entropy.sum().backward()
    head = policy.model.lm_head.weight
    with torch.no_grad():
        hidden = policy.model.base_model(input_ids=batch.token_ids).last_hidden_state.flatten(0, 1)[batch.sampled - 1]

    def entropies(weight):
        return torch.distributions.Categorical(logits=hidden.double() @ weight.T / 0.7).entropy().sum()

    places = [divmod(int(i), head.shape[1]) for i in head.grad.abs().flatten().topk(10).indices]
    for row, column in places:
        step = torch.zeros_like(head, dtype=torch.float64)
        step[row, column] = 1e-6
        weight = head.detach().double()
        slope = (entropies(weight + step) - entropies(weight - step)) / 2e-6
        assert head.grad[row, column].item() == pytest.approx(slope.item(), rel=1e-3)


def test_logits_in_small_pieces_give_the_same_gradient(policy):
    batch = collate(trajectories(), packing=False)
    gradients = []
    for at_once in (4096, 5):
        policy.zero_grad()
        logprobs, _ = SampledLogprobs(policy.model, at_once)(batch.token_ids, batch.sampled, 1.0)
        logprobs.sum().backward()
        gradients.append(policy.model.lm_head.weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_the_logits_of_the_last_piece_are_computed_once_unless_a_second_backward_pass_needs_them(policy):
    computed, multiplied, added = [], [], []

    def linear(rows, *others):
        computed.append(len(rows))
        return functional.linear(rows, *others)

    def product(rows, other):
        multiplied.append(len(rows))
        return torch.mm(rows, other)

    def add_outer(total, slope, rows):
        added.append(len(rows))
        return total.addmm_(slope.T, rows)

    batch = collate(trajectories(), packing=False)
    wrapped = SampledLogprobs(policy.model, 5)
    wrapped.model.lm_head.products = matmul.Products(linear, product, add_outer)
    policy.zero_grad()
    total = wrapped(batch.token_ids, batch.sampled, 1.0)[0].sum()
    whole, rest = divmod(len(batch.sampled), 5)
    once = [rest] * bool(rest) + [5] * whole
    assert computed == once
    total.backward(retain_graph=True)
    assert computed == once + once[-2::-1]
    assert multiplied == added == once[::-1]
    first = policy.model.lm_head.weight.grad.clone()
    total.backward()
    assert computed == once + once[-2::-1] + once[::-1]
    torch.testing.assert_close(policy.model.lm_head.weight.grad, 2 * first)


def test_a_context_that_is_too_short_is_named_with_the_lengths():
    with pytest.raises(ConfigError, match=r"2000 tokens .* context of 1024"):
        check_context(str(STARTER), 2000)


def test_a_folder_without_tokenizer_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash attention is installed")
def test_an_attention_that_is_not_installed_is_named():
    with pytest.raises(ConfigError, match=r"learner.attention 'flash_attention_2' cannot be used"):
        load_causal_lm(str(STARTER), "float32", "flash_attention_2")


def test_the_uppermost_layers_alone_get_the_gradient_that_they_had():
    """Neither embedding nor head nor the layers below have one; what is trained has the very gradient of before."""
    gradients = []
    for count in (None, 2):
        model = load_causal_lm(str(STARTER), "float32")
        if count:
            train_upper_layers(model, count, str(STARTER))
        policy = SampledLogprobs(model, 4096)
        inputs = collate(trajectories(), packing=False)
        policy(inputs.token_ids, inputs.sampled, 1.0)[0].sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    whole, upper = gradients
    assert {name for name in whole if "layers.2." in name or "layers.3." in name or name == "model.norm.weight"} == set(
        upper
    )
    assert all(torch.equal(upper[name], whole[name]) for name in upper)


@pytest.mark.parametrize(("kind", "below"), [(GPT2Config, "wpe"), (OPTConfig, "embed_positions")])
def test_learned_positions_are_below_the_uppermost_layers(kind, below):
    """Before, they were trained, and the backward pass went through all layers to them."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(kind(**sizes, ffn_dim=32, word_embed_proj_dim=16))
    train_upper_layers(model, 1, "small")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert not any(below in name for name in trained)
    assert all(".2." in name or "ln_f" in name for name in trained)


def test_recomputing_layers_does_not_switch_dropout_on():
    """OPT's layers drop by their own flag; before, each pass was of another policy."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32}
    model = AutoModelForCausalLM.from_config(OPTConfig(**sizes, word_embed_proj_dim=16, dropout=0.5)).eval()
    tokens = torch.arange(1, 20).unsqueeze(0)
    plain = model(tokens).logits
    plain.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    recompute_layers(model)
    model.zero_grad()
    recomputed = model(tokens).logits
    assert torch.equal(recomputed, plain)
    recomputed.sum().backward()
    assert all(torch.allclose(p.grad, one, atol=1e-6) for p, one in zip(model.parameters(), gradients, strict=True))
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert all(layer.training for layer in layers), "or transformers would not recompute them"


def test_more_layers_than_the_model_has_cannot_be_trained():
    model = load_causal_lm(str(STARTER), "float32")
    with pytest.raises(ConfigError, match=r"learner\.trained_layers \(5\) must be <= 4, the layers of '.*starter'"):
        train_upper_layers(model, 5, str(STARTER))


def test_compiling_needs_layers_and_a_compiler(monkeypatch):
    with pytest.raises(ConfigError, match=r"model\.path 'small' has no layers that transformers knows as such"):
        compile_layers(torch.nn.Linear(2, 2), "small")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with (
        inductor.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ConfigError, match=r"needs a C\+\+ compiler on a CPU"),
    ):
        compile_layers(load_causal_lm(str(STARTER), "float32"), "small")


# What is published and saved.

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def random_model(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | settings)).eval()
    for name, buffer in model.named_buffers():
        if name == BIAS:
            buffer.copy_(torch.arange(4.0))
    return model


def test_a_buffer_that_is_in_a_models_files_is_saved_with_its_weights(tmp_path):
    model = random_model("glm4_moe", **EXPERTS)
    tensors = dict(saved_tensors(model))
    assert tensors.keys() == model.state_dict().keys()
    save_model(model, tensors, load_tokenizer(str(STARTER)), tmp_path)
    again = load_causal_lm(str(tmp_path), "float32")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in saved_tensors(again))
    assert again.get_buffer(BIAS).tolist() == [0, 1, 2, 3]


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.1}
SLIDING = {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
LONG = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
ROPES = [
    ("qwen2", {"rope_type": "default", "rope_theta": 1e6}, None),
    ("llama", {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3, {"rope_type": "llama3"} | LLAMA3),
    ("glm", {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.25}, None),
    ("olmo3", {"rope_type": "yarn", "rope_theta": 5e5} | YARN, {"rope_type": "yarn"} | YARN),
    ("phi3", {"rope_type": "longrope", "rope_theta": 2e4} | LONG, {"type": "longrope"} | LONG),
]


@pytest.mark.parametrize(("kind", "rope", "scaling"), ROPES, ids=[kind for kind, *_ in ROPES])
def test_a_saved_model_has_its_positions_also_for_an_older_transformers(tmp_path, kind, rope, scaling):
    """Which reads no `rope_parameters`: it took 10,000 as the base, and answered with other positions."""
    model = random_model(kind, rope_parameters=rope if kind != "olmo3" else {"full_attention": rope, **SLIDING})
    save_model(model, dict(saved_tensors(model)), load_tokenizer(str(STARTER)), tmp_path)
    known = json.loads((tmp_path / "config.json").read_text())
    assert (known["rope_theta"], known["rope_scaling"], known["torch_dtype"]) == (
        rope["rope_theta"],
        scaling,
        "float32",
    )
    assert known.get("partial_rotary_factor") == rope.get("partial_rotary_factor")
    again = load_causal_lm(str(tmp_path), "float32").eval()
    assert again.config.rope_parameters.items() >= model.config.rope_parameters.items()
    ids = torch.arange(5, 25)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_saved_model_names_no_code_that_is_not_saved(tmp_path):
    """It could not be loaded with trust_remote_code, for want of a file of code that nobody needs."""
    folder = shutil.copytree(STARTER, tmp_path / "m")
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | {"auto_map": {"AutoConfig": "configuration_x.XConfig"}}))
    model = load_causal_lm(str(folder), "float32")
    save_model(model, dict(saved_tensors(model)), load_tokenizer(str(STARTER)), tmp_path / "saved")
    assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_experts_are_published_by_the_names_that_the_files_have(tmp_path):
    model = random_model("glm4_moe", **EXPERTS)
    model.save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), "float32")
    published = as_in_files(model, dict(saved_tensors(model)))
    assert published.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in published
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(published[name], tensor), name


@pytest.mark.parametrize(
    ("kind", "settings", "tied"),
    [
        ("qwen2", {"tie_word_embeddings": True}, {"lm_head.weight": "model.embed_tokens.weight"}),
        ("qwen2", {"tie_word_embeddings": False}, {}),
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 1}, {"lm_head.weight": "transformer.wte.weight"}),
        ("opt", {"word_embed_proj_dim": 32}, {"lm_head.weight": "model.decoder.embed_tokens.weight"}),
        ("gpt_neox", {"tie_word_embeddings": True}, {"lm_head.weight": "gpt_neox.embed_in.weight"}),
    ],
)
def test_a_tied_head_is_published_whatever_the_embedding_is_called(kind, settings, tied):
    policy = SampledLogprobs(random_model(kind, **settings), 64)
    assert tied_names(policy.model) == tied


@pytest.mark.parametrize(
    "written", [{"temperature": 0.9, "top_p": 0.6}, {"num_beams": 1, "early_stopping": True}, {"pad_token_id": -1}]
)
def test_a_generation_config_that_cannot_be_saved_loses_all_but_its_ids(tmp_path, written, caplog):
    folder = shutil.copytree(STARTER, tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5], **written}))
    model = load_causal_lm(str(folder), "float32")
    assert "only its token ids are saved" in caplog.text
    save_model(model, dict(saved_tensors(model)), load_tokenizer(str(folder)), tmp_path / "saved")
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert saved.eos_token_id == [0, 5]
    assert (saved.temperature, saved.top_p) in ((None, None), (1.0, 1.0))


def test_a_generation_config_that_can_be_saved_is_kept(tmp_path, caplog):
    folder = shutil.copytree(STARTER, tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_p": 0.6, "eos_token_id": 0}))
    assert load_causal_lm(str(folder), "float32").generation_config.top_p == 0.6
    assert not caplog.records


def test_a_model_that_cannot_be_saved_is_refused_before_the_first_step(policy):
    class Tokenizer:
        def save_pretrained(self, folder):
            raise KeyError("vocab")

    try_to_save(policy.model, load_tokenizer(str(STARTER)), "org/m")
    with pytest.raises(ConfigError, match=r"model\.path 'org/m' could not be saved in a checkpoint: .*vocab"):
        try_to_save(policy.model, Tokenizer(), "org/m")


def test_a_model_that_lacks_weights_is_not_loaded(tmp_path):
    folder = shutil.copytree(STARTER, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights .*\(model\.norm\.weight\): they would be random numbers"):
        load_causal_lm(str(folder), "float32")
