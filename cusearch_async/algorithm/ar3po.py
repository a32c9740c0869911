"""AR3PO as the paper compares with it: more rollouts for questions that are neither solved nor hopeless.

Source: CuSearch, appendix "Comparison with Prompt-Level Adaptive Methods": the pass rate of each question over a
sliding window moves the rollout budget towards intermediate pass rates, N G rollouts per step in all. The paper
leaves window, rule and bounds open; here they are: the last WINDOW visits, p smoothed by Beta(1, 1), weight
p (1 - p), 1 to 2 G rollouts each, G for a question without history.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WINDOW = 4
"""Visits to a question that its pass rate is taken over."""

Visits = tuple[tuple[int, int], ...]
"""The last visits to a question, oldest first: (rollouts that passed, rollouts played)."""


def add_visit(visits: Visits, passed: int, played: int) -> Visits:
    """The history after one more visit; at most WINDOW of them."""
    return (*visits, (passed, played))[-WINDOW:]


def pass_rate(visits: Visits) -> float:
    """Posterior mean of the pass rate under a Beta(1, 1) prior, in (0, 1): 1/2 without any visit."""
    passed, played = (sum(column) for column in zip(*visits, strict=True)) if visits else (0, 0)
    return (1 + passed) / (2 + played)


def divide_rollouts(histories: Sequence[Visits], rollouts: int) -> list[int]:
    """Rollouts of each question of a pool [N], 1 to 2 G each, N G in all, G being `rollouts`.

    Questions without history get G; the others share what is left in proportion to p (1 - p), rounded by
    largest remainder, ties to the earlier question.
    Raises: ValueError unless rollouts >= 1."""
    if rollouts < 1:
        raise ValueError(f"rollouts must be >= 1, got {rollouts}")
    sizes = np.full(len(histories), rollouts)
    known = [i for i, visits in enumerate(histories) if visits]
    if known:
        rates = np.array([pass_rate(histories[i]) for i in known])
        sizes[known] = _bounded_shares(rates * (1 - rates), len(known) * rollouts, 1, 2 * rollouts)
    return [int(size) for size in sizes]


def _bounded_shares(weights: NDArray[np.float64], total: int, low: int, high: int) -> NDArray[np.int64]:
    """Whole numbers in [low, high], summing to `total`, as nearly in proportion to `weights` > 0 as that allows."""
    exact = np.clip(weights * _scale(weights, total, low, high), low, high)
    shares = np.floor(exact + 1e-9).astype(np.int64)
    for i in np.argsort(shares - exact, kind="stable")[: total - int(shares.sum())]:
        shares[i] += 1
    return shares


def _scale(weights: NDArray[np.float64], total: int, low: int, high: int) -> float:
    """The x at which the sum of clip(x w, low, high) is `total`. The sum is piecewise linear in x, bent where a
    weight meets a bound: find the bend at or above `total`, then go back along the line."""
    bends = np.unique(np.concatenate([low / weights, high / weights]))
    sums = np.array([np.clip(x * weights, low, high).sum() for x in bends])
    right = min(int(np.searchsorted(sums, total)), len(bends) - 1)
    if right == 0:
        return float(bends[0])
    rise = sums[right] - sums[right - 1]
    share = (total - sums[right - 1]) / rise if rise > 0 else 0.0
    return float(bends[right - 1] + share * (bends[right] - bends[right - 1]))
