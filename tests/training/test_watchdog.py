"""A run that stands still is explained, and ends with Stalled."""

from __future__ import annotations

import asyncio
import logging
import re
import time

import pytest

from cusearch_async.config import load_config
from cusearch_async.errors import Stalled
from cusearch_async.lifecycle import progress
from cusearch_async.rollout import start_report
from cusearch_async.rollout.start_report import Starting
from cusearch_async.run.identity import Identity
from cusearch_async.run.provenance import COMMAND
from cusearch_async.training import watchdog as watchdog_module
from cusearch_async.training.loop import wait_for_pool
from cusearch_async.training.watchdog import Watchdog
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import WorkerStatus
from tests.conftest import SLOW
from tests.strategies import make_trajectory


@pytest.fixture
def config(atlas_config, redis_url, request):
    overrides = ["--run.name", request.node.name[:40], "--redis.url", redis_url, "--run.stall_s", str(0.2 * SLOW)]
    overrides += ["--pool.questions", "4", "--pool.rollouts", "2", "--method.budget", "4", "--loss.minibatch", "4"]
    return load_config(atlas_config, overrides)


async def started(buffer):
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")


async def no_republish(step):
    pass


async def test_nothing_moving_is_a_stall_that_says_who_waits_for_what(config):
    async with open_buffer(config) as buffer:
        await started(buffer)
        await buffer.admit("w", 0, 6)
        await buffer.put(make_trajectory(0, 0))
        await buffer.put(make_trajectory(0, 1))
        with pytest.raises(Stalled) as stalled:
            await wait_for_pool(buffer, 0, Watchdog(buffer, config, no_republish), asyncio.Event())
    message = str(stalled.value)
    assert "(run.stall_s) while step 0 waits for its pool: 1 of 4 groups are ready" in message
    assert "2 tickets are leased" in message
    assert "no worker is alive; start one" in message


async def test_workers_a_dead_retriever_and_a_pause_are_named(config):
    async with open_buffer(config) as buffer:
        await started(buffer)
        await buffer.heartbeat("w1", [], WorkerStatus(version=0, in_flight=7, retriever_down_s=42))
        await buffer.pause(True)
        found = await Watchdog(buffer, config, no_republish).explain(0)
        assert "the run is paused (`cusearch buffer resume`)" in found
        assert "w1 has version 0 of 0 and 7 episodes, and its retriever has been down for 42 s" in found
        await buffer.connection.client.zadd(buffer.keys.workers, {"w1": 0})
        assert "no worker is alive (last seen: w1 " in await Watchdog(buffer, config, no_republish).explain(0)


async def test_a_worker_that_loads_its_engine_is_named_and_not_missed(config, monkeypatch):
    monkeypatch.setattr(start_report, "BEAT_S", 0.05)
    identity = Identity({"run.seed": "0"})
    async with open_buffer(config, identity=identity) as buffer:
        with Starting(config, "w1", identity).reporting() as starting:  # as a worker that is there before the learner
            starting.does("loading vLLM")
            await started(buffer)
            await until_it_says(buffer, config, r"w1 is loading vLLM \(\d+ s\)$")
            assert (await buffer.workers())["w1"].is_alive
        await until_it_says(buffer, config, "no worker is alive; start one")
        monkeypatch.setenv(COMMAND, "cusearch launch atlas")
        await until_it_says(buffer, config, "this launch is starting its workers")
        with Starting(config, "w1", identity).reporting() as starting:
            starting.does("loading vLLM")
            await until_it_says(buffer, config, "w1 is loading vLLM")
            starting.is_ready()
            await buffer.heartbeat("w1", [], WorkerStatus(version=0, in_flight=3))
        await until_it_says(buffer, config, "w1 has version 0 of 0 and 3 episodes")


async def until_it_says(buffer, config, what):
    async with asyncio.timeout(5 * SLOW):
        while not re.search(what, await Watchdog(buffer, config, no_republish).explain(0)):
            await asyncio.sleep(0.02)


async def test_a_run_that_moves_is_left_alone(config):
    async with open_buffer(config) as buffer:
        await started(buffer)
        watchdog = Watchdog(buffer, config, no_republish)
        for slot in await buffer.admit("w", 0, 8):
            await watchdog.look(0)
            await asyncio.sleep(config.run.stall_s / 4)
            await buffer.put(make_trajectory(slot.ticket, slot.rollout))
        assert await wait_for_pool(buffer, 0, watchdog, asyncio.Event()) is not None


async def test_a_step_that_took_longer_than_a_stall_is_movement(config, monkeypatch):
    """Its pool was the last thing that was finished; then came a long update."""
    async with open_buffer(config) as buffer:
        await started(buffer)
        watchdog = Watchdog(buffer, config, no_republish)
        await watchdog.look(0)
        clock = time.monotonic() + 100 * config.run.stall_s
        monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: clock)
        await watchdog.look(1)
        clock += 2 * config.run.stall_s
        with pytest.raises(Stalled):
            await watchdog.look(1)


