"""What wakes a worker that waits, on both buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.conftest import SLOW
from tests.transport.filling import G, N, fill, start, started

LONG_S = 60.0
SHORT_S = 0.02


async def caught_up(buffer: Any) -> None:
    """The worker has heard of everything so far."""
    while await buffer.wait_for_news(SHORT_S):
        pass


async def told_by(worker: Any, change: Callable[[], Awaitable[Any]]) -> bool:
    """Whether `change` wakes a worker that already waits."""
    await caught_up(worker)
    waiting = asyncio.create_task(worker.wait_for_news(LONG_S))
    await asyncio.sleep(SHORT_S)
    assert not waiting.done()
    await change()
    try:
        async with asyncio.timeout(2 * SLOW):
            return await waiting
    except TimeoutError:
        return False


CHANGES: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "weights are announced": lambda buffer: buffer.announce(1, "v000001-e1"),
    "another worker leaves": lambda buffer: buffer.leave("other", [0]),
    "an attempt has failed": lambda buffer: buffer.release("other", [0], failed=True),
    "an operator reopens a ticket": lambda buffer: buffer.reopen(0),
    "admission resumes": lambda buffer: buffer.pause(False),
    "the run is finished": lambda buffer: buffer.finish(),
    "a learner takes over": lambda buffer: buffer.recover(0),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_worker_that_waits_is_told_when(backend, name):
    buffer, worker = await started(backend), backend.make()
    await buffer.admit("other", 0, G)
    assert await told_by(worker, lambda: CHANGES[name](buffer))


async def test_what_happened_before_a_worker_waits_is_not_missed(backend):
    buffer, workers = backend.make(), [backend.make(), backend.make()]
    await start(buffer)
    for worker in workers:
        await caught_up(worker)
    await buffer.announce(1, "v000001-e1")
    for worker in workers:
        async with asyncio.timeout(2 * SLOW):
            assert await worker.wait_for_news(LONG_S)
        assert not await worker.wait_for_news(SHORT_S), "each has heard it once"


async def test_ordinary_work_wakes_nobody(backend):
    buffer, worker = await started(backend), backend.make()
    await caught_up(worker)
    await fill(buffer, await buffer.admit("other", 0, N * G))
    pool = await buffer.claim(0)
    await buffer.commit(pool, list(pool.trajectories))
    assert not await worker.wait_for_news(SHORT_S)


async def test_a_ticket_whose_lease_ran_out_is_news_for_others_when_one_worker_has_found_it(backend):
    buffer, worker = await started(backend), backend.make()
    await buffer.admit("other", 0, 2 * G)
    await caught_up(worker)
    await backend.expire_leases()
    assert not await worker.wait_for_news(SHORT_S)
    assert len(await buffer.admit("third", 0, G)) == G
    assert await worker.wait_for_news(LONG_S)


async def test_news_take_one_entry(redis_backend):
    buffer = await started(redis_backend)
    for version in range(1, 20):
        await buffer.announce(version, f"v{version:06d}-e1")
    assert await redis_backend.client.xlen(redis_backend.keys.news) == 1
