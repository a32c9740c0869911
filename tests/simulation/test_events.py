"""The simulated run against closed forms, and its bounds under all troubles."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest

from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError
from cusearch_async.simulation.durations import Durations, Troubles, typical
from cusearch_async.simulation.events import Simulation
from cusearch_async.transport.memory import MemoryBuffer

N, G = 16, 2


def durations(episode_s=10.0, p99_s=None, update_s=8.0, publish_s=1.0, load_s=0.5):
    return Durations(
        episode_s=typical(episode_s, p99_s or episode_s),
        update_s=np.array([update_s]),
        searches=3.0,
        publish_s=publish_s,
        load_s=load_s,
        stands_s=load_s,
    )


@pytest.fixture
def simulated(atlas_config):
    def simulate(times=None, troubles=None, workers=4, steps=20, **pool):
        sizes = {"pool.questions": N, "pool.rollouts": G, "method.budget": N, "loss.minibatch": N}
        settings = sizes | {f"pool.{name}" if "." not in name else name: value for name, value in pool.items()}
        config = load_config(
            atlas_config, [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        )
        return Simulation(config, workers, times or durations(), troubles or Troubles(), steps).result()

    return simulate


def test_a_share_of_few_workers_is_one_of_them(simulated):
    """It was none, and slow workers seemed to cost nothing."""
    slow = simulated(troubles=Troubles(slow=(0.02, 5.0)), workers=4, max_staleness=0)
    assert slow.step_s > simulated(workers=4, max_staleness=0).step_s


def test_a_synchronous_step_is_the_sum_of_its_parts(simulated):
    found = simulated(workers=1, max_staleness=0)
    assert found.step_s == pytest.approx(10 + 8 + 1 + 0.5)
    assert found.learner_idle == pytest.approx(11.5 / 19.5)
    assert found.workers_idle == pytest.approx(9.5 / 19.5)
    assert (found.staleness_mean, found.staleness_max, found.wasted) == (0, 0, 0)
    assert found.trajectories_per_hour == pytest.approx(N * G * 3600 / 19.5)


def test_a_slow_learner_binds(simulated):
    found = simulated(durations(episode_s=1.0, update_s=50.0))
    assert found.step_s == pytest.approx(50)
    assert found.learner_idle == 0


def test_full_workers_bind(simulated):
    """Two workers with room for four episodes each run 8 at once, 32 a step."""
    times = durations(update_s=1.0, publish_s=0.0, load_s=0.0)
    found = simulated(times, workers=2, **{"rollout.max_episodes": 4})
    assert found.step_s == pytest.approx(40)
    assert found.workers_full > 0.99


def test_workers_that_are_always_busy_are_idle_for_no_time_and_not_for_less(simulated):
    times = durations(p99_s=20.0, update_s=1.0, publish_s=0.0, load_s=0.0)
    found = simulated(times, workers=3, **{"rollout.max_episodes": 4})
    assert (found.workers_idle, found.workers_full) == (0, 1)


def test_the_staleness_bound_binds_slow_episodes(simulated):
    """A pool begins when the step max_staleness + 1 before it is done and published."""
    found = simulated(durations(episode_s=60.0, load_s=0.0), steps=34, max_staleness=2)
    assert found.step_s == pytest.approx((8 + 1 + 60) / 3)
    assert found.staleness_mean == 2


def test_an_engine_that_loads_stands_still(simulated):
    """Each of these episodes sees one version being loaded: itself asked for when the one before was."""
    without, with_loads = (simulated(durations(60.0, load_s=s), steps=30, max_staleness=0) for s in (0.0, 5.0))
    assert with_loads.step_s - without.step_s == pytest.approx(5)


HANGS = Troubles(hang=(2e-3, 200.0))


def test_deferred_order_and_hedging_take_the_waiting_away_and_keep_the_bound(simulated):
    times = durations(6.0, 15.0)
    ticket, deferred, both = (
        simulated(times, HANGS, workers=8, steps=60, **pool)
        for pool in ({}, {"order": "deferred"}, {"order": "deferred", "hedge_after_s": 15})
    )
    assert ticket.learner_idle > deferred.learner_idle > 0.2
    assert both.learner_idle < 0.1
    assert (ticket.staleness_max, ticket.wasted) == (2, 0)
    assert deferred.staleness_max <= 4 >= both.staleness_max
    assert 0 < both.wasted < 0.04


def test_a_slow_worker_holds_up_ticket_order_more(simulated):
    times = durations(6.0, 15.0)
    slow = Troubles(slow=(0.125, 5.0))
    ticket, both = (
        simulated(times, slow, workers=8, steps=40, **{"rollout.max_episodes": 16, **pool})
        for pool in ({}, {"order": "deferred", "hedge_after_s": 15})
    )
    assert ticket.learner_idle > 3 * both.learner_idle


def test_a_slow_worker_is_not_always_the_first_to_ask(simulated, monkeypatch):
    """It takes about its share. Before, it took all that it had room for at every announcement."""
    taken, admit = Counter[str](), MemoryBuffer.admit

    async def counting(own, worker, version, room):
        slots = await admit(own, worker, version, room)
        taken[worker] += len(slots)
        return slots

    monkeypatch.setattr(MemoryBuffer, "admit", counting)
    simulated(troubles=Troubles(slow=(1 / 4, 1.0)), steps=40, **{"rollout.max_episodes": 24})
    assert taken["w0"] / taken.total() == pytest.approx(1 / 4, abs=0.06)


def test_workers_that_die_cost_time_and_nothing_else(simulated):
    """A ticket is run again when its lease has expired, and all steps are done."""
    found = simulated(durations(6.0, 15.0), Troubles(mtbf_s=200.0), workers=8, steps=40, order="deferred")
    assert found.wasted > 0.01
    assert found.staleness_max <= 4
    assert found.trajectories_per_hour > 0


def test_the_same_run_has_the_same_figures_each_time(simulated):
    first, again = (simulated(durations(6.0, 15.0), HANGS, workers=8) for _ in range(2))
    assert asdict(first) == asdict(again)


def test_the_given_quantiles_are_those_of_the_episodes():
    drawn = typical(6.0, 15.0)
    assert np.median(drawn) == pytest.approx(6.0, rel=0.01)
    assert np.quantile(drawn, 0.99) == pytest.approx(15.0, rel=0.02)


def test_workers_that_are_down_for_longer_cost_more(simulated):
    """They came back with the next announcement."""
    steps_s = [simulated(troubles=Troubles(mtbf_s=100.0, restart_s=down_s)).step_s for down_s in (10.0, 100.0, 400.0)]
    assert steps_s[0] < steps_s[1] < steps_s[2]


def test_a_group_that_closes_with_its_last_attempt_does_not_end_the_run(simulated):
    """It was not looked at, and the run never ended."""
    outcome = simulated(durations(20.0, 40.0), Troubles(mtbf_s=40.0), workers=4, max_attempts=2)
    assert outcome.step_s > 0


def test_a_run_of_which_every_episode_dies_is_told(simulated):
    with pytest.raises(ConfigError, match="no episode of step 0 ends: 5 workers"):
        simulated(durations(1000.0), Troubles(mtbf_s=5.0), workers=2)


def test_little_of_a_slow_workers_time_is_in_vain(simulated):
    """Before, it ran as many episodes as it had room for, and nearly all in vain: 20 %."""
    pool = dict.fromkeys(("pool.questions", "method.budget", "loss.minibatch"), 160)
    pool |= {"order": "deferred", "hedge_after_s": 20}
    found = simulated(durations(6.0, 15.0), Troubles(slow=(1 / 16, 5.0)), workers=16, steps=60, **pool)
    assert found.wasted < 0.06
    assert found.learner_idle < 0.1


def test_hedges_that_hang_are_hedged(simulated):
    """Before, a pool waited for the first one: the learner was idle for 74 %."""
    pool = {"order": "deferred", "defer": 3, "hedge_after_s": 15}
    found = simulated(durations(6.0, 15.0), Troubles(hang=(3e-2, 200.0)), workers=8, steps=60, **pool)
    assert found.learner_idle < 0.3