async def test_attempts_that_fail_are_movement_until_the_last(config, monkeypatch):
    """Five of ten minutes each are more than run.stall_s: the run ended before the group was given up."""
    async with open_buffer(config) as buffer:
        await started(buffer)
        watchdog, clock = Watchdog(buffer, config, no_republish), time.monotonic()
        monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: clock)
        for _ in range(config.pool.max_attempts):
            await watchdog.look(0)
            clock += 0.6 * config.run.stall_s
            await watchdog.look(0)
            clock += 0.3 * config.run.stall_s
            tickets = {slot.ticket for slot in await buffer.admit("w", 0, 2)}
            await buffer.release("w", list(tickets), failed=True)
        assert (await buffer.ledger()).incomplete_groups == 1
        await watchdog.look(0)
        clock += 1.1 * config.run.stall_s
        with pytest.raises(Stalled, match="no episode ended"):
            await watchdog.look(0)


async def test_an_outage_of_redis_that_was_waited_out_is_no_stall(config, monkeypatch):
    """The first look after it, before any worker was back, ended the run: a claim had waited, or the look itself."""
    async with open_buffer(config) as buffer:
        await started(buffer)
        watchdog, clock, ledger = Watchdog(buffer, config, no_republish), time.monotonic(), buffer.ledger
        monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: clock)
        await watchdog.look(0)
        away_s = config.redis.timeout_s + 2 * config.run.stall_s
        clock += away_s
        await watchdog.look(0)

        async def late():
            nonlocal clock
            clock += away_s
            return await ledger()

        monkeypatch.setattr(buffer, "ledger", late)
        await watchdog.look(0)
        monkeypatch.setattr(buffer, "ledger", ledger)
        await watchdog.look(0)
        clock += 0.6 * config.run.stall_s
        await watchdog.look(0)
        clock += 0.6 * config.run.stall_s
        with pytest.raises(Stalled):
            await watchdog.look(0)


async def test_looks_that_are_further_apart_than_an_answer_may_take_are_no_outage(config, monkeypatch):
    redis = config.redis.model_copy(update={"timeout_s": 0.1})
    async with open_buffer(config) as buffer:
        await started(buffer)
        watchdog = Watchdog(buffer, config.model_copy(update={"redis": redis}), no_republish)
        clock = time.monotonic()
        monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: clock)

        async def looks():
            nonlocal clock
            end = clock + 2 * config.run.stall_s + 1
            while clock < end:
                clock += 0.2
                await watchdog.look(0)

        with pytest.raises(Stalled):
            await looks()


async def test_a_pause_is_no_stall_however_long_it_lasts(config):
    async with open_buffer(config) as buffer:
        await started(buffer)
        await buffer.pause(True)
        watchdog = Watchdog(buffer, config, no_republish)
        deadline = time.monotonic() + 2 * config.run.stall_s
        while time.monotonic() < deadline:
            await watchdog.look(0)
            await asyncio.sleep(0.02)
        await buffer.pause(False)
        with pytest.raises(Stalled):
            await wait_for_pool(buffer, 0, watchdog, asyncio.Event())


async def test_a_learner_that_waits_says_for_what(config, caplog, monkeypatch):
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.05)
    with caplog.at_level(logging.INFO):
        async with open_buffer(config) as buffer:
            await started(buffer)
            watchdog = Watchdog(buffer, config, no_republish)
            await buffer.admit("w", 0, 8)
            await watchdog.look(0)
            for rollout in range(2):
                await buffer.put(make_trajectory(0, rollout))
            while len(caplog.records) < 2:
                await watchdog.look(0)
    said = [record.message for record in caplog.records]
    assert said[0].startswith(
        "waiting for the pool of step 0: 0 of 4 groups are ready, 4 tickets are leased, 0 requeued"
    )
    assert said[1].startswith(
        "waiting for the pool of step 0: 1 of 4 groups are ready, 3 tickets are leased, 0 requeued"
    )
    assert "no worker is alive; start one" in said[1]


async def test_a_run_that_stands_still_has_its_weights_looked_after_ever_more_rarely(config, monkeypatch):
    monkeypatch.setattr(watchdog_module, "REPUBLISH_S", 0.01)
    asked = []

    async def republish(step):
        asked.append(time.monotonic())

    async with open_buffer(config) as buffer:
        await started(buffer)
        with pytest.raises(Stalled):
            await wait_for_pool(buffer, 0, Watchdog(buffer, config, republish), asyncio.Event())
    assert 1 <= len(asked) <= 8, "each time after twice as long"


@pytest.mark.parametrize(("launch", "remedy"), [("", "restart it"), ("cusearch launch atlas", "stop this launch, and")])
async def test_a_worker_that_beats_and_finishes_nothing_is_named(config, monkeypatch, launch, remedy):
    """A launch ends with any of its workers."""
    monkeypatch.setenv(COMMAND, launch)
    async with open_buffer(config) as buffer:
        await started(buffer)
        lease_s = config.redis.lease_s
        await buffer.heartbeat("hung", [], WorkerStatus(version=0, in_flight=7, last_token_age_s=lease_s + 15))
        await buffer.heartbeat("busy", [], WorkerStatus(version=0, in_flight=7, last_token_age_s=3))
        found = await Watchdog(buffer, config, no_republish).explain(0)
    assert f"hung has version 0 of 0 and 7 episodes, and its engine has produced no token for 75 s; {remedy}" in found
    assert found.count("no token") == 1
