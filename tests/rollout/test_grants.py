"""What a worker does with the tickets it was granted, on the buffer in memory: attempts, leases, room."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from cusearch_async.config import load_config
from cusearch_async.errors import SearchRefused
from cusearch_async.rollout import loop as rollout_loop
from cusearch_async.rollout.loop import RolloutLoop
from cusearch_async.transport.memory import MemoryBuffer, MemoryRun
from tests.conftest import SLOW
from tests.rollout.workers import (
    QUESTIONS,
    SMALL,
    BeatingBuffer,
    FailingRunner,
    FakeEngine,
    FakeSearch,
    HeldRunner,
    running,
    until,
)
from tests.strategies import make_trajectory
from tests.transport.conftest import make_limits
from tests.transport.filling import start


@pytest.fixture
def make_loop(atlas_config):
    def make(buffer, runner, *options: str, engine: FakeEngine | None = None) -> RolloutLoop:
        config = load_config(atlas_config, [*SMALL, "--pool.max_staleness", "1", *options])
        return RolloutLoop("w", config, buffer, engine or FakeEngine(), None, runner, FakeSearch(), QUESTIONS)

    return make


class CountingEngine(FakeEngine):
    users = 0

    @contextlib.asynccontextmanager
    async def active(self):
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1


class RefusedAtFirst(HeldRunner):
    """In the first round every search of ticket 0 is refused, one after the other; the second round succeeds."""

    def __init__(self) -> None:
        super().__init__()
        self.played: set[int] = set()

    async def run(self, question, ticket, rollout, worker):
        if ticket:
            return await super().run(question, ticket, rollout, worker)
        if rollout not in self.played:
            self.played.add(rollout)
            await asyncio.sleep(0.15 * rollout)
            raise SearchRefused("it is refused (422)")
        await asyncio.sleep(1)
        return make_trajectory(ticket, rollout)


class SlowToLoad(FakeEngine):
    """From the second version on."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.is_loading = asyncio.Event(), False

    async def load(self, store, name, check):
        if self.loaded:
            self.is_loading = True
            await self.go.wait()
        await super().load(store, name, check)


async def test_a_ticket_that_is_requeued_while_weights_are_loaded_is_taken(make_loop):
    """A load may be a download of minutes, and the learner may wait for that very ticket."""
    run, engine, runner = MemoryRun(), SlowToLoad(), HeldRunner()
    buffer, other = (MemoryBuffer(run, make_limits(max_staleness=1)) for _ in range(2))
    loop = make_loop(buffer, runner, "--rollout.max_episodes", "64", engine=engine)
    await start(buffer)
    await other.admit("other", 0, 2)
    async with running(loop):
        await until(lambda: len(runner.running) == 14)
        run.state = replace(run.state, weights="v000000-e1-2")
        await until(lambda: engine.is_loading)
        await other.release("other", [0], failed=False)
        await until(lambda: (0, 0) in runner.running)
        engine.go.set()


async def test_a_round_in_which_every_episode_fails_is_one_failed_attempt(make_loop):
    run = MemoryRun()
    buffer = MemoryBuffer(run, make_limits(rollouts=5, max_attempts=3))
    loop = make_loop(buffer, RefusedAtFirst())
    await start(buffer)
    async with running(loop):
        await until(lambda: 0 in run.ready)
        assert run.attempts[0] == 1
        assert {f"0:{rollout}" for rollout in range(5)} <= set(run.entries)
        assert (run.counts["late_refused"], run.counts["failed_rollouts"]) == (0, 0)


async def test_the_siblings_of_a_failed_episode_are_played_to_their_end_and_count(make_loop):
    run = MemoryRun()
    buffer, runner = MemoryBuffer(run, make_limits(rollouts=3)), FailingRunner(p0_1=SearchRefused("422"))
    loop = make_loop(buffer, runner)
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == 23)
        runner.running[0, 0].set()
        await until(lambda: "0:0" in run.entries)
        await asyncio.sleep(0.2)
        assert 0 in run.leases
        assert not run.attempts
        runner.running[0, 2].set()
        await until(lambda: (0, 1) in runner.running and run.attempts == {0: 1})
        assert {"0:0", "0:2"} <= set(run.entries)
        runner.running[0, 1].set()
        await until(lambda: 0 in run.ready)


