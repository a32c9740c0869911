"""The phase of SDGA-Phase, its trap and its reserve."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.algorithm.methods.sdga import (
    advance_phase,
    anti_plan,
    auto_plan,
    is_phase_trapped,
    phase_plan,
    reserved_of,
)
from tests.algorithm.problems import K, filled, pools

# The phase.


@given(pools())
def test_the_phase_advances_by_one_exactly_when_the_deeper_buckets_hold_the_budget(pool):
    capacities, budget, phase = pool
    s_max = len(capacities) - 1
    deeper = sum(c for s, c in enumerate(capacities) if s > phase + 1)
    expected = phase + 1 if deeper >= budget and phase < s_max - 1 else phase
    assert advance_phase(capacities, budget, phase) == expected


@pytest.mark.parametrize(("deeper", "phase"), [(K - 1, 0), (K, 1), (K + 1, 1)])
def test_the_phase_advances_at_the_budget_and_not_one_below(deeper, phase):
    assert advance_phase([500, 500, deeper - 10, 4, 3, 3], K, 0) == phase


def test_the_phase_advances_once_per_pool_however_deep_the_pool_is():
    assert advance_phase([0, 0, 0, 0, 0, 10 * K], K, 0) == 1


@given(st.lists(st.lists(st.integers(0, 60), min_size=6, max_size=6), max_size=30), st.integers(1, 150))
def test_over_a_run_the_phase_never_goes_back_and_never_beyond_s_max_minus_one(pools_of_run, budget):
    phase = 0
    for capacities in pools_of_run:
        after = advance_phase(capacities, budget, phase)
        assert phase <= after <= min(phase + 1, 4)
        phase = after


def test_with_one_search_there_is_one_phase():
    assert advance_phase([0, 10 * K], K, 0) == 0
    assert phase_plan([0, 10 * K], K, 0) == auto_plan(1, K)


def test_the_trap_is_a_bucket_that_fills_the_budget_while_the_deeper_ones_cannot():
    assert is_phase_trapped([0, K, 1, 0, 0, 0], K, 0)
    assert is_phase_trapped([0, 500, K - 10, 9, 0, 0], K, 0)
    assert is_phase_trapped([0, 0, 0, K, 1, 1], K, 2)
    assert not is_phase_trapped([0, K - 1, 1, 0, 0, 0], K, 0), "the rest of the budget goes deeper"
    assert not is_phase_trapped([0, K, K, 0, 0, 0], K, 0), "the phase advances"
    assert is_phase_trapped([500, K, 0, 0, 0, 0], K, 0), "and would stay so while nothing deeper is sampled"
    assert not is_phase_trapped([0, 0, 0, 0, 0, 500], K, 4), "nothing lies deeper than the last phase"


@given(pools(deepest=8))
def test_trapped_means_that_the_literal_plan_takes_depth_k_plus_one_only_and_the_phase_stays(pool):
    capacities, budget, phase = pool
    chosen = filled(capacities, phase_plan(capacities, budget, phase))
    is_last = phase == len(capacities) - 2
    stays = advance_phase(capacities, budget, phase) == phase and not is_last
    assert is_phase_trapped(capacities, budget, phase) == (stays and chosen[phase + 1] == budget)


@given(pools(), st.floats(0, 1, exclude_max=True))
def test_the_reserve_gives_the_deepest_first_and_the_plan_still_sums_to_the_budget(pool, reserve):
    capacities, budget, phase = pool
    plan = phase_plan(capacities, budget, phase, reserve)
    left = reserved_of(reserve, budget)
    for s in range(len(capacities) - 1, phase + 1, -1):
        assert plan.targets[s] == min(capacities[s], left)
        left -= plan.targets[s]
    assert sum(plan.targets) == budget
    assert plan.targets[: phase + 1] == [0] * (phase + 1)
    assert plan.targets[phase + 1] >= budget - reserved_of(reserve, budget)
    assert plan.priorities == phase_plan(capacities, budget, phase).priorities


@pytest.mark.parametrize(
    ("reserve", "budget", "reserved"),
    [(0.29, 100, 29), (0.58, 50, 29), (0.57, 100, 57), (0.7, 90, 63), (0.25, 96, 24), (0.01, 99, 0), (0.0, 8, 0)],
)
def test_the_reserve_is_a_whole_number_of_the_budget_as_it_is_written(reserve, budget, reserved):
    """The first four were one too small: 0.29 * 100 is 28.999999999999996."""
    assert reserved_of(reserve, budget) == reserved
    deep = phase_plan([0, budget, budget, budget], budget, 0, reserve)
    assert (deep.targets[3], deep.targets[1]) == (reserved, budget - reserved)


def test_half_a_reserve_by_hand():
    """K = 10: 5 in reserve, of which depth 4 takes 2 and depth 3 takes 3; depth 1 gets the other 5."""
    plan = phase_plan([9, 20, 7, 6, 2], 10, 0, 0.5)
    assert plan.targets == [0, 5, 0, 3, 2]
    assert filled([9, 20, 7, 6, 2], plan) == [0, 5, 0, 3, 2]


def test_a_reserve_that_finds_nothing_deeper_goes_to_the_phase():
    assert phase_plan([9, 20, 0, 1], 10, 0, 0.5).targets == [0, 9, 0, 1]


@given(pools())
def test_without_a_reserve_the_plan_is_the_papers(pool):
    capacities, budget, phase = pool
    targets = [budget if s == phase + 1 else 0 for s in range(len(capacities))]
    assert phase_plan(capacities, budget, phase, 0.0).targets == targets


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([1, 1, 1], 1, 2), "phase must be in \\[0, 1\\], got 2"),
        (([1, 1, 1], 1, -1), "phase must be in \\[0, 1\\], got -1"),
        (([1, 1, 1], 0, 0), "budget must be >= 1, got 0"),
        (([1], 1, 0), "s_max must be >= 1, got 0"),
        (([1, 1, 1], 1, 0, 1.0), "reserve must be in"),
        (([1, 1, 1], 1, 0, -0.1), "reserve must be in"),
    ],
)
def test_phase_plan_names_what_is_out_of_range(arguments, named):
    with pytest.raises(ValueError, match=named):
        phase_plan(*arguments)


@pytest.mark.parametrize("plan", [auto_plan, anti_plan])
def test_auto_and_anti_name_what_is_out_of_range(plan):
    with pytest.raises(ValueError, match="s_max must be >= 1, got 0"):
        plan(0, 1)
    with pytest.raises(ValueError, match="budget must be >= 1, got 0"):
        plan(5, 0)
