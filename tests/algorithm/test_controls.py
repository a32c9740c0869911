"""Controls follow SDGA-Phase in what they match, and in nothing else; Stratified GRPO against numbers by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given

from cusearch_async.algorithm.methods import METHODS
from cusearch_async.algorithm.methods.baselines import StratifiedSettings
from cusearch_async.algorithm.methods.sdga import SdgaMemory, SdgaSettings
from tests.algorithm.test_methods import BUDGET, PHASE, candidates
from tests.algorithm.test_methods import st as strategies
from tests.strategies import make_pool


def chosen(name, pool, budget, phase=0, seed=0, reserve=0.0):
    method = METHODS[name](SdgaSettings(phase_reserve=reserve), budget)
    return method.select(pool, SdgaMemory(phase), np.random.default_rng(seed))


def stratified(pool, selected, weight=1.0, singleton="raw", by_std=True):
    method = METHODS["stratified_grpo"](StratifiedSettings(strata_weight=weight), 1)
    return method.advantages(pool, np.array(selected), singleton, by_std)


@given(pool=candidates(), budget=BUDGET, phase=PHASE, seed=strategies.integers(0, 99))
def test_random_siblings_are_as_many_of_each_question_as_of_sdga_phase(pool, budget, phase, seed):
    followed, control = (chosen(name, pool, budget, phase, seed) for name in ("sdga_phase", "random_siblings"))
    assert Counter(pool.tickets[control.indices]) == Counter(pool.tickets[followed.indices])
    assert len(set(control.indices)) == len(control.indices)
    assert control.memory == followed.memory


@given(pool=candidates(), budget=BUDGET, phase=PHASE, seed=strategies.integers(0, 99))
def test_random_tokens_are_as_near_to_those_of_sdga_phase_as_the_order_allows(pool, budget, phase, seed):
    followed, control = (chosen(name, pool, budget, phase, seed) for name in ("sdga_phase", "random_tokens"))
    wanted, found = (int(pool.tokens[selection.indices].sum()) for selection in (followed, control))
    assert abs(found - wanted) <= pool.tokens.max() / 2 or len(control.indices) == 1
    assert bool(len(control.indices)) == bool(len(followed.indices)), "a step is never without any"
    assert len(set(control.indices)) == len(control.indices)
    assert control.memory == followed.memory


def test_controls_do_not_choose_by_depth():
    """Half of the trajectories are deep, one of each group. SDGA-Phase at phase 1 takes them all."""
    pool = make_pool([1, 5] * 200, tokens=[10] * 400)
    assert pool.depths[chosen("sdga_phase", pool, 200, 1).indices].mean() == 5
    for name in ("random_siblings", "random_tokens"):
        control = chosen(name, pool, 200, 1)
        assert len(control.indices) == 200
        assert pool.depths[control.indices].mean() == pytest.approx(3, abs=0.5)


def test_random_tokens_take_more_where_the_deep_ones_are_longer():
    pool = make_pool([1, 5] * 200, tokens=[10, 50] * 200)
    control = chosen("random_tokens", pool, 200, 1)
    assert pool.tokens[control.indices].sum() == pytest.approx(200 * 50, abs=25)
    assert len(control.indices) == pytest.approx(333, abs=20)


def test_random_tokens_take_each_trajectory_equally_often():
    """6 of 24 in 600 steps: each 150 times, with a deviation of 10.6."""
    pool = make_pool([1, 5, 1, 1] * 6, tokens=[10] * 24)
    drawn = [chosen("random_tokens", pool, 6, 1, seed).indices for seed in range(600)]
    assert {len(indices) for indices in drawn} == {6}
    assert np.bincount(np.concatenate(drawn), minlength=24) == pytest.approx(np.full(24, 150), abs=53)


def test_a_control_is_never_trapped_and_shows_the_phase():
    pool = make_pool([1] * 8 + [2, 2])
    assert chosen("sdga_phase", pool, 4).warnings
    for name in ("random_siblings", "random_tokens"):
        assert chosen(name, pool, 4).warnings == ()
        assert chosen(name, pool, 4).metrics == {"phase": 0}


def test_strata_are_normalised_by_themselves():
    """Group 0 has rewards 0 and 1 at depth 1, and 0.5 and 0.5 at depth 2; the strata of group 1 hold one each."""
    pool = make_pool([1, 1, 2, 2, 0, 1, 2, 3], [0, 1, 0.5, 0.5, 1, 0, 0, 0], rollouts=4)
    half = 0.5 / (np.std([0, 1], ddof=1) + 1e-6)
    assert stratified(pool, range(8)).values == pytest.approx([-half, half, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("depths", [[1, 1, 1, 1], [5, 5, 0, 0], [0, 0, 5, 5]])
def test_a_stratum_is_of_one_question(depths):
    pool = make_pool(depths, [0, 0, 1, 1], rollouts=2)
    assert pool.s_max == 5
    assert stratified(pool, range(4)).values.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_advantages_are_blended(weight):
    pool = make_pool([1, 1, 2, 0, 1, 2], [0, 1, 0.7, 1, 0.2, 0], rollouts=3)
    plain = METHODS["grpo_full"](SdgaSettings(), 1).advantages(pool, np.arange(6), "raw", True)
    within = stratified(pool, range(6), 1.0).values
    found = stratified(pool, range(6), weight)
    assert found.values == pytest.approx(weight * within + (1 - weight) * plain.values)
    assert (found.singleton_share, found.zero_variance_share) == (plain.singleton_share, plain.zero_variance_share)


def test_strata_are_only_centred_where_that_is_asked_for():
    pool = make_pool([1, 1], [0.2, 1.0])
    assert stratified(pool, range(2), by_std=False).values == pytest.approx([-0.4, 0.4])
