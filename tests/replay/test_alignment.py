"""How well a method's update points along the reward gradient, against sums written out."""

from __future__ import annotations

import io
import math
import operator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from transformers import GPT2Config

from cusearch_async.cli import align
from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError
from cusearch_async.replay.alignment import Chosen, Cosines, MeasuredPool, _at_equal, chosen_by, cosines_of, figures_of
from cusearch_async.replay.selection import with_method
from cusearch_async.study.statistics import Spread
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
        expected = update @ rest / np.linalg.norm(update) / np.linalg.norm(rest)
        assert figures.by_singleton["raw"].values[number] == pytest.approx(expected, abs=1e-9)


def test_what_teaches_points_along_the_gradient_and_what_does_not_points_nowhere():
    policies = [[measured(10 * policy + seed) for seed in range(8)] for policy in range(2)]
    whole, some = (
        operator.add(*(figures_of(method(name, 12), pools, seed=0, equal=6) for pools in policies))
        for name in ("grpo_full", "random_siblings")
    )
    assert len(whole.by_singleton["raw"].values) == len(some.on_search.values) == 16
    assert np.mean(whole.by_singleton["raw"].values) > np.mean(some.by_singleton["raw"].values) > 0.2
    assert abs(np.mean(whole.on_search.values)) < 0.1, "nothing of the reward is in these tokens"
    assert whole.selected == [6 * GROUP] * 16
    gradients = {part: np.ones((8, 5), np.float32) for part in ("all", "search")}
    flat = [MeasuredPool(make_pool([0] * 8, [1.0] * 8, rollouts=GROUP), gradients)] * 2
    nothing = figures_of(method("grpo_full", 8), flat, seed=0, equal=2)
    assert nothing.by_singleton["raw"] == Cosines([0.0, 0.0], [[0.0, 0.0]])
    assert nothing.usable == [0, 0]
    assert nothing.at_equal == Cosines([], [])


def test_the_interval_of_cosines_that_share_pools_holds_their_mean():
    """Twelve updates of noise, each with the sum of the other eleven: taken as independent, 0 was in 84 %."""
    rng = np.random.default_rng(0)
    own, held = np.eye(12, dtype=bool), 0
    for _ in range(300):
        noise = rng.normal(size=(12, DIMENSIONS))
        found = cosines_of(noise, noise, own, ~own)
        held += abs(np.mean(found.values)) <= Spread(found.error, 11).half
    assert held >= 0.92 * 300


def test_policies_whose_pools_are_of_the_same_questions_are_not_independent():
    """Four policies, with most of the noise of a pool in common: taken as independent, 0 was in 90 %."""
    rng = np.random.default_rng(1)
    own, held = np.eye(12, dtype=bool), 0
    for _ in range(300):
        shared = rng.normal(size=(12, DIMENSIONS))
        noises = [0.95 * shared + 0.31 * rng.normal(size=(12, DIMENSIONS)) for _ in range(4)]
        first, *others = (cosines_of(noise, noise, own, ~own) for noise in noises)
        found = sum(others, start=first)
        held += abs(np.mean(found.values)) <= Spread(found.error, 11).half
    assert held >= 0.92 * 300


def test_the_error_of_updates_that_share_a_pool_is_not_known():
    """It counted as a cosine of 0 where it was left out, and two equal ones as an error of 0."""
    rng = np.random.default_rng(0)
    updates, gradients = rng.normal(size=(2, 9)), rng.normal(size=(4, 9))
    own = np.array([[True, True, False, False], [True, False, True, False]])
    found = cosines_of(updates, gradients, own, ~own)
    assert math.isnan(found.error)
    assert align._with_interval(found, 4).endswith("±–")
    own[1] = [False, False, True, True]
    assert cosines_of(updates, gradients, own, ~own).error > 0


