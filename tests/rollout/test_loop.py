"""The worker's loop on the buffer in memory: weights that go back, its end, its reports, the run's contract."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest

from cusearch_async.errors import ContractMismatch
from cusearch_async.lifecycle import progress
from cusearch_async.rollout import loop as rollout_loop
from cusearch_async.run.identity import Identity
from cusearch_async.transport.memory import MemoryBuffer
from tests.conftest import SLOW
from tests.rollout.workers import BeatingBuffer, running, until
from tests.transport.conftest import make_limits
from tests.transport.filling import start


async def test_episodes_beyond_the_bound_of_restored_weights_are_given_back(parts):
    """Version 2 opens tickets below 16; the learner dies and goes on from step 1, whose weights open 12."""
    run, buffer, runner, loop = parts
    await buffer.recover(2)
    await buffer.announce(2, "v000002-e1")
    async with running(loop):
        await until(lambda: {ticket for ticket, _ in runner.running} == set(range(8, 16)))
        restarted = MemoryBuffer(run, make_limits(max_staleness=1))
        run.state = run.state.__class__(epoch=1, step=1, next_ticket=16, published=2, weights="v000002-e1")
        await restarted.recover(1)
        await restarted.announce(1, "v000001-e2")
        await until(lambda: {ticket for ticket, _ in runner.running} == set(range(8, 12)))
        await until(lambda: run.requeue == {12, 13, 14, 15})
        assert not run.attempts, "giving back is no failed attempt"
        for go in list(runner.running.values()):
            go.set()
        await until(lambda: run.ready == {8, 9, 10, 11})
    assert not run.leases


async def test_a_worker_that_is_stopped_gives_everything_back(parts):
    run, buffer, runner, loop = parts
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == 16)
        runner.running[0, 0].set()
        await until(lambda: "0:0" in run.entries)
    assert run.requeue == set(range(8))
    assert not runner.running


async def test_a_worker_ends_though_its_engine_swallows_the_cancellation(parts):
    run, buffer, runner, loop = parts
    await start(buffer)
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: len(runner.running) == 16)
    loading = asyncio.Event()

    async def load(store, name, check):
        loading.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    loop._engine.load = load
    await buffer.announce(1, "v000001-e1")
    await loading.wait()
    stop.set()
    await asyncio.wait_for(working, 5 * SLOW)
    assert not run.leases


async def test_a_grant_that_comes_after_the_weights_went_back_is_released(parts):
    """Asked with version 6, answered when version 0 is loaded: its bound is 8."""
    run, buffer, runner, loop = parts
    admit, held = buffer.admit, asyncio.Event()
    asked = asyncio.Event()

    async def admit_late(worker, version, room):
        slots = await admit(worker, version, room)
        if version == 6 and slots:
            asked.set()
            await held.wait()
        return slots

    buffer.admit = admit_late
    run.state = dataclasses.replace(run.state, step=6, next_ticket=24, published=6, weights="v000006-e1")
    await buffer.recover(6)
    await buffer.announce(6, "v000006-e1")
    async with running(loop):
        await asyncio.wait_for(asked.wait(), 5 * SLOW)
        restarted = MemoryBuffer(run, make_limits(max_staleness=1))
        await restarted.recover(0)
        await restarted.announce(0, "v000000-e2")
        await until(lambda: loop._engine.version == 0)
        held.set()
        await until(lambda: run.requeue == set(range(24, 32)))
        assert all(ticket < 8 for ticket, _ in runner.running)
        assert not run.attempts


async def test_the_leases_of_a_hung_engine_are_not_renewed_and_it_says_so(parts, monkeypatch, caplog):
    monkeypatch.setattr(rollout_loop, "HEARTBEAT_S", 0.02)
    run, _, runner, loop = parts
    loop._buffer = buffer = BeatingBuffer(run, make_limits(max_staleness=1))
    await start(buffer)
    async with running(loop):
        await until(lambda: set(buffer.tickets) == set(range(8)))
        assert buffer.status.last_token_age_s == 0
        loop._engine.last_token_age_s = loop._config.redis.lease_s + 1
        await until(lambda: buffer.tickets == ())
        assert buffer.status.last_token_age_s == loop._config.redis.lease_s + 1
        assert caplog.text.count("the engine has produced no token for 61 s") == 1
        loop._engine.last_token_age_s = 0.5
        await until(lambda: set(buffer.tickets) == set(range(8)))
        assert len(runner.running) == 16, "the episodes go on"


async def test_a_hung_worker_takes_none_of_its_tickets_again(parts, monkeypatch):
    """It did so each time, until all its groups had failed too often."""
    monkeypatch.setattr(rollout_loop, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(rollout_loop, "POLL_S", 0)
    run, _, runner, loop = parts
    loop._buffer = buffer = BeatingBuffer(run, make_limits(max_staleness=1))
    await start(buffer)
    async with running(loop):
        await until(lambda: set(buffer.tickets) == set(range(8)))
        loop._engine.last_token_age_s = loop._config.redis.lease_s + 1
        await until(lambda: buffer.tickets == ())
        run.now += loop._config.redis.lease_s + 1
        assert await MemoryBuffer(run, make_limits(max_staleness=1)).admit("other", 0, 0) == []
        assert run.requeue == set(range(8))
        loop._may_grant = True
        loop._change.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert run.requeue == set(range(8))
        assert run.attempts == dict.fromkeys(range(8), 1)
        assert len(runner.running) == 16
        loop._engine.last_token_age_s = 0.5
        loop._change.set()
        await until(lambda: not run.requeue)


async def test_a_worker_that_waits_for_its_first_weights_says_so(parts, monkeypatch, caplog):
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.05)
    caplog.set_level("INFO")
    _, buffer, runner, loop = parts
    load, let = loop._engine.load, asyncio.Event()

    async def load_slowly(store, name, check):
        await let.wait()
        await load(store, name, check)

    loop._engine.load = load_slowly
    async with running(loop):
        await until(lambda: "waiting for the learner to publish weights: 0 s" in caplog.messages)
        await start(buffer)
        await until(lambda: "waiting for the first weights to be loaded: 0 s" in caplog.messages)
        let.set()
        await until(lambda: runner.running)
        said = len(caplog.messages)
        await asyncio.sleep(0.2)
        assert len(caplog.messages) == said, "a worker that plays waits for nothing"


async def test_a_worker_that_is_stopped_before_the_first_weights_ends(parts):
    stop = asyncio.Event()
    working = asyncio.create_task(parts[-1].run(stop))
    await asyncio.sleep(0.05)
    stop.set()
    await asyncio.wait_for(working, 5 * SLOW)


# The run's contract.


async def test_a_worker_ends_and_gives_back_when_a_learner_changes_the_run(parts):
    """The heartbeat hears of it, though all its episodes are in flight and it asks for no ticket."""
    run, _, runner, loop = parts
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
    run, _, runner, loop = parts
    await MemoryBuffer(run, make_limits(), Identity({"run.seed": "7"})).recover(0)
    run.state = dataclasses.replace(run.state, published=0, weights="v000000-e1")
    with pytest.raises(ContractMismatch, match=r"run\.seed is not set here and 7 in the run"):
        await asyncio.wait_for(loop.run(asyncio.Event()), 5 * SLOW)
    assert not loop._engine.loaded
    assert not runner.running


async def test_a_worker_waits_for_a_learner_of_its_version_and_says_so(parts, monkeypatch, caplog):
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.02)
    caplog.set_level("INFO")
    run, _, runner, loop = parts
    ours = Identity({"run.seed": "0"})
    loop._buffer = MemoryBuffer(run, make_limits(max_staleness=1), ours)
    begun = MemoryBuffer(run, make_limits(max_staleness=1))
    await start(begun)
    async with running(loop):
        await until(lambda: "waiting for a learner of this version to take over the run: 0 s" in caplog.messages)
        assert not runner.running
        await MemoryBuffer(run, make_limits(max_staleness=1), ours).recover(0)
        await until(lambda: len(runner.running) == 16)
