"""How often a worker asks the buffer, and what it reacts to at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from cusearch_async.transport.memory import MemoryBuffer
from tests.conftest import SLOW
from tests.rollout.workers import running, until
from tests.transport.conftest import make_limits
from tests.transport.filling import start


class CountingBuffer(MemoryBuffer):
    """Counts the requests of its worker, and tells time only when the test lets it: no wait for news runs out."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: Counter[str] = Counter()

    async def state(self):
        self.asked["state"] += 1
        return await super().state()

    async def admit(self, worker, loaded_version, room):
        self.asked["admit"] += 1
        return await super().admit(worker, loaded_version, room)

    async def wait_for_news(self, longest_s):
        return await super().wait_for_news(1e6)


@pytest.fixture
def buffer_class() -> type[CountingBuffer]:
    return CountingBuffer


async def quiet(buffer: CountingBuffer) -> Counter[str]:
    """What was asked, once nothing has been for a while."""
    async with asyncio.timeout(10 * SLOW):
        while True:
            before = buffer.asked.copy()
            await asyncio.sleep(0.2)
            if buffer.asked == before:
                return before


async def test_a_worker_without_tickets_asks_for_none_until_there_is_news(parts):
    run, buffer, runner, loop = parts
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == 16)
        before = await quiet(buffer)
        for place in [(0, 0), (0, 1), (1, 0)]:
            runner.running[place].set()
        await until(lambda: len(run.entries) == 3)
        assert await quiet(buffer) == before, "the bound allows no ticket: room changes nothing"
        await MemoryBuffer(run, make_limits(max_staleness=1)).release("w", [7], failed=True)
        await until(lambda: buffer.asked["admit"] > before["admit"])


async def test_announced_weights_are_loaded_and_their_tickets_played_at_once(parts):
    _, buffer, runner, loop = parts
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == 16)
        await quiet(buffer)
        await buffer.announce(1, "v000001-e1")
        await until(lambda: len(runner.running) == 24)


@pytest.mark.parametrize("most", [4])
async def test_room_of_an_ended_episode_is_used_at_once(parts):
    _, buffer, runner, loop = parts
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == 4)
        await quiet(buffer)
        for place in list(runner.running)[:2]:
            runner.running[place].set()
        await until(lambda: {ticket for ticket, _ in runner.running} == {1, 2})


async def test_a_ticket_whose_episodes_were_cancelled_is_released_and_played_again_at_once(parts):
    run, buffer, runner, loop = parts
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == 16)
        before, places = await quiet(buffer), ((3, 0), (3, 1))
        old = {place: runner.running[place] for place in places}
        tasks = [task for task, grant in loop._episodes.items() if grant.ticket == 3]
        for task in tasks:
            task.cancel()
        await until(lambda: all(runner.running.get(place) not in (None, old[place]) for place in places))
        assert buffer.asked["admit"] > before["admit"]
        assert 3 in run.leases


async def test_a_worker_that_waits_for_news_ends_at_once_when_it_is_stopped(parts):
    run, buffer, _, loop = parts
    await start(buffer)
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: len(run.leases) == 8)
    await quiet(buffer)
    stop.set()
    await asyncio.wait_for(working, 5 * SLOW)
    assert not run.leases
