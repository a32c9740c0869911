"""Depth buckets, and samples of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.algorithm.methods.sdga import count_depths, sample_buckets

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
