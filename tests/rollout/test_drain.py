"""A worker that is told to stop and has time for what it runs (`rollout.drain_s`)."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.conftest import SLOW
from tests.rollout.workers import BeatingBuffer, until
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
