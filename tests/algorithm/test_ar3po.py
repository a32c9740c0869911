"""AR3PO's division of rollouts: by hand, and what it promises for any history."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.algorithm.methods.ar3po import WINDOW, Ar3po, add_visit, divide_rollouts, pass_rate
from cusearch_async.algorithm.methods.base import MethodSettings

VISIT = st.integers(1, 12).flatmap(lambda played: st.tuples(st.integers(0, played), st.just(played)))
HISTORY = st.lists(VISIT, max_size=WINDOW).map(tuple)


@pytest.mark.parametrize(
    ("visits", "rate"),
    [((), 1 / 2), (((0, 3),), 1 / 5), (((3, 3),), 4 / 5), (((1, 3), (2, 3)), 4 / 8), (((0, 3),) * 4, 1 / 14)],
)
def test_the_pass_rate_is_smoothed_by_one_pass_and_one_failure(visits, rate):
    assert float(pass_rate(visits)) == rate


@given(HISTORY, VISIT)
def test_the_history_keeps_the_last_visits(visits, visit):
    after = add_visit(visits, *visit)
    assert after[-1] == visit
    assert after == (*visits, visit)[-WINDOW:]


@given(st.lists(HISTORY, max_size=70), st.integers(1, 8))
def test_every_question_gets_one_to_2g_and_all_together_exactly_n_g(histories, rollouts):
    sizes = divide_rollouts(histories, rollouts)
    assert sum(sizes) == len(histories) * rollouts
    assert all(1 <= size <= 2 * rollouts for size in sizes)
    assert Ar3po(MethodSettings(), 1).largest_group(rollouts) == 2 * rollouts


@given(st.lists(HISTORY, max_size=70), st.integers(1, 8))
def test_a_question_without_history_gets_g(histories, rollouts):
    for visits, size in zip(histories, divide_rollouts(histories, rollouts), strict=True):
        assert visits or size == rollouts


@given(st.lists(HISTORY.filter(bool), min_size=2, max_size=40), st.integers(1, 8))
def test_a_question_nearer_to_one_half_never_gets_less(histories, rollouts):
    """Rounding aside: one rollout."""
    sizes = np.array(divide_rollouts(histories, rollouts))
    doubt = [pass_rate(visits) * (1 - pass_rate(visits)) for visits in histories]
    order = sorted(range(len(doubt)), key=doubt.__getitem__)
    most_so_far = np.maximum.accumulate(sizes[order])
    assert (sizes[order] >= most_so_far - 1).all()


def brute_force(weights, total, low, high):
    """Largest remainder over the bounded proportional shares, the scale found by bisection."""
    left, right = 0.0, high / min(weights)
    for _ in range(200):
        middle = (left + right) / 2
        left, right = (middle, right) if np.clip(middle * weights, low, high).sum() < total else (left, middle)
    return np.clip(right * weights, low, high)


@given(st.lists(HISTORY.filter(bool), min_size=1, max_size=30), st.integers(1, 8))
def test_shares_are_the_bounded_proportional_ones_rounded(histories, rollouts):
    weights = np.array([float(pass_rate(visits) * (1 - pass_rate(visits))) for visits in histories])
    exact = brute_force(weights, len(histories) * rollouts, 1, 2 * rollouts)
    assert (np.abs(np.array(divide_rollouts(histories, rollouts)) - exact) < 1 + 1e-6).all()


def test_by_hand_with_the_papers_three_rollouts():
    """p (1 - p): never passed 4/25, once in three 6/25, always 4/25; 9 rollouts: 2.57, 3.86, 2.57 -> 3, 4, 2."""
    assert divide_rollouts([((0, 3),), ((1, 3),), ((3, 3),)], 3) == [3, 4, 2]


HOPELESS, SOLVED, BETWEEN = ((0, 3),), ((3, 3),), ((2, 3),)
"""Pass rates 0.2, 0.8 and 0.6."""


@pytest.mark.parametrize("tied", [(HOPELESS, SOLVED), (SOLVED, HOPELESS)])
def test_a_tie_goes_to_the_earlier_question_whichever_side_of_one_half_it_is_on(tied):
    """0.16, 0.16 and 0.24 of nine rollouts: 2.57, 2.57, 3.86. One is left for the two that are tied."""
    assert divide_rollouts([*tied, BETWEEN], 3) == [3, 2, 4]


@given(st.lists(HISTORY, max_size=40), st.integers(1, 8))
def test_passes_and_failures_are_treated_alike(histories, rollouts):
    """p (1 - p) is that of 1 - p."""
    mirrored = [tuple((played - passed, played) for passed, played in visits) for visits in histories]
    assert divide_rollouts(mirrored, rollouts) == divide_rollouts(histories, rollouts)


def test_hopeless_questions_keep_one_and_hopeful_ones_stop_at_twice_g():
    hopeless, hopeful = ((0, 12),) * 4, ((6, 12),) * 4
    assert divide_rollouts([hopeless, hopeless, hopeless, hopeful], 3) == [2, 2, 2, 6]
    assert divide_rollouts([hopeless, hopeful, hopeful, hopeful], 3) == [1, 4, 4, 3]


def test_equal_histories_share_equally():
    assert divide_rollouts([((1, 3),)] * 5, 3) == [3] * 5


def test_no_questions_are_no_problem():
    assert divide_rollouts([], 3) == []


def test_no_rollouts_are_no_problem_to_divide():
    with pytest.raises(ValueError, match="rollouts must be >= 1, got 0"):
        divide_rollouts([()], 0)
