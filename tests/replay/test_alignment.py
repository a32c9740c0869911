"""How well a method's update points along the reward gradient, against sums written out."""

from __future__ import annotations

import operator
from pathlib import Path

import numpy as np
import pytest

from cusearch_async.cli import align
from cusearch_async.config import load_config
from cusearch_async.replay.alignment import MeasuredPool, chosen_by, cosine, figures_of
from cusearch_async.replay.selection import with_method
from tests.strategies import make_pool

DIMENSIONS = 400
GROUP = 4


def method(name: str, budget: int):
    sizes = ["--method.budget", str(budget), "--loss.minibatch", str(budget)]
    return with_method(load_config(Path("atlas")), name, sizes).method


def measured(seed: int, groups: int = 6) -> MeasuredPool:
    """Depth tells nothing of the reward; the gradient of a trajectory is its reward along the first axis, and noise."""
    rng = np.random.default_rng(seed)
    count = groups * GROUP
    rewards = rng.integers(0, 2, count).astype(float)
    gradients = rng.normal(0, 0.3, (count, DIMENSIONS))
    gradients[:, 0] += 2 * rewards - 1
    searching = gradients.copy()
    searching[:, 0] = 0
    candidates = make_pool(rng.integers(0, 4, count).tolist(), rewards.tolist(), rollouts=GROUP)
    return MeasuredPool(candidates, {"all": gradients.astype(np.float32), "search": searching.astype(np.float32)})


def test_the_cosine_is_that_of_the_sums_written_out():
    pools = [measured(seed) for seed in range(3)]
    settings = method("random_siblings", 10)
    figures = figures_of(settings, pools, seed=1, equal=4)
    taken = list(chosen_by(settings, pools, seed=1))
    for number, one in enumerate(taken):
        update, rest = np.zeros(DIMENSIONS), np.zeros(DIMENSIONS)
        for place, advantage in zip(one.indices, one.advantages["raw"], strict=True):
            update += advantage * pools[number].gradients["all"][place]
        for other in (pool for place, pool in enumerate(pools) if place != number):
            rewards = other.candidates.rewards.reshape(-1, GROUP)
            centred = (rewards - rewards.mean(axis=1, keepdims=True)).ravel()
            rest += centred @ other.gradients["all"]
        assert figures.by_singleton["raw"][number] == pytest.approx(cosine(update, rest), abs=1e-9)


def test_what_teaches_points_along_the_gradient_and_what_does_not_points_nowhere():
    policies = [[measured(10 * policy + seed) for seed in range(8)] for policy in range(2)]
    whole, some = (
        operator.add(*(figures_of(method(name, 12), pools, seed=0, equal=6) for pools in policies))
        for name in ("grpo_full", "random_siblings")
    )
    assert len(whole.by_singleton["raw"]) == len(some.on_search) == 16
    assert np.mean(whole.by_singleton["raw"]) > np.mean(some.by_singleton["raw"]) > 0.2
    assert abs(np.mean(whole.on_search)) < 0.1, "nothing of the reward is in these tokens"
    assert whole.selected == [6 * GROUP] * 16
    gradients = {part: np.ones((8, 5), np.float32) for part in ("all", "search")}
    flat = [MeasuredPool(make_pool([0] * 8, [1.0] * 8, rollouts=GROUP), gradients)] * 2
    nothing = figures_of(method("grpo_full", 8), flat, seed=0, equal=2)
    assert nothing.by_singleton["raw"] == [0.0, 0.0]
    assert nothing.usable == [0, 0]
    assert nothing.at_equal == []


def test_the_rule_for_singletons_changes_what_they_add():
    pools = [measured(seed) for seed in range(4)]
    [one, *_] = chosen_by(method("random", 8), pools, seed=3)
    tickets = pools[0].candidates.tickets[one.indices]
    alone = np.array([np.sum(tickets == ticket) == 1 for ticket in tickets])
    assert one.alone == alone.sum() > 0
    np.testing.assert_array_equal(one.advantages["raw"][alone], pools[0].candidates.rewards[one.indices][alone])
    assert (one.advantages["zero"][alone] == 0).all()
    assert not one.usable[alone].any()
    for rule in ("zero", "pool"):
        np.testing.assert_array_equal(one.advantages[rule][~alone], one.advantages["raw"][~alone])


def test_updates_at_equal_size_leave_out_the_pools_they_are_of():
    """Two pools whose gradients have nothing in common: of pool 1's update, pool 0 alone is the rest."""
    pools = [measured(0, groups=1), measured(1, groups=1)]
    for pool, place in zip(pools, (0, 1), strict=True):
        pool.gradients["all"][:] = 0
        pool.gradients["all"][:, place] = pool.candidates.rewards
    figures = figures_of(method("grpo_full", 4), pools, seed=0, equal=GROUP)
    assert figures.at_equal == [0.0, 0.0]
    both = figures_of(method("grpo_full", 4), pools, seed=0, equal=2 * GROUP)
    assert both.at_equal == [], "an update of all pools has none to be compared with; it gave rounding errors"


def test_the_memory_of_a_method_is_carried_from_pool_to_pool():
    """SDGA-Phase moves on where depth 5 is missing, as in a run."""
    pools = [measured(seed) for seed in range(4)]
    settings = method("sdga_phase", 6)
    in_a_row = [one.indices.tolist() for one in chosen_by(settings, pools, seed=0)]
    alone = [next(iter(chosen_by(settings, [pool], seed=0))).indices.tolist() for pool in pools]
    assert in_a_row[0] == alone[0]
    assert in_a_row[1:] != alone[1:]


@pytest.mark.parametrize("of_the_run", ["sdga_phase", "grpo_full"])
def test_only_a_method_that_is_named_so_leaves_equal_groups_out(of_the_run):
    """Of a run with method.mixed_groups_only both rows of its method were the filtered one."""
    config = with_method(load_config(Path("atlas")), of_the_run, ["--method.budget", "24", "--loss.minibatch", "24"])
    if of_the_run == "sdga_phase":
        config = with_method(config, None, ["--method.mixed_groups_only", "true"])
    for name, is_mixed in (("sdga_phase", False), ("sdga_phase/mixed", True), ("sdga_auto", False)):
        assert align._method(config, name, 12).mixed_groups_only is is_mixed
    assert align._method(config, "grpo_full", 12).name == "grpo_full"
