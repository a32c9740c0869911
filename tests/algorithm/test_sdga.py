"""SDGA against the paper: its worked examples, its algorithm transcribed word by word, and what it promises."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cusearch_async.algorithm.methods.sdga import (
    Plan,
    allocate,
    anti_plan,
    auto_plan,
    count_depths,
    phase_plan,
    reserved_of,
    sample_buckets,
)
from tests.algorithm.problems import K, filled, pools, problems


def paper_allocate(capacities, targets, priorities):
    """Algorithm "SDGA: Detailed Version", line by line; ties of the argsort go to the shallower bucket."""
    c, f = list(capacities), list(targets)
    sigma = [int(s) for s in np.argsort(priorities, kind="stable")]
    for s in sigma:
        if f[s] <= c[s]:
            continue
        d = f[s] - c[s]
        f[s] = c[s]
        for r in sigma[sigma.index(s) + 1 :]:
            if d == 0:
                break
            spare = c[r] - f[r]
            if spare > 0:
                delta = min(spare, d)
                f[r] = f[r] + delta
                d = d - delta
        if d > 0:
            for r in reversed(sigma[: sigma.index(s)]):
                if d == 0:
                    break
                spare = c[r] - f[r]
                if spare > 0:
                    delta = min(spare, d)
                    f[r] = f[r] + delta
                    d = d - delta
    return f


def main_text_allocate(capacities, targets, priorities):
    """Algorithm "Search-Depth Greedy Allocation" of the main text, line by line: it has no `spare > 0`."""
    c, f = list(capacities), list(targets)
    sigma = [int(s) for s in np.argsort(priorities, kind="stable")]
    for place, s in enumerate(sigma):
        if f[s] > c[s]:
            d, f[s] = f[s] - c[s], c[s]
            for r in [*sigma[place + 1 :], *reversed(sigma[:place])]:
                if d == 0:
                    break
                delta = min(c[r] - f[r], d)
                f[r], d = f[r] + delta, d - delta
    return f


def one_by_one(capacities, targets, priorities):
    """The same rule without arithmetic: every surplus trajectory walks to the first bucket that has room."""
    order = sorted(range(len(priorities)), key=lambda s: (priorities[s], s))
    filled = list(targets)
    for place, s in enumerate(order):
        while filled[s] > capacities[s]:
            filled[s] -= 1
            for r in [*order[place + 1 :], *reversed(order[:place])]:
                if filled[r] < capacities[r]:
                    filled[r] += 1
                    break
    return filled


# The paper's worked examples, S_max = 5.


@pytest.mark.parametrize(
    ("phase", "targets", "priorities"),
    [
        (0, [0, K, 0, 0, 0, 0], [6, 1, 2, 3, 4, 5]),
        (1, [0, 0, K, 0, 0, 0], [6, 5, 1, 2, 3, 4]),
        (2, [0, 0, 0, K, 0, 0], [6, 5, 4, 1, 2, 3]),
        (3, [0, 0, 0, 0, K, 0], [6, 5, 4, 3, 1, 2]),
        (4, [0, 0, 0, 0, 0, K], [6, 5, 4, 3, 2, 1]),
    ],
)
def test_phase_plans_are_those_the_paper_lists(phase, targets, priorities):
    assert phase_plan([9, 9, 9, 9, 9, 9], K, phase) == Plan(targets, priorities)


def test_the_auto_and_the_anti_plan_are_those_the_paper_lists():
    assert auto_plan(5, K) == Plan([0, 0, 0, 0, 0, K], [6, 5, 4, 3, 2, 1])
    assert anti_plan(5, K) == Plan([K, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6])


def test_phase_1_falls_to_deeper_buckets_first_and_then_to_shallower_ones():
    """2 -> 3 -> 4 -> 5 -> 1 -> 0, each budget ending one bucket further."""
    capacities = [10, 10, 10, 10, 10, 10]
    assert [filled(capacities, phase_plan(capacities, budget, 1)) for budget in (8, 18, 28, 38, 48, 58, 68)] == [
        [0, 0, 8, 0, 0, 0],
        [0, 0, 10, 8, 0, 0],
        [0, 0, 10, 10, 8, 0],
        [0, 0, 10, 10, 10, 8],
        [0, 8, 10, 10, 10, 10],
        [8, 10, 10, 10, 10, 10],
        [10, 10, 10, 10, 10, 10],
    ]


@given(s_max=st.integers(1, 50), budget=st.integers(1, 500))
def test_the_last_phase_is_sdga_auto(s_max, budget):
    assert phase_plan([3] * (s_max + 1), budget, s_max - 1) == auto_plan(s_max, budget)


@given(pools())
def test_every_plan_aims_the_whole_budget_and_ranks_every_bucket_once(pool):
    capacities, budget, phase = pool
    s_max = len(capacities) - 1
    for plan in (phase_plan(capacities, budget, phase), auto_plan(s_max, budget), anti_plan(s_max, budget)):
        assert sum(plan.targets) == budget
        assert sorted(plan.priorities) == list(range(1, s_max + 2))


# allocate: what it promises for any target.


@given(problems())
def test_allocate_is_the_papers_algorithm(problem):
    assert allocate(*problem) == paper_allocate(*problem)


@given(problems())
def test_the_main_texts_algorithm_comes_to_the_same_without_the_guard(problem):
    """What it takes off an over-target bucket joins the overflow, and it stops where that is used up."""
    assert allocate(*problem) == main_text_allocate(*problem)


@given(problems(deepest=6, largest=12))
def test_allocate_moves_each_surplus_trajectory_to_the_nearest_room(problem):
    assert allocate(*problem) == one_by_one(*problem)


@pytest.mark.parametrize("priorities", [(1, 2, 3), (3, 2, 1), (2, 1, 3), (1, 1, 1)])
def test_allocate_agrees_with_single_moves_on_every_small_problem(priorities):
    for capacities in itertools.product(range(4), repeat=3):
        for targets in itertools.product(range(4), repeat=3):
            assert allocate(capacities, targets, priorities) == one_by_one(capacities, targets, priorities)


def test_a_one_bucket_target_gets_the_best_of_all_feasible_allocations():
    """Best by exhaustion: as much as possible where the plan looks first, then where it looks next, and so on."""
    tried = 0
    for capacities in itertools.product(range(4), repeat=4):
        for budget in (1, 4, 7):
            looks = {
                (0, 1, 2, 3): anti_plan(3, budget),
                (3, 2, 1, 0): auto_plan(3, budget),
                (1, 2, 3, 0): phase_plan(capacities, budget, 0),
                (2, 3, 1, 0): phase_plan(capacities, budget, 1),
            }
            total = min(budget, sum(capacities))
            feasible = [f for f in itertools.product(*(range(c + 1) for c in capacities)) if sum(f) == total]
            for order, plan in looks.items():
                best = max(feasible, key=lambda f, order=order: [f[s] for s in order])
                assert filled(capacities, plan) == list(best)
                tried += 1
    assert tried == 256 * 3 * 4


@given(problems())
@example(([0, 0], [1, 0], [1, 2]))
def test_no_bucket_is_overdrawn_and_no_trajectory_is_lost(problem):
    capacities, targets, _ = problem
    filled = allocate(*problem)
    assert all(0 <= f <= c for f, c in zip(filled, capacities, strict=True))
    assert sum(filled) == min(sum(targets), sum(capacities))


@given(problems())
def test_a_bucket_with_more_wanted_than_there_is_gives_all_it_has(problem):
    capacities, targets, _ = problem
    for found, capacity, target in zip(allocate(*problem), capacities, targets, strict=True):
        assert found >= min(target, capacity)


@given(problems())
def test_a_feasible_allocation_is_left_as_it_is(problem):
    capacities, _, priorities = problem
    filled = allocate(*problem)
    assert allocate(capacities, filled, priorities) == filled


@given(problems())
def test_overflow_never_passes_a_bucket_that_has_room(problem):
    """Where a bucket has room to the end, those after it hold what they wanted themselves, as far as they can."""
    capacities, targets, priorities = problem
    filled = allocate(*problem)
    order = sorted(range(len(priorities)), key=lambda s: (priorities[s], s))
    for place, s in enumerate(order):
        if filled[s] < capacities[s]:
            later = order[place + 1 :]
            wanted, there = sum(targets[r] for r in later), sum(capacities[r] for r in later)
            assert sum(filled[r] for r in later) == min(wanted, there)


@pytest.mark.parametrize(
    ("capacities", "targets", "priorities", "expected"),
    [
        # back to an earlier bucket only when the later ones are full, and then to the nearest
        ([5, 2, 4], [0, 5, 0], [1, 2, 3], [0, 2, 3]),
        ([5, 2, 2], [0, 5, 0], [1, 2, 3], [1, 2, 2]),
        ([9, 2, 1], [0, 0, 5], [1, 2, 3], [2, 2, 1]),
        # bucket 1 wants 4 and holds 1: its spare of -3 must not draw trajectories out of it and hand them on
        ([1, 1, 9], [3, 4, 0], [1, 2, 3], [1, 1, 5]),
        # past a low bucket that is itself over target
        ([9, 0, 2], [0, 3, 5], [1, 2, 3], [6, 0, 2]),
        # equal priorities: the shallower first, and back from the last one
        ([1, 9, 9], [3, 0, 0], [1, 1, 1], [1, 2, 0]),
        ([9, 9, 1], [0, 0, 3], [1, 1, 1], [0, 2, 1]),
    ],
)
def test_overflow_by_hand(capacities, targets, priorities, expected):
    assert allocate(capacities, targets, priorities) == expected


@pytest.mark.parametrize(
    ("capacities", "targets", "priorities", "named"),
    [
        ([1, 1], [1, 0, 0], [1, 2], "one entry per depth, got 2, 3 and 2"),
        ([1, 1], [1, 0], [1], "one entry per depth, got 2, 2 and 1"),
        ([1, -1], [1, 0], [1, 2], ">= 0"),
        ([1, 1], [-1, 0], [1, 2], ">= 0"),
    ],
)
def test_allocate_refuses_what_is_no_allocation_problem(capacities, targets, priorities, named):
    with pytest.raises(ValueError, match=named):
        allocate(capacities, targets, priorities)


@given(capacities=st.lists(st.integers(0, 50), min_size=2, max_size=51), budget=st.integers(1, 200))
@example(capacities=[0, 0], budget=1)
def test_auto_never_leaves_out_a_deeper_trajectory(capacities, budget):
    s_max = len(capacities) - 1
    chosen = filled(capacities, auto_plan(s_max, budget))
    shallowest = min((s for s in range(s_max + 1) if chosen[s]), default=0)
    assert sum(chosen) == min(budget, sum(capacities))
    assert chosen[shallowest + 1 :] == capacities[shallowest + 1 :]


@given(capacities=st.lists(st.integers(0, 50), min_size=2, max_size=51), budget=st.integers(1, 200))
def test_anti_is_auto_upside_down(capacities, budget):
    s_max = len(capacities) - 1
    upside_down = filled(capacities[::-1], auto_plan(s_max, budget))[::-1]
    assert filled(capacities, anti_plan(s_max, budget)) == upside_down


PLANS = {
    "auto": lambda capacities, budget, phase, reserve: auto_plan(len(capacities) - 1, budget),
    "anti": lambda capacities, budget, phase, reserve: anti_plan(len(capacities) - 1, budget),
    "phase": lambda capacities, budget, phase, reserve: phase_plan(capacities, budget, phase),
    "reserved": phase_plan,
}


@pytest.mark.parametrize("name", PLANS)
@given(pools(), st.floats(0, 1, exclude_max=True))
def test_a_larger_budget_never_takes_less_of_any_depth(name, pool, reserve):
    capacities, budget, phase = pool
    less, more = (filled(capacities, PLANS[name](capacities, k, phase, reserve)) for k in (budget, budget + 1))
    assert all(a <= b for a, b in zip(less, more, strict=True))


@given(problems(deepest=8, largest=12), st.data())
def test_another_trajectory_of_a_depth_that_had_enough_changes_nothing(problem, data):
    """Where no bucket wants more than it has, the plan is fulfilled, whatever else lies in the buckets."""
    capacities, targets, priorities = problem
    enough = [max(c, t) + data.draw(st.integers(0, 3)) for c, t in zip(capacities, targets, strict=True)]
    assert allocate(enough, targets, priorities) == targets


# Coverage: the paper's "Optimality of Top-K Selection".


def test_the_deepest_k_cover_most_retrieval_tokens_of_all_subsets_of_size_k():
    """By exhaustion: |R(τ)| = L per search, every pool of 7 with depths up to 3, every K."""
    for depths in itertools.combinations_with_replacement(range(4), 7):
        columns = np.array(depths, dtype=np.int64)
        capacities = count_depths(columns, 3)
        for budget in range(1, 8):
            chosen = sample_buckets(columns, filled(capacities, auto_plan(3, budget)), np.random.default_rng(0))
            best = max(sum(subset) for subset in itertools.combinations(depths, budget))
            assert columns[chosen].sum() == best


@given(pools(deepest=8), st.floats(0, 1, exclude_max=True))
def test_the_reserve_never_covers_less_than_the_literal_phase(pool, reserve):
    capacities, budget, phase = pool
    literal, reserved = (filled(capacities, phase_plan(capacities, budget, phase, r)) for r in (0.0, reserve))
    assert sum(reserved) == sum(literal)
    assert sum(s * f for s, f in enumerate(reserved)) >= sum(s * f for s, f in enumerate(literal))


@given(pools(deepest=8), st.floats(0.01, 1, exclude_max=True))
def test_with_a_reserve_no_pool_leaves_every_deeper_trajectory_out(pool, reserve):
    capacities, budget, phase = pool
    chosen = filled(capacities, phase_plan(capacities, budget, phase, reserve))
    deeper = sum(capacities[phase + 2 :])
    assert sum(chosen[phase + 2 :]) >= min(reserved_of(reserve, budget), deeper)


def test_who_is_drawn_of_one_depth_says_nothing_of_who_is_drawn_of_another():
    """Two of four at depth 0, one of four at depth 2: each of the 6 x 4 pairs of draws equally often."""
    depths, draws = np.repeat([0, 1, 2], 4), 4800
    rng = np.random.default_rng(3)
    found = Counter(tuple(sample_buckets(depths, [2, 0, 1], rng).tolist()) for _ in range(draws))
    expected = draws / 24
    assert len(found) == 24
    assert max(abs(count - expected) for count in found.values()) < 5 * math.sqrt(expected)
