"""The policy loss: every term with numbers worked by hand, its gradient against a literal transcription."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cusearch_async.algorithm.losses import (
    MAX_KL,
    MAX_LOG_RATIO,
    aggregation_weights,
    correction_weights,
    k3_kl,
    policy_loss,
)

CLIP = 0.2


def loss_of(ratios, advantages, *, log_ref=None, weights=None, aggregation=None, low=CLIP, high=CLIP, kl_coef=0.0):
    """(loss, gradient with respect to log π_θ, terms), log π_prox being 0 so that log π_θ = log r."""
    log_policy = torch.tensor(ratios).log().requires_grad_()
    count = len(ratios)
    loss, terms = policy_loss(
        log_policy,
        torch.zeros(count),
        None if log_ref is None else torch.tensor(log_ref),
        torch.tensor(advantages),
        torch.ones(count) if weights is None else torch.tensor(weights),
        torch.ones(count) if aggregation is None else torch.tensor(aggregation),
        low,
        high,
        kl_coef,
    )
    (gradient,) = torch.autograd.grad(loss, log_policy)
    return loss.item(), gradient.tolist(), terms


# Clipping.


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: plain policy gradient
        (1.1, 2.0, -2.2, -2.2),  # inside
        (1.5, 2.0, -2.4, 0.0),  # too likely already: held at 1.2
        (0.5, 2.0, -1.0, -1.0),  # less likely although good: never held
        (0.5, -2.0, 1.6, 0.0),  # too unlikely already: held at 0.8
        (1.5, -2.0, 3.0, 3.0),  # more likely although bad: never held
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_a_token_is_clipped_only_where_it_has_moved_far_enough_the_right_way(ratio, advantage, loss, gradient):
    found, slope, terms = loss_of([ratio], [advantage])
    assert found == pytest.approx(loss, rel=1e-6)
    assert slope == pytest.approx([gradient], rel=1e-6)
    assert terms.clipped.tolist() == [advantage != 0 and gradient == 0]
    assert terms.ratio.tolist() == pytest.approx([ratio])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [(1.25, 1.0, -1.25), (1.5, 1.0, -1.28), (0.5, -1.0, 0.8), (0.75, -1.0, 0.8), (0.9, -1.0, 0.9)],
)
def test_the_upper_and_the_lower_clip_are_set_apart(ratio, advantage, loss):
    found, _, _ = loss_of([ratio], [advantage], low=0.2, high=0.28)
    assert found == pytest.approx(loss, rel=1e-6)


def test_a_ratio_beyond_all_bounds_stays_finite():
    loss, gradient, terms = loss_of([1e30, 1e-30], [-1.0, 1.0])
    assert math.isfinite(loss)
    assert all(map(math.isfinite, gradient))
    np.testing.assert_allclose(terms.ratio, [math.exp(MAX_LOG_RATIO), math.exp(-MAX_LOG_RATIO)], rtol=1e-5)


# KL.


@pytest.mark.parametrize(
    ("log_policy", "log_reference", "kl"),
    [
        (-1.0, -1.0, 0.0),
        (math.log(0.5), math.log(0.25), 0.5 + math.log(2) - 1),  # 0.1931: reference half as likely
        (math.log(0.25), math.log(0.5), 2 - math.log(2) - 1),  # 0.3069: reference twice as likely
        (0.0, 30.0, MAX_KL),
    ],
)
def test_k3_by_hand(log_policy, log_reference, kl):
    assert k3_kl(torch.tensor([log_policy]), torch.tensor([log_reference])).item() == pytest.approx(kl, abs=1e-6)


@given(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32))
def test_k3_is_never_negative_and_bounded(log_policy, log_reference):
    kl = k3_kl(torch.tensor([log_policy]), torch.tensor([log_reference])).item()
    assert -1e-6 <= kl <= MAX_KL


def test_the_mean_of_k3_over_samples_is_the_kl_divergence():
    """Exactly, by enumeration: Σ π_θ k3 = KL(π_θ || π_ref)."""
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.2, 0.3])
    expected = (policy * (policy / reference).log()).sum()
    assert (policy * k3_kl(policy.log(), reference.log())).sum().item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("reference", "slope"), [(0.5, 0.5), (2.0, -1.0)])
def test_the_penalty_is_added_and_pulls_towards_the_reference(reference, slope):
    """d k3 / d log π_θ = 1 - π_ref / π_θ. Positive: descent lowers π_θ, which is above the reference."""
    loss, gradient, terms = loss_of([1.0], [0.0], log_ref=[math.log(reference)], kl_coef=0.1)
    kl = reference - math.log(reference) - 1
    assert loss == pytest.approx(0.1 * kl, rel=1e-5)
    assert gradient == pytest.approx([0.1 * slope], rel=1e-5)
    assert terms.kl_reference.tolist() == pytest.approx([kl], rel=1e-5)


def test_without_a_reference_there_is_no_penalty():
    loss, _, terms = loss_of([1.0], [1.0], kl_coef=5.0)
    assert loss == -1.0
    assert terms.kl_reference.tolist() == [0.0]


def test_the_correction_weighs_the_policy_term_and_not_the_penalty():
    """0.5 x (-1) + 0.1 x k3(π_ref / π_θ = 2)."""
    loss, _, _ = loss_of([1.0], [1.0], log_ref=[math.log(2)], weights=[0.5], kl_coef=0.1)
    assert loss == pytest.approx(-0.5 + 0.1 * (1 - math.log(2)), rel=1e-6)


def test_the_loss_sums_tokens_by_their_aggregation_weights():
    loss, gradient, _ = loss_of([1.0, 1.1, 0.5], [1.0, 2.0, -1.0], aggregation=[0.5, 0.25, 0.25])
    assert loss == pytest.approx(-0.5 - 0.55 + 0.2, rel=1e-6)
    assert gradient == pytest.approx([-0.5, -0.55, 0.0], rel=1e-6)


# Aggregation.


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [1 / 10, 1 / 10, 1 / 10]),
        ("seq-mean-token-mean", [1 / 6, 1 / 15, 1 / 9]),
        ("seq-mean-token-sum-norm", [1 / 60, 1 / 60, 1 / 60]),
    ],
)
def test_aggregation_weights_of_trajectories_with_2_5_and_3_sampled_tokens(mode, expected):
    assert aggregation_weights([2, 5, 3], mode, max_tokens=20) == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=40))
def test_the_mean_of_a_constant_is_the_constant(mode, lengths):
    weights = aggregation_weights(lengths, mode, max_tokens=500)
    assert math.fsum(w * n for w, n in zip(weights, lengths, strict=True)) == pytest.approx(1.0)


def test_modes_by_hand_on_a_long_and_a_short_trajectory():
    """One token of loss 6 and three of loss 2: token mean 3, sequence mean 4, norm (6 + 6) / (2 x 4) = 1.5."""
    sums, lengths = [6.0, 6.0], [1, 3]
    means = {
        mode: sum(w * s for w, s in zip(aggregation_weights(lengths, mode, max_tokens=4), sums, strict=True))
        for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    }
    assert means == pytest.approx({"token-mean": 3.0, "seq-mean-token-mean": 4.0, "seq-mean-token-sum-norm": 1.5})


# Correction of the sampling policy.


def corrected(mode, w, low=0.5, high=2.0):
    log_behaviour = np.full(len(w), -1.0, dtype=np.float32)
    log_prox = (np.log(np.array(w)) - 1.0).astype(np.float32)
    return correction_weights(log_prox, log_behaviour, mode, low, high)


@pytest.mark.parametrize(
    ("mode", "low", "high", "expected"),
    [
        ("none", 0.5, 2.0, [1, 1, 1, 1, 1]),
        ("tis", 0.5, 2.0, [0.1, 0.6, 1, 1.9, 2]),
        ("icepop", 0.5, 2.0, [0, 0.6, 1, 1.9, 0]),
        ("mask", 0.5, 5.0, [0.1, 0.6, 1, 1.9, 0]),
    ],
)
def test_token_corrections_by_hand(mode, low, high, expected):
    np.testing.assert_allclose(corrected(mode, [0.1, 0.6, 1.0, 1.9, 9.0], low, high), expected, rtol=1e-5)


def test_the_geometric_correction_keeps_or_drops_a_whole_trajectory():
    """Geometric means: sqrt(0.25 x 8) = 1.41 inside; sqrt(4 x 4) = 4 above; sqrt(0.04) = 0.2 below."""
    np.testing.assert_allclose(corrected("geometric", [0.25, 8.0]), [0.25, 2.0], rtol=1e-5)
    assert corrected("geometric", [4.0, 4.0]).tolist() == [0.0, 0.0]
    assert corrected("geometric", [1.0, 0.04]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", ["tis", "icepop", "mask", "geometric", "none"])
def test_on_policy_nothing_is_corrected(mode):
    weights = corrected(mode, [1.0, 1.0, 1.0])
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert weights.dtype == np.float32


@pytest.mark.parametrize("mode", ["tis", "icepop", "mask", "geometric"])
@given(pairs=st.lists(st.tuples(st.floats(-100, 0, width=32), st.floats(-100, 0, width=32)), min_size=1, max_size=20))
def test_no_correction_exceeds_its_bound_or_is_negative(mode, pairs):
    log_prox, log_behaviour = np.array(pairs, dtype=np.float32).T
    weights = correction_weights(log_prox, log_behaviour, mode, 0.5, 2.0)
    assert weights.shape == log_prox.shape
    assert ((weights >= 0) & (weights <= 2)).all()


# The whole loss.


@st.composite
def minibatches(draw):
    """(tensors [T], parts): random tokens and a random assignment to two or three parts."""
    seed, count = draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 60))
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return torch.randn(count, generator=generator) * scale

    log_prox = normal(1.0) - 2
    tensors = {
        "log_policy": log_prox + normal(0.3),
        "log_prox": log_prox,
        "log_reference": log_prox + normal(0.3),
        "advantages": normal(1.0),
        "weights": torch.rand(count, generator=generator) * 2,
        "aggregation": torch.rand(count, generator=generator) / count,
    }
    return tensors, torch.randint(0, draw(st.integers(2, 3)), (count,), generator=generator)


def literal_loss(t, low, high, beta):
    """Word for word, in float64, one token at a time."""
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(len(t["log_policy"])):
        ratio = torch.exp(t["log_policy"][i] - t["log_prox"][i])
        advantage = t["advantages"][i]
        held = torch.clip(ratio, 1 - low, 1 + high)
        surrogate = torch.minimum(ratio * advantage, held * advantage)
        log_u = t["log_reference"][i] - t["log_policy"][i]
        k3 = torch.exp(log_u) - log_u - 1
        loss = loss + t["aggregation"][i] * (-t["weights"][i] * surrogate + beta * k3)
    return loss


@settings(deadline=None)  # the first call loads parts of torch
@given(minibatches())
def test_loss_and_gradient_are_those_of_the_literal_formula(batch):
    tensors, _ = batch
    doubles = {name: value.double() for name, value in tensors.items()}
    doubles["log_policy"].requires_grad_()
    expected = literal_loss(doubles, 0.2, 0.28, 0.05)
    (expected_gradient,) = torch.autograd.grad(expected, doubles["log_policy"])
    log_policy = tensors["log_policy"].clone().requires_grad_()
    loss, _ = policy_loss(**(tensors | {"log_policy": log_policy}), clip_low=0.2, clip_high=0.28, kl_coef=0.05)
    (gradient,) = torch.autograd.grad(loss, log_policy)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-6)


@settings(deadline=None)  # the first call loads parts of torch
@given(minibatches())
def test_the_parts_of_a_minibatch_sum_to_the_whole(batch):
    tensors, parts = batch
    constants = {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.01}
    whole, terms = policy_loss(**tensors, **constants)
    split = [
        policy_loss(**{name: value[parts == part] for name, value in tensors.items()}, **constants) for part in range(3)
    ]
    torch.testing.assert_close(sum(loss for loss, _ in split), whole, rtol=1e-5, atol=1e-6)
    assert sum(int(part.clipped.sum()) for _, part in split) == int(terms.clipped.sum())


def test_the_terms_for_the_metrics_carry_no_gradient():
    log_policy = torch.full((3,), -1.0, requires_grad=True)
    constants = [torch.full((3,), -1.0) for _ in range(5)]
    loss, terms = policy_loss(log_policy, *constants, 0.2, 0.2, 0.1)
    assert loss.requires_grad
    assert not any(t.requires_grad for t in (terms.clipped, terms.kl_reference, terms.ratio))
