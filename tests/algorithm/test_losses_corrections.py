"""The off-policy weights and the log-linear proximal policy, by hand and against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.algorithm.losses import MAX_LOG_RATIO, correction_weights, loglinear_proximal

# Correction of the sampling policy.


def corrected(mode, w, low=0.5, high=2.0, lengths=None):
    log_behaviour = torch.full((len(w),), -1.0)
    log_prox = (torch.tensor(w, dtype=torch.float64).log() - 1.0).float()
    return correction_weights(log_prox, log_behaviour, lengths or [len(w)], mode, low, high)


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


def test_the_geometric_correction_of_a_trajectory_does_not_see_its_neighbours():
    """The three above end to end, of 2, 2 and 2 tokens; over all six the mean is 1.04, inside."""
    found = corrected("geometric", [0.25, 8.0, 4.0, 4.0, 1.0, 0.04], lengths=[2, 2, 2])
    np.testing.assert_allclose(found, [0.25, 2.0, 0.0, 0.0, 0.0, 0.0], rtol=1e-5)


@pytest.mark.parametrize("mode", ["tis", "icepop", "mask", "geometric", "none"])
def test_on_policy_nothing_is_corrected(mode):
    weights = corrected(mode, [1.0, 1.0, 1.0])
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert weights.dtype == torch.float32


@pytest.mark.parametrize("mode", ["tis", "icepop", "mask", "geometric"])
@given(pairs=st.lists(st.tuples(st.floats(-100, 0, width=32), st.floats(-100, 0, width=32)), min_size=1, max_size=20))
def test_no_correction_exceeds_its_bound_or_is_negative(mode, pairs):
    log_prox, log_behaviour = torch.tensor(pairs).T
    weights = correction_weights(log_prox, log_behaviour, [len(pairs)], mode, 0.5, 2.0)
    assert weights.shape == log_prox.shape
    assert ((weights >= 0) & (weights <= 2)).all()


def literal_weights(log_prox, log_behaviour, mode, low, high):
    """One trajectory, one token at a time, in float64."""
    log_w = [min(max(p - b, -MAX_LOG_RATIO), MAX_LOG_RATIO) for p, b in zip(log_prox, log_behaviour, strict=True)]
    mean = math.exp(math.fsum(log_w) / len(log_w))
    found = []
    for w in map(math.exp, log_w):
        keep = {"icepop": low <= w <= high, "mask": w <= high, "geometric": low <= mean <= high}.get(mode, True)
        found.append(min(w, high) * keep if mode != "none" else 1.0)
    return found


@pytest.mark.parametrize("mode", ["tis", "icepop", "mask", "geometric", "none"])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), spread=st.floats(0, 3), seed=st.integers(0, 2**32 - 1)
)
def test_the_weights_of_packed_trajectories_are_those_of_the_definition_one_by_one(mode, lengths, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    log_behaviour = torch.randn(sum(lengths), generator=generator) - 2
    log_prox = log_behaviour + spread * torch.randn(sum(lengths), generator=generator)
    found = correction_weights(log_prox, log_behaviour, lengths, mode, 0.5, 2.0)
    pieces = zip(torch.split(log_prox, lengths), torch.split(log_behaviour, lengths), strict=True)
    wanted = [w for prox, log_mu in pieces for w in literal_weights(prox.tolist(), log_mu.tolist(), mode, 0.5, 2.0)]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


# The proximal policy without a forward pass.


@pytest.mark.parametrize(
    ("version", "log_prox"),
    [
        (7, -2.0),  # sampled by the policy of this step: it is the proximal one
        (6, -1.5),  # one step old: half way to the current policy
        (5, -2 + 2 / 3),
        (4, -1.25),
        (8, -2.0),  # newer weights came in between: nothing lies before the sampling policy
    ],
)
def test_the_loglinear_proximal_lies_between_sampling_and_current_policy_by_age(version, log_prox):
    """log μ = -2, log π_θ = -1, step 7: α = (7 - v) / (8 - v)."""
    versions = torch.tensor([version], dtype=torch.int32)
    found = loglinear_proximal(torch.tensor([-1.0]), torch.tensor([-2.0]), versions, 7)
    np.testing.assert_allclose(found, [log_prox], rtol=1e-6)
    assert found.dtype == torch.float32
