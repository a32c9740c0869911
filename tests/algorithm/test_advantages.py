"""Advantages, worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.algorithm.advantages import group_advantages

HALF_ROOT = math.sqrt(0.5)
"""(1 - 0.5) / std of (0, 1), the sample standard deviation being sqrt(0.5)."""


def advantages(rewards, tickets, pool_rewards=None, pool_tickets=None, singleton="raw", **settings):
    return group_advantages(
        np.array(rewards, dtype=np.float64),
        np.array(tickets, dtype=np.int64),
        np.array(rewards if pool_rewards is None else pool_rewards, dtype=np.float64),
        np.array(tickets if pool_tickets is None else pool_tickets, dtype=np.int64),
        singleton,
        **settings,
    )


@pytest.mark.parametrize("pair", [(1.0, 0.0), (0.2, 0.0), (1.0, 0.84)])
def test_a_pair_gets_plus_and_minus_root_one_half_however_far_apart(pair):
    values = advantages(pair, [7, 7]).values
    np.testing.assert_allclose(values, [HALF_ROOT, -HALF_ROOT], rtol=2e-5)
    assert values[0] == pytest.approx(0.7071, abs=1e-4)


def test_three_rewards_use_the_sample_deviation():
    """(1, 0.2, 0): mean 0.4, deviations 0.6, -0.2, -0.4, variance (0.36 + 0.04 + 0.16) / 2 = 0.28."""
    std = math.sqrt(0.28)
    values = advantages([1.0, 0.2, 0.0], [3, 3, 3]).values
    np.testing.assert_allclose(values, [0.6 / (std + 1e-6), -0.2 / (std + 1e-6), -0.4 / (std + 1e-6)], rtol=1e-12)
    np.testing.assert_allclose(values, [1.13389, -0.37796, -0.75593], atol=1e-5)


def test_without_the_deviation_rewards_are_centred_and_no_more():
    """Dr. GRPO: (1, 0.2, 0) - 0.4; a pair of equals gets 0."""
    values = advantages([1.0, 0.2, 0.0, 0.7, 0.7], [3, 3, 3, 4, 4], divide_by_std=False).values
    np.testing.assert_allclose(values, [0.6, -0.2, -0.4, 0.0, 0.0], atol=1e-12)


@pytest.mark.parametrize(("rule", "expected"), [("raw", 0.8), ("zero", 0.0), ("pool", 0.5)])
def test_without_the_deviation_a_singleton_gets_what_its_rule_says(rule, expected):
    """Its group, not selected with it: mean 0.3."""
    values = advantages([0.8], [1], [0.8, 0.1, 0.0], [1, 1, 1], rule, divide_by_std=False).values
    np.testing.assert_allclose(values, [expected], atol=1e-12)


def test_a_spread_as_small_as_epsilon_is_damped_by_it():
    values = advantages([1e-6, 0.0], [0, 0]).values
    np.testing.assert_allclose(values[0], 0.5e-6 / (HALF_ROOT * 1e-6 + 1e-6))


def test_groups_are_normalised_apart_and_keep_their_places():
    values = advantages([1.0, 0.2, 0.0, 0.0], [5, 2, 5, 2]).values
    np.testing.assert_allclose(values, [HALF_ROOT, HALF_ROOT, -HALF_ROOT, -HALF_ROOT], rtol=1e-4)


def test_a_group_is_normalised_by_its_selected_members_only():
    """The third member of the group, with reward 1, was not selected."""
    values = advantages([0.2, 0.0], [0, 0], [0.2, 0.0, 1.0], [0, 0, 0], "pool").values
    np.testing.assert_allclose(values, [HALF_ROOT, -HALF_ROOT], rtol=1e-4)


@pytest.mark.parametrize(("rule", "expected"), [("raw", 0.8), ("zero", 0.0), ("pool", 0.5 / (math.sqrt(0.19) + 1e-6))])
def test_a_singleton_gets_what_its_rule_says(rule, expected):
    """Its whole group is (0.8, 0, 0.1): mean 0.3, variance (0.25 + 0.09 + 0.04) / 2 = 0.19."""
    values = advantages([0.8], [4], [0.3, 0.8, 0.0, 0.1], [1, 4, 4, 4], rule).values
    np.testing.assert_allclose(values, [expected], rtol=1e-12)


@pytest.mark.parametrize(("rule", "expected"), [("raw", 0.7), ("zero", 0.0), ("pool", 0.0)])
def test_a_singleton_of_a_group_with_equal_rewards_has_nothing_to_compare_with(rule, expected):
    assert advantages([0.7], [4], [0.7, 0.7], [4, 4], rule).values.tolist() == [expected]


def test_a_singleton_that_is_its_whole_group_gets_nothing_by_the_pool_rule():
    assert advantages([0.7], [4], singleton="pool").values.tolist() == [0.0]


def test_equal_rewards_get_nothing_also_when_they_differ_by_rounding():
    """0.1 + 0.2 and 0.3 differ in the last bit: their deviation must not be blown up to ±1."""
    assert 0.1 + 0.2 != 0.3
    found = advantages([0.1 + 0.2, 0.3, 0.3], [0, 0, 0])
    assert found.values.tolist() == [0.0, 0.0, 0.0]
    assert found.zero_variance_share == 1.0


def test_shares_count_trajectories_not_groups():
    """One singleton, two in a flat group, three in a group with a spread."""
    found = advantages([1.0, 0.5, 0.5, 0.0, 0.2, 1.0], [0, 1, 1, 2, 2, 2])
    assert found.singleton_share == pytest.approx(1 / 6)
    assert found.zero_variance_share == pytest.approx(2 / 6)
    assert found.usable_share == 3 / 6


def test_nothing_selected_is_nothing():
    found = advantages([], [])
    assert found.values.tolist() == []
    assert (found.singleton_share, found.zero_variance_share, found.usable_share) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("rule", ["raw", "zero", "pool"])
def test_what_is_usable_is_in_a_group_of_two_or_more_selected_with_unequal_rewards(rule):
    """Whatever its own advantage is: the middle one of three has none, and a singleton may have one by its rule."""
    found = advantages([0.0, 0.5, 1.0, 1.0], [0, 0, 0, 1], [0.0, 0.5, 1.0, 1.0, 0.0], [0, 0, 0, 1, 1], singleton=rule)
    assert found.values[1] == 0.0
    assert found.usable_share == 3 / 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused_wherever_it_stands(bad):
    with pytest.raises(ValueError, match="finite"):
        advantages([1.0, bad], [0, 0])
    with pytest.raises(ValueError, match="finite"):
        advantages([1.0], [0], [1.0, bad], [0, 0])


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.2, 0.5, 0.84, 1.0])), max_size=30))
def test_groups_of_two_or_more_sum_to_zero_and_keep_the_order_of_their_rewards(rows):
    tickets, rewards = np.array([t for t, _ in rows]), np.array([r for _, r in rows])
    values = advantages(rewards, tickets).values
    for ticket in set(tickets.tolist()):
        members = tickets == ticket
        if members.sum() >= 2:
            assert abs(values[members].sum()) < 1e-9
            order = np.argsort(rewards[members], kind="stable")
            assert (np.diff(values[members][order]) >= 0).all()


@given(st.permutations(range(8)))
def test_the_order_of_the_selection_does_not_matter(order):
    rewards = np.array([1.0, 0.2, 0.0, 0.5, 0.5, 0.9, 0.1, 0.3])
    tickets = np.array([0, 0, 0, 1, 1, 2, 3, 3])
    expected = advantages(rewards, tickets).values[order]
    np.testing.assert_allclose(advantages(rewards[order], tickets[order]).values, expected, rtol=1e-12)


@pytest.mark.parametrize("wrong", range(4))
def test_vectors_of_other_lengths_are_refused(wrong):
    vectors = [np.ones(2), np.array([1, 2]), np.ones(4), np.array([1, 1, 2, 2])]
    vectors[wrong] = vectors[wrong][:, None]
    with pytest.raises(ValueError, match=r"must have shape \[\d\], got"):
        group_advantages(*vectors, "raw")


def test_a_rule_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="the singleton rule must be one of raw, zero, pool, got 'none'"):
        group_advantages(np.ones(1), np.array([1]), np.ones(1), np.array([1]), "none")


def test_a_ticket_that_the_pool_does_not_have_is_refused():
    with pytest.raises(ValueError, match="every selected ticket must be one of the pool's, got 7"):
        group_advantages(np.ones(1), np.array([7]), np.ones(1), np.array([1]), "pool")