def test_the_error_is_that_of_leaving_out_one_pool_after_the_other():
    pools = [measured(seed) for seed in range(5)]
    settings = method("grpo_full", 12)
    found = figures_of(settings, pools, seed=0, equal=6)
    rest = [pools[:place] + pools[place + 1 :] for place in range(5)]
    for part in ("by_singleton", "on_search"):
        whole, without = (
            [figures.by_singleton["zero"] if part == "by_singleton" else figures.on_search for figures in several]
            for several in ([found], [figures_of(settings, some, seed=0, equal=6) for some in rest])
        )
        means = [np.mean(one.values) for one in without]
        assert whole[0].error == pytest.approx(np.sqrt(4 * np.var(means)))
    twice = found + found
    assert twice.on_search.error == pytest.approx(found.on_search.error), "the same pools again tell nothing new"


def test_updates_at_equal_size_are_compared_with_equally_many_pools():
    """Six usable trajectories are of one pool or of three: with all pools that are left, the latter had the noisier
    reward gradient, and 0.78 of the cosine."""
    few, many = [], []
    for draw in range(100):
        pools = [measured(1000 * draw + seed) for seed in range(6)]
        for found, count in ((few, 2), (many, 24)):
            usable = np.arange(24) < count
            taken = [Chosen(np.arange(24), {"raw": 2 * pool.candidates.rewards - 1}, 0, usable) for pool in pools]
            found.append(np.mean(_at_equal(pools, taken, 6).values))
    error = np.hypot(np.std(few), np.std(many)) / np.sqrt(100)
    assert abs(np.mean(few) - np.mean(many)) < 3 * error
    assert 0.22 * np.mean(many) > 10 * error, "that would be seen"


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
    assert figures.at_equal.values == [0.0, 0.0]
    both = figures_of(method("grpo_full", 4), pools, seed=0, equal=2 * GROUP)
    assert both.at_equal.values == [], "an update of all pools has none to be compared with; it gave rounding errors"


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


def test_the_table_is_whole_in_80_columns():
    """Where the output is no terminal every cosine was cut to `0.1…`."""
    found = dict.fromkeys(align.METHODS, figures_of(method("grpo_full", 12), [measured(s) for s in range(3)], 0, 6))
    console = Console(width=80, file=io.StringIO())
    console.print(align.table(found, [0, 50], 3, 6))
    shown = console.file.getvalue()
    assert "…" not in shown
    assert all(name in shown for name in align.METHODS)
    assert shown.count("±") == 5 * len(align.METHODS)


def test_the_controls_take_as_many_as_the_runs_own_sdga_would():
    """With the default phase_reserve in place of the config's they followed another phase than sdga_phase."""
    config = load_config(Path("atlas"))
    reserves = {align._method(config, name, 12).own.phase_reserve for name in ("sdga_phase", "random_siblings")}
    assert reserves == {0.5}


def test_a_model_without_linear_layers_is_refused_before_anything_is_generated(tmp_path):
    """After the first policy's pools it ended with a traceback of autograd."""
    GPT2Config(vocab_size=384, n_embd=16, n_layer=1, n_head=2).save_pretrained(tmp_path)
    config = load_config(Path("atlas"), ["--model.path", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"align compares gradients of linear layers .*, a gpt2, has none"):
        align.refuse_without_linear_layers(config)
    align.refuse_without_linear_layers(load_config(Path("atlas")))


@pytest.mark.parametrize("name", ["grpo_half", "ar3po"])
def test_a_method_that_differs_in_what_it_generates_is_refused(name):
    """It was given GRPO-Full's pools, and so GRPO-Full's figures."""
    with pytest.raises(ConfigError, match=f"--methods: {name} takes all that it generates"):
        align._method(load_config(Path("atlas")), name, 12)


def test_figures_that_cannot_be_written_leave_those_of_the_policies_before(tmp_path, monkeypatch):
    """Hours of work, in the only copy."""
    output = tmp_path / "align.json"
    align._write(output, [0], 2, 8, 2, {})
    before = output.read_text()

    def full(path, content):
        with path.open("wb") as file:
            file.write(content[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(Path, "write_text", lambda path, text, **_: full(path, text.encode()))
    with pytest.raises(ConfigError, match="No space left on device"):
        align._write(output, [0, 4], 2, 8, 2, {})
    assert output.read_text() == before
