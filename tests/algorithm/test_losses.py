"""The policy loss: every term with numbers worked by hand, its gradient against a literal transcription."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cusearch_async.algorithm.losses import (
    MAX_KL,
    MAX_LOG_RATIO,
    Surrogate,
    Tokens,
    aggregation_weights,
    correction_weights,
    k3_kl,
    loglinear_proximal,
    policy_loss,
    sequence_mean,
)


def loss_of(
    ratios, advantages, *, log_ref=None, weights=None, aggregation=None, lengths=None, entropy=None, **settings
):
    """(loss, gradient with respect to log π_θ, terms), log π_prox being 0 so that log π_θ = log r."""
    log_policy = torch.tensor(ratios).log().requires_grad_()
    count = len(ratios)
    tokens = Tokens(
        lengths=lengths or [count],
        log_behaviour=torch.zeros(count),
        log_prox=torch.zeros(count),
        log_reference=None if log_ref is None else torch.tensor(log_ref),
        advantages=torch.tensor(advantages),
        weights=torch.ones(count) if weights is None else torch.tensor(weights),
        aggregation=torch.ones(count) if aggregation is None else torch.tensor(aggregation),
    )
    loss, terms = policy_loss(log_policy, tokens, Surrogate(**settings), entropy)
    loss.backward()
    return loss.item(), log_policy.grad.tolist(), terms


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


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [(1.25, 1.0, -1.25), (1.5, 1.0, -1.28), (0.5, -1.0, 0.8), (0.75, -1.0, 0.8), (0.9, -1.0, 0.9)],
)
def test_the_upper_and_the_lower_clip_are_set_apart(ratio, advantage, loss):
    found, _, _ = loss_of([ratio], [advantage], clip_low=0.2, clip_high=0.28)
    assert found == pytest.approx(loss, rel=1e-6)


def test_a_ratio_beyond_all_bounds_stays_finite():
    loss, gradient, terms = loss_of([1e30, 1e-30], [-1.0, 1.0])
    assert math.isfinite(loss)
    assert all(map(math.isfinite, gradient))
    np.testing.assert_allclose(terms.loss, [math.exp(MAX_LOG_RATIO), -math.exp(-MAX_LOG_RATIO)], rtol=1e-5)


# Dual clip.


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (2.0, -1.0, 2.0, 2.0),  # below c = 3: as without
        (3.5, -1.0, 3.0, 0.0),  # more likely by 3.5 although bad: the loss is held at 3
        (3.5, -2.0, 6.0, 0.0),
        (0.5, -1.0, 0.8, 0.0),  # the ordinary clip
        (3.5, 1.0, -1.2, 0.0),  # a good token never meets the dual clip
    ],
)
def test_the_dual_clip_bounds_what_one_bad_token_can_do(ratio, advantage, loss, gradient):
    found, slope, terms = loss_of([ratio], [advantage], dual_clip=3.0)
    assert found == pytest.approx(loss, rel=1e-6)
    assert slope == pytest.approx([gradient], rel=1e-6)
    assert terms.clipped.tolist() == [gradient == 0]


# Sequence ratio.


def test_the_sequence_ratio_is_the_geometric_mean_of_a_trajectorys_ratios():
    """Trajectories of ratios (4, 1) and (1.1): means 2 and 1.1; A = 1 and 3; token-wise the 4 alone were clipped."""
    loss, gradient, terms = loss_of([4.0, 1.0, 1.1], [1.0, 1.0, 3.0], lengths=[2, 1], ratio="sequence")
    assert terms.clipped.tolist() == [True, True, False]
    assert loss == pytest.approx(-1.2 - 1.2 - 3.3, rel=1e-6)
    assert gradient == pytest.approx([0.0, 0.0, -3.3], rel=1e-6)


def test_the_gradient_of_the_sequence_ratio_is_shared_by_its_tokens():
    """GSPO: s A (1/n) Σ ∇ log π, here with s = sqrt(1.1), A = 2 and n = 2: s for each token."""
    loss, gradient, _ = loss_of([1.1, 1.0], [2.0, 2.0], aggregation=[0.5, 0.5], ratio="sequence")
    ratio = math.sqrt(1.1)
    assert loss == pytest.approx(-2 * ratio, rel=1e-6)
    assert gradient == pytest.approx([-ratio, -ratio], rel=1e-6)


def test_sequence_means_stay_within_their_trajectories():
    found = sequence_mean(torch.tensor([1.0, 3.0, 5.0, 0.0, 4.0, 8.0]), [2, 1, 3])
    assert found.tolist() == [2.0, 2.0, 5.0, 4.0, 4.0, 4.0]


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


def test_k3_has_no_gradient_where_it_is_bounded():
    """Without the bound of its exponent, NaN: infinity times 0."""
    log_policy = torch.tensor([-100.0, -25.0], requires_grad=True)
    k3_kl(log_policy, torch.zeros(2)).sum().backward()
    assert log_policy.grad.tolist() == [0.0, 0.0]


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


# Entropy bonus.


def test_the_entropy_bonus_by_hand():
    """0.1 (0.5 x 2 + 0.25 x 4) = 0.2 off the loss; the correction of the sampling policy has no part in it."""
    settings = {"aggregation": [0.5, 0.25], "weights": [0.3, 2.0]}
    plain, plain_gradient, _ = loss_of([1.1, 0.9], [1.0, -1.0], **settings)
    entropy = torch.tensor([2.0, 4.0], requires_grad=True)
    loss, gradient, terms = loss_of([1.1, 0.9], [1.0, -1.0], entropy=entropy, entropy_coef=0.1, **settings)
    assert loss == pytest.approx(plain - 0.2, rel=1e-6)
    assert gradient == plain_gradient
    assert terms.loss.sum().item() == pytest.approx(loss)
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.05, -0.025])


def test_without_a_bonus_entropies_change_nothing():
    entropy = torch.tensor([2.0, 4.0], requires_grad=True)
    assert loss_of([1.1, 0.9], [1.0, -1.0], entropy=entropy)[:2] == loss_of([1.1, 0.9], [1.0, -1.0])[:2]
    assert entropy.grad is None


def test_a_bonus_without_entropies_is_refused():
    with pytest.raises(ValueError, match="an entropy bonus needs the entropy of every token"):
        loss_of([1.0], [1.0], entropy_coef=0.1)


@pytest.mark.parametrize(
    "name", ["log_behaviour", "log_prox", "log_reference", "advantages", "weights", "aggregation", "entropy"]
)
@pytest.mark.parametrize("wrong", [(2, 1), (1, 2), (1,), ()])
def test_what_is_no_vector_over_the_tokens_is_refused_and_not_broadcast(name, wrong):
    """Advantages [T, 1] gave a loss of -4 for -1."""
    vectors = {field: torch.zeros(2) for field in Tokens.__slots__ if field != "lengths"} | {"entropy": torch.zeros(2)}
    vectors[name] = torch.zeros(wrong)
    entropy = vectors.pop("entropy")
    with pytest.raises(ValueError, match=rf"{name} must have shape \[2\], got \[{', '.join(map(str, wrong))}\]"):
        policy_loss(torch.zeros(2), Tokens(lengths=[1, 1], **vectors), Surrogate(), entropy)


def test_lengths_that_do_not_sum_to_the_tokens_are_refused():
    with pytest.raises(ValueError, match=r"log_policy must have shape \[3\], got \[2\]"):
        loss_of([1.0, 1.0], [1.0, 1.0], lengths=[1, 2])


def test_modes_that_there_are_not_are_refused():
    """They fell into the last branch."""
    one = torch.zeros(1)
    with pytest.raises(ValueError, match=r"the aggregation must be one of token-mean, .*, got 'tokenmean'"):
        aggregation_weights([2, 3], "tokenmean", 10)
    with pytest.raises(ValueError, match=r"the correction must be one of tis, .*, got 'TIS'"):
        correction_weights(one, one, [1], "TIS", 0.5, 2.0)
    with pytest.raises(ValueError, match="the ratio must be one of token, sequence, got 'tokens'"):
        loss_of([1.0], [1.0], ratio="tokens")


def test_inputs_of_the_correction_have_one_length():
    long, short = torch.zeros(3), torch.zeros(1)
    with pytest.raises(ValueError, match=r"log_behaviour must have shape \[3\], got \[1\]"):
        correction_weights(long, short, [1, 2], "tis", 0.5, 2.0)
    with pytest.raises(ValueError, match=r"log_prox must have shape \[2\], got \[3\]"):
        correction_weights(long, long, [2], "tis", 0.5, 2.0)
    with pytest.raises(ValueError, match=r"versions must have shape \[3\], got \[1\]"):
        loglinear_proximal(long, long, short.int(), 1)


def test_a_trajectory_without_sampled_tokens_has_no_weight():
    with pytest.raises(ValueError, match=r"must have a sampled token, got lengths \[2, 0\]"):
        aggregation_weights([2, 0], "seq-mean-token-mean", 10)


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


# The whole loss.


@st.composite
def minibatches(draw):
    """(log π_θ [T], Tokens, Surrogate): random tokens of a few trajectories and every kind of loss."""
    seed = draw(st.integers(0, 2**32 - 1))
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    count = sum(lengths)
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return torch.randn(count, generator=generator) * scale

    log_prox = normal(1.0) - 2
    tokens = Tokens(
        lengths=lengths,
        log_behaviour=log_prox + normal(0.2),
        log_prox=log_prox,
        log_reference=log_prox + normal(0.3),
        advantages=normal(1.0),
        weights=torch.rand(count, generator=generator) * 2,
        aggregation=torch.rand(count, generator=generator) / count,
    )
    surrogate = Surrogate(
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=draw(st.sampled_from([None, 1.1, 3.0])),
        ratio=draw(st.sampled_from(["token", "sequence"])),
        kl_coef=draw(st.sampled_from([0.0, 0.05])),
    )
    log_policy = log_prox + normal(0.5)
    assume(not has_kink(log_policy, tokens, surrogate))
    return log_policy, tokens, surrogate


def has_kink(log_policy, tokens, surrogate):
    """Whether a ratio is so near to a bound that single and double precision may see it on different sides."""
    log_ratios = log_policy - tokens.log_prox
    if surrogate.ratio == "sequence":
        log_ratios = torch.stack([part.mean() for part in log_ratios.split(tokens.lengths)])
    bounds = [1 - surrogate.clip_low, 1 + surrogate.clip_high, surrogate.dual_clip or 1 + surrogate.clip_high]
    return bool((log_ratios[:, None] - torch.tensor(bounds).log()).abs().min() < 1e-5)


def literal_loss(log_policy, t, settings):
    """Word for word, in float64, one token at a time."""
    loss = torch.zeros((), dtype=torch.float64)
    first = 0
    for length in t.lengths:
        inside = range(first, first + length)
        first += length
        mean = sum(log_policy[j] - t.log_prox[j].double() for j in inside) / length
        for i in inside:
            log_ratio = mean if settings.ratio == "sequence" else log_policy[i] - t.log_prox[i].double()
            ratio, advantage = torch.exp(log_ratio), t.advantages[i].double()
            held = torch.clip(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
            surrogate = torch.minimum(ratio * advantage, held * advantage)
            if settings.dual_clip is not None and advantage < 0:
                surrogate = torch.maximum(surrogate, settings.dual_clip * advantage)
            log_u = t.log_reference[i].double() - log_policy[i]
            k3 = torch.clip(torch.exp(log_u) - log_u - 1, max=MAX_KL)
            term = -t.weights[i].double() * surrogate + settings.kl_coef * k3
            loss = loss + t.aggregation[i].double() * term
    return loss


@settings(deadline=None)  # the first call loads parts of torch
@given(minibatches())
def test_loss_and_gradient_are_those_of_the_literal_formula(batch):
    log_policy, tokens, surrogate = batch
    doubles = log_policy.double().requires_grad_()
    expected = literal_loss(doubles, tokens, surrogate)
    (expected_gradient,) = torch.autograd.grad(expected, doubles)
    singles = log_policy.clone().requires_grad_()
    loss, terms = policy_loss(singles, tokens, surrogate)
    (gradient,) = torch.autograd.grad(loss, singles)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(terms.loss.sum(), loss)


@given(minibatches())
def test_on_policy_the_gradient_is_reinforce_with_the_advantage_as_baseline_corrected_return(batch):
    """Staleness 0, w = 1, first mini-batch: r = 1, so ∂L/∂ log π_t = -a_t A_t, whatever the clip."""
    _, tokens, surrogate = batch
    fresh = replace(tokens, weights=torch.ones_like(tokens.weights), log_reference=None)
    fresh = replace(
        fresh, advantages=torch.repeat_interleave(fresh.advantages[: len(fresh.lengths)], torch.tensor(fresh.lengths))
    )
    fresh = replace(
        fresh, aggregation=torch.repeat_interleave(fresh.aggregation[: len(fresh.lengths)], torch.tensor(fresh.lengths))
    )
    log_policy = fresh.log_prox.clone().requires_grad_()
    loss, _ = policy_loss(log_policy, fresh, surrogate)
    (gradient,) = torch.autograd.grad(loss, log_policy)
    torch.testing.assert_close(gradient, -fresh.aggregation * fresh.advantages, rtol=1e-5, atol=1e-8)


@given(minibatches())
def test_the_parts_of_a_minibatch_sum_to_the_whole(batch):
    """One micro-batch per trajectory."""
    log_policy, tokens, surrogate = batch
    whole, terms = policy_loss(log_policy, tokens, surrogate)
    pieces = {
        name: torch.split(getattr(tokens, name), tokens.lengths) for name in Tokens.__slots__ if name != "lengths"
    }
    split = [
        policy_loss(
            own, Tokens(lengths=[tokens.lengths[i]], **{name: parts[i] for name, parts in pieces.items()}), surrogate
        )
        for i, own in enumerate(torch.split(log_policy, tokens.lengths))
    ]
    torch.testing.assert_close(sum(loss for loss, _ in split), whole, rtol=1e-5, atol=1e-6)
    assert sum(int(part.clipped.sum()) for _, part in split) == int(terms.clipped.sum())


@given(minibatches())
def test_the_terms_for_the_metrics_carry_no_gradient(batch):
    log_policy, tokens, surrogate = batch
    loss, terms = policy_loss(log_policy.requires_grad_(), tokens, surrogate)
    assert loss.requires_grad
    assert not any(t.requires_grad for t in (terms.loss, terms.clipped, terms.kl_reference))
