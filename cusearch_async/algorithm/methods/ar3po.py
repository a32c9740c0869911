"""AR3PO as the paper compares with it: more rollouts for questions that are neither solved nor hopeless.

Source: CuSearch, appendix "Comparison with Prompt-Level Adaptive Methods": the pass rate of each question over a
sliding window moves the rollout budget towards intermediate pass rates, N G rollouts per step in all. The paper
leaves window, rule and bounds open; here they are: the last WINDOW visits, p smoothed by Beta(1, 1), weight
p (1 - p), 1 to 2 G rollouts each, G for a question without history. All of it is exact: in floating point p (1 - p)
differs between p = 0.2 and p = 0.8, and a tie between a hopeless and a solved question would go to rounding noise.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec
import numpy as np

from cusearch_async.algorithm.methods.base import Candidates, PlansRollouts, Selection

WINDOW = 4
"""Visits to a question that its pass rate is taken over."""

Visits = tuple[tuple[int, int], ...]
"""The last visits to a question, oldest first: (rollouts that passed, all of its rollouts)."""


def add_visit(visits: Visits, passed: int, rollouts: int) -> Visits:
    """The history after one more visit; at most WINDOW of them."""
    return (*visits, (passed, rollouts))[-WINDOW:]


def pass_rate(visits: Visits) -> Fraction:
    """Posterior mean of the pass rate under a Beta(1, 1) prior, in (0, 1): 1/2 without any visit."""
    passed, rollouts = (sum(column) for column in zip(*visits, strict=True)) if visits else (0, 0)
    return Fraction(1 + passed, 2 + rollouts)


def divide_rollouts(histories: Sequence[Visits], rollouts: int) -> list[int]:
    """Rollouts of each question of a pool [N], 1 to 2 G each, N G in all, G being `rollouts`.

    Questions without history get G; the others share what is left in proportion to p (1 - p), rounded by
    largest remainder, ties to the earlier question.
    Raises: ValueError unless rollouts >= 1."""
    if rollouts < 1:
        raise ValueError(f"rollouts must be >= 1, got {rollouts}")
    sizes = [rollouts] * len(histories)
    known = [i for i, visits in enumerate(histories) if visits]
    if known:
        rates = [pass_rate(histories[i]) for i in known]
        shares = _bounded_shares([p * (1 - p) for p in rates], len(known) * rollouts, 1, 2 * rollouts)
        for i, share in zip(known, shares, strict=True):
            sizes[i] = share
    return sizes


class Ar3poMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    visits: dict[str, Visits] = {}
    """Question id -> its last visits."""


class Ar3po(PlansRollouts[Ar3poMemory]):
    """AR3PO: train on everything, and divide the next rollouts by each question's last results."""

    Memory = Ar3poMemory
    uses_whole_pool = True

    def select(self, pool: Candidates, memory: Ar3poMemory, rng: np.random.Generator) -> Selection[Ar3poMemory]:
        visits = dict(memory.visits)
        _, first, rollouts = np.unique(pool.tickets, return_index=True, return_counts=True)
        passed = np.add.reduceat(pool.passed, first, dtype=np.int64)
        for member, *visit in zip(first, passed.tolist(), rollouts.tolist(), strict=True):
            question = pool.questions[member]
            visits[question] = add_visit(visits.get(question, ()), *visit)
        return Selection(indices=np.arange(len(pool.depths)), memory=Ar3poMemory(visits))

    def largest_group(self, rollouts: int) -> int:
        return 2 * rollouts

    def group_sizes(self, memory: Ar3poMemory, questions: Sequence[str], rollouts: int) -> list[int]:
        return divide_rollouts([memory.visits.get(question, ()) for question in questions], rollouts)


def _bounded_shares(weights: Sequence[Fraction], total: int, low: int, high: int) -> list[int]:
    """Whole numbers in [low, high], summing to `total`, as nearly in proportion to `weights` > 0 as that allows."""
    scale = _scale(Counter(weights), total, low, high)
    exact = [_clip(scale * weight, low, high) for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])  # stable: ties stay in order
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def _scale(weights: Mapping[Fraction, int], total: int, low: int, high: int) -> Fraction:
    """The x at which the sum of clip(x w, low, high) is `total`, `weights` saying how often each w occurs.

    The sum is piecewise linear in x, bent where a weight meets a bound: find the first bend at which it reaches
    `total`, then go back along the line."""

    def sum_at(x: Fraction) -> Fraction:
        return sum((count * _clip(x * weight, low, high) for weight, count in weights.items()), Fraction())

    bends = sorted({Fraction(bound) / weight for weight in weights for bound in (low, high)})
    right = bisect_left(bends, Fraction(total), key=sum_at)
    if right == 0:
        return bends[0]
    before, after = sum_at(bends[right - 1]), sum_at(bends[right])
    return bends[right - 1] + (total - before) / (after - before) * (bends[right] - bends[right - 1])


def _clip(value: Fraction, low: int, high: int) -> Fraction:
    return min(max(value, Fraction(low)), Fraction(high))
