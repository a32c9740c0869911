"""SDGA against the paper: its worked examples, its algorithm transcribed word by word, and what it promises."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cusearch_async.algorithm.methods.sdga import (
    Plan,
    advance_phase,
    allocate,
    anti_plan,
    auto_plan,
    count_depths,
    is_phase_trapped,
    phase_plan,
    sample_buckets,
)

K = 96


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


@st.composite
def problems(draw, deepest=50, largest=60):
    """(capacities, targets, priorities): any target over several buckets, any priorities, ties included."""
    length = draw(st.integers(2, deepest + 1))
    counts = st.lists(st.integers(0, largest), min_size=length, max_size=length)
    ranks = st.lists(st.integers(0, length), min_size=length, max_size=length)
    return draw(counts), draw(counts), draw(st.permutations(range(length)) | ranks)


@st.composite
def pools(draw, deepest=50):
    """(capacities, budget, phase) of a pool that phase k may meet."""
    s_max = draw(st.integers(1, deepest))
    capacities = draw(st.lists(st.integers(0, 60), min_size=s_max + 1, max_size=s_max + 1))
    return capacities, draw(st.integers(1, 200)), draw(st.integers(0, s_max - 1))


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


def test_the_auto_plan_is_the_one_the_paper_lists():
    assert auto_plan(5, K) == Plan([0, 0, 0, 0, 0, K], [6, 5, 4, 3, 2, 1])


def test_the_anti_plan_is_the_one_the_paper_lists():
    assert anti_plan(5, K) == Plan([K, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6])


def test_phase_1_falls_to_deeper_buckets_first_and_then_to_shallower_ones():
    """2 -> 3 -> 4 -> 5 -> 1 -> 0, each budget ending one bucket further."""
    capacities = [10, 10, 10, 10, 10, 10]
    allocations = []
    for budget in (8, 18, 28, 38, 48, 58, 68):
        plan = phase_plan(capacities, budget, 1)
        allocations.append(allocate(capacities, plan.targets, plan.priorities))
    assert allocations == [
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
                assert allocate(capacities, plan.targets, plan.priorities) == list(best)
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
    for filled, capacity, target in zip(allocate(*problem), capacities, targets, strict=True):
        assert filled >= min(target, capacity)


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


def test_overflow_goes_back_to_an_earlier_bucket_only_when_the_later_ones_are_full():
    assert allocate([5, 2, 4], [0, 5, 0], [1, 2, 3]) == [0, 2, 3]
    assert allocate([5, 2, 2], [0, 5, 0], [1, 2, 3]) == [1, 2, 2]


def test_overflow_goes_back_to_the_nearest_earlier_bucket():
    assert allocate([9, 2, 1], [0, 0, 5], [1, 2, 3]) == [2, 2, 1]


def test_overflow_is_not_taken_from_a_later_bucket_that_is_itself_over_target():
    """Bucket 1 wants 4 and holds 1: its spare of -3 must not draw trajectories out of it and hand them on."""
    assert allocate([1, 1, 9], [3, 4, 0], [1, 2, 3]) == [1, 1, 5]


def test_overflow_skips_an_over_target_low_bucket_and_finds_room_before_it():
    assert allocate([9, 0, 2], [0, 3, 5], [1, 2, 3]) == [6, 0, 2]


def test_equal_priorities_are_served_shallower_first():
    assert allocate([1, 9, 9], [3, 0, 0], [1, 1, 1]) == [1, 2, 0]
    assert allocate([9, 9, 1], [0, 0, 3], [1, 1, 1]) == [0, 2, 1], "back from the last, the nearest is the deepest"


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
    plan = auto_plan(s_max, budget)
    chosen = allocate(capacities, plan.targets, plan.priorities)
    shallowest = min((s for s in range(s_max + 1) if chosen[s]), default=0)
    assert sum(chosen) == min(budget, sum(capacities))
    assert chosen[shallowest + 1 :] == capacities[shallowest + 1 :]


@given(capacities=st.lists(st.integers(0, 50), min_size=2, max_size=51), budget=st.integers(1, 200))
def test_anti_is_auto_upside_down(capacities, budget):
    s_max = len(capacities) - 1
    auto, anti = auto_plan(s_max, budget), anti_plan(s_max, budget)
    upside_down = allocate(capacities[::-1], auto.targets, auto.priorities)[::-1]
    assert allocate(capacities, anti.targets, anti.priorities) == upside_down


def plans_of(capacities, phase, reserve):
    """Each plan as a function of the budget alone."""
    s_max = len(capacities) - 1
    return {
        "auto": lambda budget: auto_plan(s_max, budget),
        "anti": lambda budget: anti_plan(s_max, budget),
        "phase": lambda budget: phase_plan(capacities, budget, phase),
        "reserved": lambda budget: phase_plan(capacities, budget, phase, reserve),
    }


@given(pools(), st.floats(0, 1, exclude_max=True))
def test_a_larger_budget_never_takes_less_of_any_depth(pool, reserve):
    capacities, budget, phase = pool
    for name, plan_for in plans_of(capacities, phase, reserve).items():
        less, more = (
            allocate(capacities, plan.targets, plan.priorities) for plan in (plan_for(budget), plan_for(budget + 1))
        )
        assert all(a <= b for a, b in zip(less, more, strict=True)), name


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
            plan = auto_plan(3, budget)
            chosen = sample_buckets(
                columns, allocate(capacities, plan.targets, plan.priorities), np.random.default_rng(0)
            )
            best = max(sum(subset) for subset in itertools.combinations(depths, budget))
            assert columns[chosen].sum() == best


@given(pools(deepest=8), st.floats(0, 1, exclude_max=True))
def test_the_reserve_never_covers_less_than_the_literal_phase(pool, reserve):
    capacities, budget, phase = pool
    literal, reserved = (
        allocate(capacities, plan.targets, plan.priorities)
        for plan in (phase_plan(capacities, budget, phase), phase_plan(capacities, budget, phase, reserve))
    )
    assert sum(reserved) == sum(literal)
    assert sum(s * f for s, f in enumerate(reserved)) >= sum(s * f for s, f in enumerate(literal))


@given(pools(deepest=8), st.floats(0.01, 1, exclude_max=True))
def test_with_a_reserve_no_pool_leaves_every_deeper_trajectory_out(pool, reserve):
    capacities, budget, phase = pool
    plan = phase_plan(capacities, budget, phase, reserve)
    chosen = allocate(capacities, plan.targets, plan.priorities)
    deeper = sum(capacities[phase + 2 :])
    assert sum(chosen[phase + 2 :]) >= min(math.floor(reserve * budget), deeper)


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
    plan = phase_plan(capacities, budget, phase)
    chosen = allocate(capacities, plan.targets, plan.priorities)
    is_last = phase == len(capacities) - 2
    stays = advance_phase(capacities, budget, phase) == phase and not is_last
    assert is_phase_trapped(capacities, budget, phase) == (stays and chosen[phase + 1] == budget)


@given(pools(), st.floats(0, 1, exclude_max=True))
def test_the_reserve_gives_the_deepest_first_and_the_plan_still_sums_to_the_budget(pool, reserve):
    capacities, budget, phase = pool
    plan = phase_plan(capacities, budget, phase, reserve)
    left = math.floor(reserve * budget)
    for s in range(len(capacities) - 1, phase + 1, -1):
        assert plan.targets[s] == min(capacities[s], left)
        left -= plan.targets[s]
    assert sum(plan.targets) == budget
    assert plan.targets[: phase + 1] == [0] * (phase + 1)
    assert plan.targets[phase + 1] >= budget - math.floor(reserve * budget)
    assert plan.priorities == phase_plan(capacities, budget, phase).priorities


def test_half_a_reserve_by_hand():
    """K = 10: 5 in reserve, of which depth 4 takes 2 and depth 3 takes 3; depth 1 gets the other 5."""
    plan = phase_plan([9, 20, 7, 6, 2], 10, 0, 0.5)
    assert plan.targets == [0, 5, 0, 3, 2]
    assert allocate([9, 20, 7, 6, 2], plan.targets, plan.priorities) == [0, 5, 0, 3, 2]


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


# Buckets.


@given(st.integers(1, 50).flatmap(lambda s: st.tuples(st.just(s), st.lists(st.integers(0, s), max_size=80))))
def test_capacities_count_every_trajectory_once(problem):
    s_max, depths = problem
    capacities = count_depths(np.array(depths, dtype=np.int64), s_max)
    assert capacities == [depths.count(s) for s in range(s_max + 1)]


@pytest.mark.parametrize("depth", [-1, 6])
def test_a_depth_that_cannot_be_is_refused(depth):
    with pytest.raises(ValueError, match=rf"depths must be in \[0, 5\], got {depth}"):
        count_depths(np.array([0, depth, 2]), 5)


@st.composite
def samplings(draw):
    """(depths, allocation): how many to take of each depth, never more than there are."""
    s_max = draw(st.integers(1, 50))
    depths = draw(st.lists(st.integers(0, s_max), max_size=80))
    capacities = count_depths(np.array(depths, dtype=np.int64), s_max)
    return np.array(depths, dtype=np.int64), [draw(st.integers(0, capacity)) for capacity in capacities]


@given(samplings(), st.integers(0, 2**32))
def test_a_sample_takes_exactly_the_allocation_of_every_depth_without_repeats_in_order(sampling, seed):
    depths, allocation = sampling
    indices = sample_buckets(depths, allocation, np.random.default_rng(seed))
    assert count_depths(depths[indices], len(allocation) - 1) == allocation
    assert indices.tolist() == sorted(set(indices.tolist()))


@given(samplings(), st.integers(0, 2**32))
def test_the_same_seed_takes_the_same_sample(sampling, seed):
    one, other = (sample_buckets(*sampling, np.random.default_rng(seed)) for _ in range(2))
    np.testing.assert_array_equal(one, other)


def test_another_seed_takes_another_sample_of_a_big_pool():
    depths = np.arange(600) % 6
    samples = {tuple(sample_buckets(depths, [16] * 6, np.random.default_rng(seed))) for seed in range(20)}
    assert len(samples) == 20


def test_every_trajectory_of_a_bucket_is_taken_equally_often():
    depths = np.array([1] * 10 + [2] * 5)
    rng = np.random.default_rng(0)
    times = np.zeros(15)
    for _ in range(4000):
        times[sample_buckets(depths, [0, 3, 5], rng)] += 1
    np.testing.assert_allclose(times[:10] / 4000, 0.3, atol=0.04)  # 5.5 standard deviations
    assert (times[10:] == 4000).all()


def test_a_bucket_that_is_too_small_is_named():
    with pytest.raises(ValueError, match="depth 2 holds 1 trajectories, cannot take 2"):
        sample_buckets(np.array([0, 2, 1]), [0, 1, 2], np.random.default_rng(0))


def test_an_empty_pool_gives_an_empty_sample():
    assert sample_buckets(np.zeros(0, dtype=np.int64), [0, 0], np.random.default_rng(0)).tolist() == []


def test_a_million_trajectories_are_selected_from():
    rng = np.random.default_rng(0)
    depths = rng.integers(0, 51, size=1_000_000)
    capacities = count_depths(depths, 50)
    plan = phase_plan(capacities, 500_000, 20, 0.25)
    allocation = allocate(capacities, plan.targets, plan.priorities)
    indices = sample_buckets(depths, allocation, rng)
    assert len(np.unique(indices)) == 500_000
    assert count_depths(depths[indices], 50) == allocation
