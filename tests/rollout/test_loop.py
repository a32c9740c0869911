"""The worker's loop on the buffer in memory, with an engine and a player that do what they are told."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from cusearch_async.algorithm.methods import State
from cusearch_async.config import load_config
from cusearch_async.rollout.loop import RolloutLoop
from cusearch_async.transport.memory import MemoryBuffer, MemoryRun
from cusearch_async.types import Question
from tests.strategies import make_trajectory
from tests.transport.conftest import make_shape

QUESTIONS = [Question(id=f"q{i}", text="?", answers=("a",), category="x") for i in range(8)]
SMALL = ("--pool.questions", "4", "--pool.rollouts", "2", "--method.budget", "4", "--loss.minibatch", "4")


class FakeEngine:
    sampled_tokens, busy_s = 0, 0.0

    def __init__(self) -> None:
        self.loaded, self.version = "", -1

    async def load(self, store: object, name: str, check: bool) -> None:
        self.loaded, self.version = name, int(name[1:].split("-", maxsplit=1)[0])


class HeldPlayer:
    """Episodes end when they are let go."""

    def __init__(self) -> None:
        self.playing: dict[tuple[int, int], asyncio.Event] = {}

    async def play(self, question: Question, ticket: int, rollout: int, worker: str):
        go = self.playing[ticket, rollout] = asyncio.Event()
        try:
            await go.wait()
        finally:
            del self.playing[ticket, rollout]
        return make_trajectory(ticket, rollout)


class FakeSearch:
    def facts(self):
        return {}


@pytest.fixture
def parts(atlas_config):
    config = load_config(atlas_config, [*SMALL, "--pool.max_staleness", "1", "--rollout.max_episodes", "64"])
    run = MemoryRun()
    buffer, player = MemoryBuffer(run, make_shape(max_staleness=1)), HeldPlayer()
    loop = RolloutLoop("w", config, buffer, FakeEngine(), None, player, FakeSearch(), QUESTIONS)
    return run, buffer, player, loop


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_episodes_beyond_the_bound_of_restored_weights_are_given_back(parts):
    """Version 2 opens tickets below 16; the learner dies and goes on from step 1, whose weights open 12."""
    run, buffer, player, loop = parts
    await buffer.recover(2, State(), {})
    await buffer.announce(2, "v000002-e1")
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: {ticket for ticket, _ in player.playing} == set(range(8, 16)))
    restarted = MemoryBuffer(run, make_shape(max_staleness=1))
    run.state = run.state.__class__(epoch=1, step=1, next_ticket=16, published=2, weights="v000002-e1")
    await restarted.recover(1, State(), {})
    await restarted.announce(1, "v000001-e2")
    await until(lambda: {ticket for ticket, _ in player.playing} == set(range(8, 12)))
    assert run.requeue == {12, 13, 14, 15}
    assert not run.attempts, "giving back is no failed attempt"
    for go in list(player.playing.values()):
        go.set()
    await until(lambda: run.ready == {8, 9, 10, 11})
    stop.set()
    await working
    assert not run.leases


async def test_a_worker_that_is_stopped_gives_everything_back(parts):
    run, buffer, player, loop = parts
    await buffer.recover(0, State(), {})
    await buffer.announce(0, "v000000-e1")
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: len(player.playing) == 16)
    player.playing[0, 0].set()
    await until(lambda: "0:0" in run.entries)
    stop.set()
    await working
    assert run.requeue == set(range(8))
    assert not player.playing


async def test_a_worker_ends_though_its_engine_swallows_the_cancellation(parts):
    run, buffer, player, loop = parts
    await buffer.recover(0, State(), {})
    await buffer.announce(0, "v000000-e1")
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: len(player.playing) == 16)
    loading = asyncio.Event()

    async def load(store, name, check):
        loading.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    loop._engine.load = load
    await buffer.announce(1, "v000001-e1")
    await loading.wait()
    stop.set()
    await asyncio.wait_for(working, 5)
    assert not run.leases