async def test_a_failed_episode_of_a_worker_that_is_stopped_is_a_failed_attempt(make_loop):
    run = MemoryRun()
    buffer, runner = MemoryBuffer(run, make_limits()), FailingRunner(p0_1=SearchRefused("422"))
    loop = make_loop(buffer, runner)
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == 15)
    assert run.attempts == {0: 1}
    assert run.requeue == set(range(8))


class LapsingBuffer(MemoryBuffer):
    """Renews nothing."""

    async def heartbeat(self, worker, tickets, status):
        return []


async def test_an_episode_of_a_lease_that_ran_out_fails_no_later_grant_of_its_ticket(make_loop):
    run, fails, is_first = MemoryRun(), asyncio.Event(), [True]
    buffer, runner = LapsingBuffer(run, make_limits(rollouts=1)), HeldRunner()
    loop, original = make_loop(buffer, runner), runner.run

    async def play_or_fail(question, ticket, rollout, worker):
        if ticket == 0 and is_first:
            is_first.clear()
            await fails.wait()
            raise SearchRefused("422")
        return await original(question, ticket, rollout, worker)

    runner.run = play_or_fail
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == 7)
        run.leases[0], run.first_deadline = ("w", run.now), run.now
        await until(lambda: run.attempts == {0: 1} and (0, 0) in runner.running)
        fails.set()
        await until(lambda: loop._activity.failures.by_kind.total() == 1)
        await asyncio.sleep(0.2)
        assert run.attempts == {0: 1}


async def test_an_episode_that_is_ended_while_its_ticket_goes_back_is_counted_once(make_loop, monkeypatch):
    """Version 2 opens tickets below 16; the learner goes back to step 1, whose weights open 12."""
    monkeypatch.setattr(rollout_loop, "HEARTBEAT_S", 0.02)
    run, go_on, asked = MemoryRun(), asyncio.Event(), asyncio.Event()
    buffer, runner = BeatingBuffer(run, make_limits(rollouts=1)), FailingRunner(p12_0=SearchRefused("422"))
    loop, release = make_loop(buffer, runner), buffer.release

    async def release_late(worker, tickets, failed):
        if failed and not asked.is_set():
            asked.set()
            await go_on.wait()
        await release(worker, tickets, failed)

    buffer.release = release_late
    await buffer.recover(2)
    await buffer.announce(2, "v000002-e1")
    async with running(loop):
        await asyncio.wait_for(asked.wait(), 5 * SLOW)
        run.state = run.state.__class__(epoch=1, step=1, next_ticket=16, published=2, weights="v000002-e1")
        learner = MemoryBuffer(run, make_limits(rollouts=1))
        await learner.recover(1)
        await learner.announce(1, "v000001-e2")
        await until(lambda: {ticket for ticket, _ in runner.running} == set(range(8, 12)))
        go_on.set()
        await until(lambda: run.requeue == {12, 13, 14, 15})
        assert loop._status().in_flight == 4
        await learner.announce(2, "v000002-e2")
        await until(lambda: (12, 0) in runner.running)
        runner.running[12, 0].set()
        await until(lambda: set(buffer.tickets) == {8, 9, 10, 11, 13, 14, 15})
        assert loop._status().in_flight == 7


async def test_a_worker_whose_episodes_all_wait_for_room_runs_what_a_dead_one_has_left(make_loop):
    """Or the buffer stays full: its oldest pool lacks the dead worker's ticket. The engine sleeps while they wait: a
    colocated learner would wait for room in the buffer, which only the learner makes."""
    run = MemoryRun()
    limits = make_limits(limit=6)
    buffer, dead, runner = MemoryBuffer(run, limits), MemoryBuffer(run, limits), HeldRunner()
    engine = CountingEngine()
    loop = make_loop(buffer, runner, "--rollout.max_episodes", "4", engine=engine)
    await start(buffer)
    assert len(await dead.admit("dead", 0, 2)) == 2

    def let_go():
        for go in list(runner.running.values()):
            go.set()

    async with running(loop):
        await until(lambda: len(runner.running) == 4)
        assert engine.users == 4
        await until(lambda: let_go() or run.ready == {1, 2, 3})
        await until(lambda: let_go() or (5 in run.leases and not runner.running))
        await until(lambda: not engine.users)
        assert run.ready == {1, 2, 3}
        assert loop._status().in_flight >= 4, "the buffer is full"
        run.leases[0], run.first_deadline = ("dead", run.now), run.now
        await until(lambda: let_go() or run.ready == {0, 1, 2, 3})
