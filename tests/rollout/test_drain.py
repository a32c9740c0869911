"""A worker that is told to stop and has time for what it runs (`rollout.drain_s`)."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
import redis

from cusearch_async.config import RedisConfig, load_config
from cusearch_async.lifecycle.signals import later
from cusearch_async.rollout.loop import RolloutLoop
from cusearch_async.transport.buffer import RedisBuffer
from cusearch_async.transport.connection import Connection
from tests.conftest import SLOW
from tests.rollout.workers import QUESTIONS, SMALL, BeatingBuffer, FakeEngine, FakeSearch, HeldRunner, until
from tests.transport.conftest import make_limits
from tests.transport.filling import start


@pytest.fixture
def drain_s() -> float:
    return 1000.0


@pytest.fixture
async def leaving(parts):
    """Sixteen episodes of a worker that was told to stop: the runner that has them, the buffer's run, the worker."""
    run, buffer, runner, loop = parts
    await start(buffer)
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: len(runner.running) == 16)
    stop.set()
    yield run, buffer, runner, working
    working.cancel()
    await asyncio.wait([working])


async def test_what_it_runs_is_finished(leaving):
    run, _, runner, working = leaving
    for go in list(runner.running.values())[:10]:
        go.set()
    await until(lambda: len(run.entries) == 10)
    assert len(runner.running) == 6, "and no new episode was begun"
    for go in list(runner.running.values()):
        go.set()
    await asyncio.wait_for(working, 5 * SLOW)
    assert run.ready == set(range(8))
    assert not run.requeue
    assert not run.leases


@pytest.mark.parametrize("drain_s", [0.3])
async def test_what_takes_longer_is_given_back(leaving):
    run, _, runner, working = leaving
    runner.running[0, 0].set()
    runner.running[0, 1].set()
    await asyncio.wait_for(working, 5 * SLOW)
    assert run.ready == {0}
    assert run.requeue == set(range(1, 8))
    assert not run.attempts, "giving back is no failed attempt"
    assert not runner.running


async def test_a_finished_run_needs_nothing_more(leaving):
    _, buffer, runner, working = leaving
    assert len(runner.running) == 16
    await buffer.finish()
    began = time.monotonic()
    await asyncio.wait_for(working, 5 * SLOW)
    assert time.monotonic() - began < 5 * SLOW
    assert not runner.running


@pytest.mark.parametrize("buffer_class", [BeatingBuffer])
async def test_its_leases_are_renewed_meanwhile(leaving):
    _, buffer, runner, working = leaving
    for go in list(runner.running.values())[:-1]:
        go.set()
    await until(lambda: buffer.tickets == (7,))
    assert not working.done()


async def test_a_connection_that_is_lost_meanwhile_costs_no_episode(redis_url, atlas_config):
    """The worker is told to stop, and Redis closes all connections: it asks again, as at any other time."""
    config = load_config(atlas_config, [*SMALL, "--pool.max_staleness", "1", "--rollout.drain_s", "1000"])
    stop, runner = asyncio.Event(), HeldRunner()
    async with later(stop, config.rollout.drain_s) as gives_up, contextlib.AsyncExitStack() as opened:
        connection = Connection(RedisConfig(url=redis_url), 60.0, gives_up)
        opened.push_async_callback(connection.close)
        buffer = RedisBuffer(connection, "drains", make_limits(max_staleness=1))
        await start(buffer)
        loop = RolloutLoop("w", config, buffer, FakeEngine(), None, runner, FakeSearch(), QUESTIONS)
        working = asyncio.create_task(loop.run(stop))
        await until(lambda: len(runner.running) == 16)
        stop.set()
        with redis.Redis.from_url(redis_url) as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        for go in list(runner.running.values()):
            go.set()
        await asyncio.wait_for(working, 20 * SLOW)
        assert (await buffer.ledger()).buffered == 16
