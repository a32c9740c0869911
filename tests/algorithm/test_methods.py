"""Selection methods: each on one small pool by hand, and what all of them promise on any pool."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.algorithm.methods import METHODS, Candidates, Settings, State
from cusearch_async.algorithm.sdga import count_depths

SUBSETS = sorted(set(METHODS) - {"grpo_full", "dapo"})
"""The methods that choose K."""


def make_pool(depths, rewards=None, rollouts=2, s_max=5):
    rewards = [0.0] * len(depths) if rewards is None else rewards
    return Candidates(
        depths=np.array(depths, dtype=np.int64),
        rewards=np.array(rewards, dtype=np.float64),
        tickets=np.arange(len(depths)) // rollouts,
        s_max=s_max,
    )


def select(name, pool, budget, seed=0, phase=0, reserve=0.0):
    settings = Settings(budget=budget, phase_reserve=reserve)
    return METHODS[name](pool, settings, np.random.default_rng(seed), State(phase=phase))


@st.composite
def candidates(draw):
    groups, rollouts = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    count = groups * rollouts
    depths = draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.2, 0.7, 1.0]), min_size=count, max_size=count))
    return make_pool(depths, rewards, rollouts)


METHOD = st.sampled_from(sorted(METHODS))
BUDGET = st.integers(1, 60)
PHASE = st.integers(0, 4)


@given(METHOD, candidates(), BUDGET, PHASE, st.integers(0, 2**32))
def test_a_selection_holds_distinct_members_of_the_pool_in_order(name, pool, budget, phase, seed):
    indices = select(name, pool, budget, seed, phase).indices.tolist()
    assert indices == sorted(set(indices))
    assert all(0 <= i < len(pool.depths) for i in indices)


@given(st.sampled_from(SUBSETS), candidates(), BUDGET, PHASE)
def test_a_selection_of_k_takes_k_or_all_there_are(name, pool, budget, phase):
    assert len(select(name, pool, budget, phase=phase).indices) == min(budget, len(pool.depths))


@given(METHOD, candidates(), BUDGET, PHASE, st.integers(0, 2**32))
def test_a_selection_is_a_function_of_its_arguments(name, pool, budget, phase, seed):
    one, other = (select(name, pool, budget, seed, phase) for _ in range(2))
    np.testing.assert_array_equal(one.indices, other.indices)
    assert (one.state, one.facts) == (other.state, other.facts)


@given(st.sampled_from(sorted(set(METHODS) - {"sdga_phase"})), candidates(), BUDGET, PHASE)
def test_only_sdga_phase_moves_the_phase(name, pool, budget, phase):
    assert select(name, pool, budget, phase=phase).state == State(phase=phase)


@given(candidates(), BUDGET)
def test_auto_takes_the_deepest_and_anti_the_shallowest(pool, budget):
    deepest = pool.depths.clip(max=pool.s_max)
    in_order = sorted(deepest.tolist())
    auto = sorted(deepest[select("sdga_auto", pool, budget).indices].tolist())
    anti = sorted(deepest[select("sdga_anti", pool, budget).indices].tolist())
    assert auto == in_order[-budget:]
    assert anti == in_order[:budget]


@given(candidates(), BUDGET)
def test_topk_reward_takes_the_highest_rewards(pool, budget):
    taken = pool.rewards[select("topk_reward", pool, budget).indices]
    assert sorted(taken.tolist()) == sorted(pool.rewards.tolist())[-budget:]


def test_phase_0_takes_depth_one_then_deeper_then_none():
    pool = make_pool([0, 1, 3, 1, 0, 2, 0, 1])
    assert select("sdga_phase", pool, 3).indices.tolist() == [1, 3, 7]
    assert select("sdga_phase", pool, 5).indices.tolist() == [1, 2, 3, 5, 7]
    assert select("sdga_phase", pool, 8).indices.tolist() == list(range(8))


def test_the_phase_is_checked_before_the_pool_is_selected_from():
    """Three deeper than 1 fill K = 3: phase 1 at once, so that depth 2 is served and depth 1 is not."""
    pool = make_pool([1, 2, 1, 2, 3, 1])
    selection = select("sdga_phase", pool, 3)
    assert selection.state.phase == 1
    assert selection.facts["phase"] == 1
    assert selection.indices.tolist() == [1, 3, 4]


def test_the_phase_stays_when_one_is_missing():
    selection = select("sdga_phase", make_pool([1, 2, 1, 2, 1, 1]), 3)
    assert selection.state.phase == 0
    assert set(selection.indices.tolist()) <= {0, 2, 4, 5}


def test_a_trapped_phase_is_reported_and_a_reserve_frees_it():
    pool = make_pool([1, 1, 1, 1, 2, 3])
    trapped, free = select("sdga_phase", pool, 4), select("sdga_phase", pool, 4, reserve=0.5)
    assert trapped.facts["phase_trapped"] == 1.0
    assert trapped.indices.tolist() == [0, 1, 2, 3]
    assert free.facts["phase_trapped"] == 0.0
    assert count_depths(pool.depths[free.indices], 5) == [0, 2, 1, 1, 0, 0]


def test_a_pool_deeper_than_s_max_counts_as_s_max():
    pool = make_pool([9, 5, 0, 7])
    assert select("sdga_auto", pool, 3).indices.tolist() == [0, 1, 3]


def test_grpo_full_takes_everything_whatever_the_budget():
    assert select("grpo_full", make_pool([0, 1, 2, 3]), 1).indices.tolist() == [0, 1, 2, 3]


def test_dapo_drops_groups_with_equal_rewards():
    pool = make_pool([0] * 8, [1.0, 1.0, 0.2, 1.0, 0.0, 0.0, 0.0, 0.2])
    assert select("dapo", pool, 1).indices.tolist() == [2, 3, 6, 7]


def test_dapo_sees_equal_rewards_through_floating_noise():
    assert select("dapo", make_pool([0, 0, 0], [0.1 + 0.2, 0.3, 0.3], rollouts=3), 3).indices.tolist() == []


def test_topk_reward_breaks_ties_by_seed():
    pool = make_pool([0] * 40, [1.0] + [0.5] * 39)
    picks = [set(select("topk_reward", pool, 5, seed).indices.tolist()) for seed in range(10)]
    assert all(0 in pick for pick in picks)
    assert len({frozenset(pick) for pick in picks}) > 1


def test_random_takes_each_trajectory_equally_often():
    pool = make_pool(range(6))
    times = np.zeros(6)
    for seed in range(3000):
        times[select("random", pool, 2, seed).indices] += 1
    np.testing.assert_allclose(times / 3000, 1 / 3, atol=0.05)  # 5.8 standard deviations


@pytest.mark.parametrize("name", sorted(METHODS))
def test_an_empty_pool_gives_an_empty_selection(name):
    assert select(name, make_pool([]), 3).indices.tolist() == []
