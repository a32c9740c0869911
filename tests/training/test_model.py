"""The policy module: log-probabilities of the sampled tokens, whatever the padding and the chunking."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch._inductor import config as inductor

from cusearch_async.config import STARTER
from cusearch_async.errors import ConfigError
from cusearch_async.models import check_context, load_tokenizer
from cusearch_async.training.batching import collate
from cusearch_async.training.model import SampledLogprobs, compile_layers, load_causal_lm
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


def test_compiling_needs_layers_and_a_compiler(monkeypatch):
    with pytest.raises(ConfigError, match=r"model\.path 'small' has no layers that transformers knows as such"):
        compile_layers(torch.nn.Linear(2, 2), "small")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with (
        inductor.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ConfigError, match=r"needs a C\+\+ compiler on a CPU"),
    ):
        compile_layers(load_causal_lm(str(STARTER), "float32"), "small")
