"""A worker's loop and the run's contract, on the buffer in memory."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from cusearch_async.config import load_config
from cusearch_async.errors import ContractMismatch
from cusearch_async.lifecycle import progress
from cusearch_async.rollout.loop import RolloutLoop
from cusearch_async.run.identity import Identity
from cusearch_async.transport.memory import MemoryBuffer, MemoryRun
from tests.conftest import SLOW
from tests.rollout.workers import QUESTIONS, SMALL, FakeEngine, FakeSearch, HeldRunner, running, until
from tests.transport.conftest import make_limits
from tests.transport.filling import start


@pytest.fixture
def parts(atlas_config):
    """A run, and a worker without a contract on it."""
    config = load_config(atlas_config, [*SMALL, "--pool.max_staleness", "1", "--rollout.max_episodes", "64"])
    run, runner = MemoryRun(), HeldRunner()
    buffer = MemoryBuffer(run, make_limits(max_staleness=1))
    return run, runner, RolloutLoop("w", config, buffer, FakeEngine(), None, runner, FakeSearch(), QUESTIONS)


async def test_a_worker_ends_and_gives_back_when_a_learner_changes_the_run(parts):
    """The heartbeat hears of it, though all its episodes are in flight and it asks for no ticket."""
    run, runner, loop = parts
    old, new = Identity({"run.seed": "0"}), Identity({"run.seed": "7"})
    loop._buffer = buffer = MemoryBuffer(run, make_limits(max_staleness=1), old)
    await start(buffer)
    working = asyncio.create_task(loop.run(asyncio.Event()))
    await until(lambda: len(runner.running) == 16)
    await MemoryBuffer(run, make_limits(max_staleness=1), new).recover(0, accepts_changes=True)
    with pytest.raises(ContractMismatch, match=r"run\.seed is 0 here and 7 in the run"):
        await asyncio.wait_for(working, 5 * SLOW)
    assert run.requeue == set(range(8))
    assert not run.leases
    assert not run.attempts, "nobody has failed"


async def test_a_worker_with_another_contract_ends_before_it_loads_weights(parts):
    run, runner, loop = parts
    await MemoryBuffer(run, make_limits(), Identity({"run.seed": "7"})).recover(0)
    run.state = dataclasses.replace(run.state, published=0, weights="v000000-e1")
    with pytest.raises(ContractMismatch, match=r"run\.seed is not set here and 7 in the run"):
        await asyncio.wait_for(loop.run(asyncio.Event()), 5 * SLOW)
    assert not loop._engine.loaded
    assert not runner.running


async def test_a_worker_waits_for_a_learner_of_its_version_and_says_so(parts, monkeypatch, caplog):
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.02)
    caplog.set_level("INFO")
    run, runner, loop = parts
    ours = Identity({"run.seed": "0"})
    loop._buffer = MemoryBuffer(run, make_limits(max_staleness=1), ours)
    begun = MemoryBuffer(run, make_limits(max_staleness=1))
    await start(begun)
    async with running(loop):
        await until(lambda: "waiting for a learner of this version to take over the run: 0 s" in caplog.messages)
        assert not runner.running
        await MemoryBuffer(run, make_limits(max_staleness=1), ours).recover(0)
        await until(lambda: len(runner.running) == 16)
