"""What the loop decides for a step: which trajectories, and how many rollouts the coming tickets get."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from cusearch_async.algorithm.advantages import Advantages
from cusearch_async.algorithm.methods import Method, PlansRollouts, Selection
from cusearch_async.algorithm.methods.ar3po import Ar3poMemory
from cusearch_async.algorithm.methods.base import MethodSettings, NoMemory
from cusearch_async.algorithm.tickets import RunQuestions, question_index
from cusearch_async.config import load_config
from cusearch_async.errors import InvalidTrajectory, MethodFailed
from cusearch_async.training.background import in_thread
from cusearch_async.training.publisher import Publisher
from cusearch_async.training.selector import (
    Selector,
    advantages_of,
    candidates_of,
    initial_method_state,
    plan_groups,
    select,
)
from cusearch_async.transport.interface import WorkerStatus
from cusearch_async.transport.memory import MemoryBuffer, MemoryRun
from cusearch_async.types import Pool, Question
from cusearch_async.weights.folder import WeightStore
from tests.strategies import make_trajectory
from tests.training.learners import Learner
from tests.transport.conftest import make_limits

SMALL = ("--pool.questions", "4", "--pool.rollouts", "2", "--method.budget", "4", "--loss.minibatch", "4")


@pytest.fixture
def config_of(atlas_config):
    return lambda *overrides: load_config(atlas_config, [*SMALL, *overrides])


def pool_of(depths, step=0, **changes):
    return Pool(step, tuple(make_trajectory(i // 2, i % 2, depth=depth, **changes) for i, depth in enumerate(depths)))


def pool_of_8():
    return candidates_of(pool_of([1] * 8), 5)


def selected(pool, config, memory=None):
    method = config.method.make()
    candidates, memory = candidates_of(pool, 5), memory or method.decode("", 5)
    return select(candidates, pool.step, method, memory, config.method, config.run.seed)


def advantages(indices, pool, config):
    return advantages_of(np.array(indices), candidates_of(pool, 5), pool.step, config.method.make(), config.method)


def planned(step, config, memory=None):
    method, question_of = config.method.make(), RunQuestions([(1, QUESTIONS)], config.run.seed).id_of
    memory = memory or method.decode("", 5)
    return plan_groups(step, method, memory, question_of, config.questions_per_step, config.pool)


def test_a_selection_is_seeded_by_run_and_step_and_by_nothing_else(config_of):
    config = config_of("--method.name", "random")
    first, again = (selected(pool_of([1] * 8, step=3), config).indices.tolist() for _ in range(2))
    others = [selected(pool_of([1] * 8, step=step), config).indices.tolist() for step in range(20)]
    reseeded = selected(pool_of([1] * 8, step=3), config_of("--method.name", "random", "--run.seed", "1"))
    assert first == again
    assert len({tuple(o) for o in others}) > 5
    assert reseeded.indices.tolist() != first


def test_a_selection_of_none_is_warned_about(config_of, caplog):
    with caplog.at_level(logging.WARNING):
        selection = selected(pool_of([1] * 8, step=2), config_of("--method.name", "dapo"))
    assert len(selection.indices) == 0
    assert "step 2 trains on nothing: method dapo selected no trajectory" in caplog.text


class Chooses(Method[NoMemory]):
    """Selects the given indices, with the given advantages."""

    def __init__(self, indices, advantages=None, metrics=None):
        super().__init__(MethodSettings(), 4)
        self.indices, self.values, self.metrics = indices, advantages, metrics or {}

    def select(self, pool, memory, rng):
        return Selection(indices=self.indices, memory=memory, metrics=self.metrics)

    def advantages(self, pool, selected, singleton, divide_by_std):
        return Advantages(np.array(self.values), 0.0, 0.0)


@pytest.mark.parametrize(
    ("indices", "problem"),
    [
        (np.array([0, 2, 2, 3]), "the index 2 after 2; they must ascend, each once"),
        (np.array([3] * 16), "the index 3 after 3"),
        (np.array([2, 1]), "the index 1 after 2; they must ascend"),
        (np.array([2, 1], dtype=np.uint64), "the index 1 after 2; they must ascend"),
        (np.array([0, 8]), "the index 8; a pool of 8 trajectories has 0 to 7"),
        (np.array([-1, 3]), "the index -1; a pool of 8"),
        (np.array([[0, 1]]), "its indices must be a one-dimensional numpy array of integers"),
        (np.array([0.0, 1.0]), "its indices must be a one-dimensional numpy array of integers"),
        (np.array([True] * 8), "its indices must be a one-dimensional numpy array of integers"),
        ([0, 1], r"\[0, 1\]; its indices must be a one-dimensional numpy array of integers"),
        (None, "None; its indices must be"),
    ],
)
def test_what_is_no_selection_from_the_pool_is_refused(config_of, indices, problem):
    """Before: an index that came twice was trained on twice, and the ledger did not close."""
    with pytest.raises(MethodFailed, match=f"^step 3: method.name sdga_phase: select\\(\\) gave .*{problem}"):
        select(pool_of_8(), 3, Chooses(indices), NoMemory(), config_of().method, 0)


@pytest.mark.parametrize("value", [np.nan, np.float32("inf"), "deep", None, np.array([1.0, 2.0])])
def test_a_metric_that_is_no_finite_number_is_refused(config_of, value):
    with pytest.raises(MethodFailed, match=r"^step 3: .* as its metric 'mean', which must be a finite number$"):
        select(pool_of_8(), 3, Chooses(np.array([0, 1]), metrics={"mean": value}), NoMemory(), config_of().method, 0)


def test_a_metric_of_every_step_is_refused(config_of):
    """It took the place of the documented figure in every row, and of what an alarm looks at."""
    with pytest.raises(MethodFailed, match=r"a metric 'coverage', which every step has already; name it otherwise$"):
        select(pool_of_8(), 3, Chooses(np.array([0]), metrics={"coverage": 1}), NoMemory(), config_of().method, 0)


def test_what_is_no_selection_at_all_is_refused(config_of):
    class Forgets(Chooses):
        def select(self, pool, memory, rng):
            self.indices = self.indices[:1]

    with pytest.raises(MethodFailed, match=r"select\(\) gave None, which is no Selection$"):
        select(pool_of_8(), 3, Forgets(np.array([0, 1])), NoMemory(), config_of().method, 0)


@pytest.mark.parametrize("given", [np.zeros(2), Advantages([0.5, 0.5], 0.0, 0.0), None])
def test_what_are_no_advantages_is_refused(config_of, given):
    method = Chooses(np.array([0, 1]))
    method.advantages = lambda *_: given
    with pytest.raises(MethodFailed, match="must give Advantages with an array of one finite number for each of the 2"):
        advantages_of(method.indices, pool_of_8(), 3, method, config_of().method)


def test_numpys_numbers_among_a_methods_metrics_can_be_written(config_of):
    """They ended the learner after the commit, and kept records from being written."""
    metrics = {"mean": np.float64(0.5), "deepest": np.int64(3), "low": np.float32(0.25), "any": np.bool_(1), "own": 2}
    method = Chooses(np.array([0, 1]), metrics=metrics)
    found = select(pool_of_8(), 3, method, NoMemory(), config_of().method, 0).metrics
    assert json.loads(json.dumps(found)) == {"mean": 0.5, "deepest": 3, "low": 0.25, "any": True, "own": 2}


@pytest.mark.parametrize("value", [True, np.bool_(1)])
def test_a_boolean_among_a_methods_metrics_leaves_the_record_readable(config_of, value):
    """It was written, and no replay could read the step."""
    method = Chooses(np.array([0, 1]), metrics={"any": value})
    found = select(pool_of_8(), 3, method, NoMemory(), config_of().method, 0).metrics
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=dict[str, float]) == {"any": 1.0}


class Plans(PlansRollouts[NoMemory]):
    def __init__(self, sizes):
        super().__init__(MethodSettings(), 4)
        self._sizes = sizes

    def group_sizes(self, memory, questions, rollouts):
        return self._sizes


def of_sizes(sizes, config):
    return plan_groups(3, Plans(sizes), NoMemory(), str, config.questions_per_step, config.pool)


@pytest.mark.parametrize("sizes", [[2, 2, 0, 2], [2, 2, -1, 2], [2, 2, 3, 2], [2, 2, 2], [2, 2, 2.5, 2], ["2"] * 4, 2])
def test_sizes_of_groups_that_no_worker_could_run_are_refused(config_of, sizes):
    """A group of 0 ended every worker, and no learner could take over."""
    rule = r"must give for each of the 4 questions a whole number from 1 to largest_group\(\) \(2\), got "
    with pytest.raises(MethodFailed, match=r"^step 3: Plans.group_sizes\(\) " + rule):
        of_sizes(sizes, config_of())


def test_numpys_sizes_of_groups_can_be_kept(config_of):
    """They ended the learner after the update."""
    sizes = of_sizes(np.full(4, 2), config_of())
    assert json.dumps(sizes) == '{"24": 2, "25": 2, "26": 2, "27": 2}'


@pytest.mark.parametrize("values", [[1.0], [1.0, np.nan], [[1.0, 2.0]], [1.0, np.inf], []])
def test_advantages_that_are_not_one_finite_number_each_are_refused(config_of, values):
    with pytest.raises(MethodFailed, match=r"^step 3: .* one finite number for each of the 2 selected"):
        advantages_of(np.array([0, 5]), pool_of_8(), 3, Chooses(None, values), config_of().method)


def test_a_trajectory_deeper_than_the_environment_allows_is_named(config_of):
    with pytest.raises(InvalidTrajectory, match=r"trajectory 1:1: depth must be in \[0, 5\], got 6"):
        selected(pool_of([1, 1, 1, 6, 1, 1, 1, 1]), config_of())


QUESTIONS = [Question(id=f"q{i}", text="?", answers=("a",), category="x") for i in range(6)]


def test_methods_without_a_plan_leave_all_groups_at_g(config_of):
    assert planned(0, config_of()) == {}


def test_a_commit_plans_the_tickets_that_the_next_version_opens(config_of):
    """Staleness 2: version 1 opens tickets below (2 + 1 + 1) 4 = 16, of which 12 to 15 are new."""
    config = config_of("--method.name", "ar3po", "--pool.max_staleness", "2")
    visits = {f"q{i}": ((0, 9),) if i < 3 else ((4, 9),) for i in range(6)}
    sizes = planned(0, config, Ar3poMemory(visits))
    assert sorted(sizes) == [12, 13, 14, 15]
    assert sum(sizes.values()) == 4 * 2
    hopeless = {ticket for ticket in sizes if question_index(ticket, 6, config.run.seed) < 3}
    assert max(sizes[t] for t in hopeless) <= 2 <= min(sizes[t] for t in sizes.keys() - hopeless)
    assert 1 in sizes.values()


def test_every_pool_is_planned_once(config_of):
    config = config_of("--method.name", "ar3po", "--pool.max_staleness", "1")
    plans = [planned(step, config) for step in range(3)]
    assert [ticket for sizes in plans for ticket in sizes] == list(range(8, 20)), "the first two pools are of G"
    assert {size for sizes in plans for size in sizes.values()} == {2}, "without history everyone gets G"


def test_what_is_kept_of_planned_sizes_is_of_coming_pools(config_of):
    """Else the checkpoint and Redis would grow with the steps."""
    config = config_of("--method.name", "ar3po", "--pool.max_staleness", "1")
    selector = Selector(
        config, RunQuestions([(1, QUESTIONS)], 0), initial_method_state(config.method, config.episode.s_max)
    )
    for step in range(4):
        first = step * 4
        pool = Pool(step, tuple(make_trajectory(first + i // 2, i % 2) for i in range(8)))
        kept = selector.choose(pool).remembered.sizes
        assert min(kept) == max(first + 4, 8), "the first two pools are of G"
        assert max(kept) == first + 3 * 4 - 1


def test_a_singleton_is_compared_with_its_whole_group_where_that_is_asked_for(config_of):
    """Group 1 has rewards 1 and 0.5, of which the first was selected."""
    rewards = [0.0, 0.0, 1.0, 0.5]
    pool = Pool(0, tuple(make_trajectory(i // 2, i % 2, reward=r) for i, r in enumerate(rewards)))
    found = advantages([2], pool, config_of("--method.singleton", "pool"))
    assert found.values == pytest.approx([0.25 / (np.std([1, 0.5], ddof=1) + 1e-6)])


def test_advantages_are_scaled_by_the_deviation_unless_that_is_switched_off(config_of):
    pool = Pool(0, tuple(make_trajectory(0, i, reward=r) for i, r in enumerate([1.0, 0.5])))
    assert advantages([0, 1], pool, config_of()).values == pytest.approx([0.7071, -0.7071], abs=1e-4)
    plain = config_of("--method.advantage_std", "false")
    assert advantages([0, 1], pool, plain).values == pytest.approx([0.25, -0.25])


def test_a_pool_out_of_order_is_refused_by_name():
    with pytest.raises(InvalidTrajectory, match=r"pool 4: .*0:1 comes after 1:0"):
        Pool(4, (make_trajectory(1, 0), make_trajectory(0, 1)))
    with pytest.raises(InvalidTrajectory, match="2:0 comes after 2:0"):
        Pool(4, (make_trajectory(2, 0), make_trajectory(2, 0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": float("nan")}, "reward must be finite, got nan"),
        ({"f1": float("inf")}, "f1 must be finite and >= 0, got inf"),
        ({"depth": -1}, "depth must be finite and >= 0, got -1"),
        ({"logprobs": np.array([-1, float("-inf"), -1, -1], np.float32)}, "sampled token 1 has -inf"),
        ({"logprobs": np.array([-1, -1, -1, float("nan")], np.float32)}, "sampled token 3 has nan"),
        ({"versions": np.zeros(3, np.int32)}, "4 sampled tokens need as many logprobs and versions"),
        ({"sampled": 0}, "at least one sampled"),
    ],
)
def test_a_trajectory_that_nothing_can_be_learned_from_is_refused_by_name(changes, message):
    with pytest.raises(InvalidTrajectory, match=f"trajectory 5:2: .*{message}"):
        make_trajectory(5, 2, **changes)


async def test_an_announcement_that_redis_has_forgotten_is_made_again(tmp_path):
    """After a failover: no worker was granted a ticket until the run ended as stalled."""
    run = MemoryRun()
    buffer, store = MemoryBuffer(run, make_limits()), WeightStore(tmp_path)
    await buffer.recover(0)
    async with in_thread(Learner([])) as learner:
        publisher = Publisher(learner, buffer, store)
        for version in range(2):
            await publisher.publish(version)
        await publisher.finish()
        run.state = replace(run.state, published=0, weights="v000000-e1")
        await publisher.republish(1)
    assert ((await buffer.state()).published, (await buffer.state()).weights) == (1, "v000001-e1")


async def test_announced_weights_that_are_damaged_are_published_again_under_a_new_name(tmp_path):
    buffer, store = MemoryBuffer(MemoryRun(), make_limits()), WeightStore(tmp_path)
    await buffer.recover(0)
    verify, verified_in = store.verify, []

    def verify_somewhere(name):
        verified_in.append(threading.current_thread())
        return verify(name)

    store.verify = verify_somewhere
    async with in_thread(Learner([])) as learner:
        publisher = Publisher(learner, buffer, store)
        await publisher.publish(0)
        await buffer.heartbeat("w", [], WorkerStatus(version=0))
        await publisher.republish(0)
        assert not verified_in, "a worker has read them, which may take minutes: a pool would wait for it"
        await buffer.leave("w", [])
        await publisher.republish(0)
        assert (await buffer.state()).weights == "v000000-e1", "intact weights are left alone"
        assert verified_in[0] is not threading.main_thread(), "the loop continues meanwhile"
        (store.folder / "v000000-e1" / "model.safetensors").write_bytes(b"damaged")
        await publisher.republish(0)
        await publisher.finish()
    assert (await buffer.state()).weights == "v000000-e1-2"
    assert store.verify("v000000-e1-2").version == 0
