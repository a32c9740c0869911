"""Selection methods: each on one small pool by hand, and what all of them promise on any pool."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.algorithm.methods import METHODS, Candidates, PlansRollouts, method_class
from cusearch_async.algorithm.methods.sdga import SdgaMemory, SdgaPhase, count_depths
from cusearch_async.errors import ConfigError, InvalidTrajectory
from tests.strategies import make_pool

SUBSETS = ["random", "sdga_anti", "sdga_auto", "sdga_phase", "topk_reward"]
"""The methods that choose K."""


def method_of(name, budget=1, reserve=0.0):
    own = METHODS[name].Settings
    return METHODS[name](own(phase_reserve=reserve) if "phase_reserve" in own.model_fields else own(), budget)


def select(name, pool, budget, seed=0, phase=0, reserve=0.0):
    method = method_of(name, budget, reserve)
    memory = SdgaMemory(phase) if isinstance(method, SdgaPhase) else method.decode("", pool.s_max)
    return method.select(pool, memory, np.random.default_rng(seed))


@st.composite
def candidates(draw):
    groups, rollouts = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    count = groups * rollouts
    depths = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
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
    assert (one.memory, one.metrics) == (other.memory, other.metrics)


@given(METHOD, candidates(), BUDGET)
def test_what_a_method_remembers_survives_as_text(name, pool, budget):
    method = method_of(name, budget)
    memory = select(name, pool, budget).memory
    assert method.decode(method.encode(memory), pool.s_max) == memory
    assert method.fields(memory) == ({"phase": memory.phase} if isinstance(method, SdgaPhase) else {})
    assert method.decode("", pool.s_max) == method.Memory()


def test_numbers_that_a_memory_inherits_are_shown_too():
    class Faster(SdgaMemory):
        speed: float = 0.5
        name: str = "x"

    @dataclass(slots=True)
    class Slow:
        speed: float = 0.25

    class Own(SdgaPhase):
        Memory = Faster

    class Plain(SdgaPhase):
        Memory = Slow

    assert Own(Own.Settings(), 1).fields(Faster(phase=3)) == {"phase": 3, "speed": 0.5}
    assert Plain(Plain.Settings(), 1).fields(Slow()) == {"speed": 0.25}


@given(candidates(), BUDGET)
def test_ar3po_forgets_no_question(pool, budget):
    method = method_of("ar3po", budget)
    before = method.Memory({"earlier": ((1, 3),)})
    assert method.select(pool, before, np.random.default_rng(0)).memory.visits["earlier"] == ((1, 3),)
    assert before.visits == {"earlier": ((1, 3),)}, "a memory is never changed"


def test_a_memory_that_the_runs_s_max_does_not_fit_is_refused():
    method = method_of("sdga_phase")
    assert method.decode('{"phase":4}', 5) == SdgaMemory(4)
    with pytest.raises(ConfigError, match=r"^episode.s_max = 4, but the run has reached phase 4; set it to 5 or more$"):
        method.decode('{"phase":4}', 4)


@pytest.mark.parametrize(("one", "other"), [("sdga_phase", "ar3po"), ("ar3po", "sdga_phase")])
def test_the_memory_of_another_method_is_refused(one, other):
    """Read as an empty one, the phase would go back to 0."""
    text = method_of(one).encode(method_of(one).Memory())
    with pytest.raises(ValueError, match="unknown field"):
        method_of(other).decode(text, 5)


def test_a_method_of_ones_own_is_found_by_its_place(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from cusearch_async.algorithm.methods import Method\nclass First(Method):\n    pass\nnothing = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert method_class("mine:First").__name__ == "First"
    for name, said in {
        "first": "method.name 'first' is unknown; use one of sdga_phase, .*, or your own as package.module:Name",
        "mine:Second": "method.name: module 'mine' has no 'Second'; the module is .*/mine.py",
        "sys:Second": "method.name: module 'sys' has no 'Second'; the module is built into Python",
        "mine:nothing": r"'mine:nothing' must be a subclass of .*\.Method, got 1",
        "yours:First": r"module 'yours' of 'yours:First' cannot be imported \(ModuleNotFoundError: No module",
    }.items():
        with pytest.raises(ConfigError, match=said):
            method_class(name)


@given(candidates(), BUDGET)
def test_auto_takes_the_deepest_and_anti_the_shallowest(pool, budget):
    in_order = sorted(pool.depths.tolist())
    auto = sorted(pool.depths[select("sdga_auto", pool, budget).indices].tolist())
    anti = sorted(pool.depths[select("sdga_anti", pool, budget).indices].tolist())
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
    assert selection.memory.phase == 1
    assert selection.metrics["phase"] == 1
    assert selection.indices.tolist() == [1, 3, 4]


def test_the_phase_stays_when_one_is_missing():
    selection = select("sdga_phase", make_pool([1, 2, 1, 2, 1, 1]), 3)
    assert selection.memory.phase == 0
    assert set(selection.indices.tolist()) <= {0, 2, 4, 5}


def test_a_trapped_phase_is_reported_and_a_reserve_frees_it():
    pool = make_pool([1, 1, 1, 1, 2, 3])
    trapped, free = select("sdga_phase", pool, 4), select("sdga_phase", pool, 4, reserve=0.5)
    assert trapped.metrics["phase_trapped"] == 1.0
    assert trapped.indices.tolist() == [0, 1, 2, 3]
    assert free.metrics["phase_trapped"] == 0.0
    assert select("sdga_phase", pool, 4, reserve=0.2).metrics["phase_trapped"] == 1.0, "a reserve of none frees nothing"
    assert count_depths(pool.depths[free.indices], 5) == [0, 2, 1, 1, 0, 0]


@pytest.mark.parametrize("name", ["grpo_full", "grpo_half", "ar3po"])
def test_what_was_generated_is_trained_on_whatever_the_budget(name):
    assert select(name, make_pool([0, 1, 2, 3]), 1).indices.tolist() == [0, 1, 2, 3]


def test_grpo_half_generates_the_budget_and_no_more():
    assert method_of("grpo_half", 96).questions(64, 3) == 32
    assert method_of("ar3po", 96).questions(64, 3) == 64
    assert {name for name in METHODS if isinstance(method_of(name), PlansRollouts)} == {"grpo_half", "ar3po"}


def test_ar3po_remembers_how_each_question_fared_and_plans_by_it():
    """q0 passed 2 of 2 (reward alone does not count), q1 none of 2, q2 is visited twice in the pool."""
    rewards = [0.9, 0.9, 0.2, 0.2, 0.0, 1.0, 1.0, 1.0]
    pool = make_pool([0] * 8, rewards, questions=["q0", "q0", "q1", "q1", "q2", "q2", "q2", "q2"])
    memory = select("ar3po", pool, 1).memory
    assert memory.visits == {"q0": ((2, 2),), "q1": ((0, 2),), "q2": ((1, 2), (2, 2))}
    plan = method_of("ar3po").group_sizes(memory, ["q0", "q2", "new", "q1"], 2)
    assert plan == [2, 2, 2, 2], "p (1 - p) of 3/4, 4/6, 1/4: 6 rollouts in thirds"
    wide = method_of("ar3po").group_sizes(memory, ["q0", "q2", "new", "q1"], 20)
    assert wide == [19, 22, 20, 19], "3/16, 2/9, 3/16 of 60"


def test_grpo_half_gives_every_question_g_rollouts():
    method = method_of("grpo_half")
    assert method.group_sizes(method.decode("", 5), ["q0", "q1"], 3) is None
    assert method.largest_group(3) == 3


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


def columns(**changes):
    plain = make_pool([0, 1, 2, 3])
    values = {name: getattr(plain, name) for name in Candidates.__slots__}
    return values | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": np.array([0, -1, 2, 3])}, "trajectory 0:1: depth must be in [0, 5], got -1"),
        ({"depths": np.array([0, 1, 2, 6])}, "trajectory 1:1: depth must be in [0, 5], got 6"),
        ({"rewards": np.array([0, 1, np.nan, 1])}, "trajectory 1:0: reward must be finite, got nan"),
        ({"rewards": np.array([np.inf, 1, 0, 1])}, "trajectory 0:0: reward must be finite, got inf"),
    ],
)
def test_a_pool_names_the_trajectory_that_cannot_be(changes, message):
    with pytest.raises(InvalidTrajectory, match=re.escape(message)):
        Candidates(**columns(**changes))


def test_an_empty_pool_is_refused():
    with pytest.raises(InvalidTrajectory, match="the pool is empty"):
        make_pool([])


def test_columns_that_do_not_align_and_a_pool_out_of_order_are_refused():
    with pytest.raises(ValueError, match=re.escape("one length, got [4, 4, 4, 3, 4, 4, 4]")):
        Candidates(**columns(tickets=np.arange(3)))
    with pytest.raises(ValueError, match="ordered by ticket"):
        Candidates(**columns(tickets=np.array([1, 1, 0, 0])))


MANY = 1_000_000


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"ar3po"}))
def test_a_million_trajectories_are_selected_from(name):
    rng = np.random.default_rng(0)
    pool = make_pool(rng.integers(0, 6, MANY), rng.choice([0.0, 0.2, 1.0], MANY), rollouts=5, questions=["q"] * MANY)
    chosen = select(name, pool, MANY // 2).indices
    assert (np.diff(chosen) > 0).all()
    assert len(chosen) == MANY // 2 or METHODS[name].uses_whole_pool or name == "random_tokens"


SDGA = st.sampled_from(["sdga_anti", "sdga_auto", "sdga_phase"])


def mixed_only(name, budget, **own):
    return METHODS[name](METHODS[name].Settings(mixed_groups_only=True, **own), budget)


@given(SDGA, candidates(), BUDGET, PHASE, st.integers(0, 2**32))
def test_sdga_on_mixed_groups_selects_as_if_there_were_no_others(name, pool, budget, phase, seed):
    """Capacities, allocation and phase are those of a pool that holds the mixed groups alone."""
    method, mixed = mixed_only(name, budget), pool.in_mixed_groups
    memory = SdgaMemory(phase) if name == "sdga_phase" else method.decode("", pool.s_max)
    found = method.select(pool, memory, np.random.default_rng(seed))
    assert mixed[found.indices].all()
    assert len(found.indices) == min(budget, mixed.sum())
    if not mixed.any():
        return
    columns = {name: np.asarray(getattr(pool, name))[mixed] for name in Candidates.__slots__ if name != "s_max"}
    alone = Candidates(**columns | {"questions": columns["questions"].tolist()}, s_max=pool.s_max)
    plain = method_of(name, budget).select(alone, memory, np.random.default_rng(seed))
    assert found.indices.tolist() == np.flatnonzero(mixed)[plain.indices].tolist()
    assert found.memory == plain.memory
    assert found.metrics == plain.metrics


@given(candidates(), BUDGET, PHASE, st.integers(0, 2**32))
def test_random_siblings_of_mixed_groups_are_as_many_of_each_question(pool, budget, phase, seed):
    """So a comparison of the two tells depth from the filter."""
    of_depth, of_chance = (
        mixed_only(name, budget).select(pool, SdgaMemory(phase), np.random.default_rng(seed))
        for name in ("sdga_phase", "random_siblings")
    )
    assert np.sort(pool.tickets[of_chance.indices]).tolist() == np.sort(pool.tickets[of_depth.indices]).tolist()
    assert pool.in_mixed_groups[of_chance.indices].all()
    assert of_chance.memory == of_depth.memory


@given(candidates(), BUDGET, PHASE, st.integers(0, 2**32))
def test_random_tokens_of_mixed_groups_are_of_these(pool, budget, phase, seed):
    method = mixed_only("random_tokens", budget)
    found = method.select(pool, SdgaMemory(phase), np.random.default_rng(seed))
    assert pool.in_mixed_groups[found.indices].all()
    assert bool(len(found.indices)) == pool.in_mixed_groups.any()


@given(candidates())
def test_mixed_groups_are_those_that_dapo_takes(pool):
    taken = select("dapo", pool, 1).indices
    assert np.flatnonzero(pool.in_mixed_groups).tolist() == taken.tolist()
    for ticket in np.unique(pool.tickets):
        own = pool.tickets == ticket
        assert pool.in_mixed_groups[own].all() == (len(set(pool.rewards[own])) > 1)


def test_sdga_on_mixed_groups_by_hand():
    """Depth 2 has four trajectories, but its groups have equal rewards: Auto takes the deepest that can teach."""
    pool = make_pool([2, 2, 1, 1, 2, 2, 0, 1], [1.0, 1.0, 0.0, 1.0, 0.2, 0.2, 0.0, 0.7])
    assert set(select("sdga_auto", pool, 3).indices.tolist()) < {0, 1, 4, 5}, "the paper's rule"
    method = mixed_only("sdga_auto", 3)
    found = method.select(pool, method.decode("", 5), np.random.default_rng(0))
    assert found.indices.tolist() == [2, 3, 7]


@pytest.mark.parametrize("name", ["sdga_phase", "random_siblings", "random_tokens"])
def test_without_mixed_groups_nothing_is_selected(name):
    """Random tokens took one trajectory: the nearest to no token is one."""
    pool, method = make_pool([0, 1, 2, 3] * 3, [0.0] * 12, 3), mixed_only(name, 6)
    assert len(method.select(pool, method.decode("", 5), np.random.default_rng(0)).indices) == 0
