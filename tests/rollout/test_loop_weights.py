"""A worker whose announced weights cannot be read, on the buffer in memory."""

from __future__ import annotations

import asyncio

import pytest

from cusearch_async.config import load_config
from cusearch_async.errors import WeightsUnavailable, WriteFailed
from cusearch_async.rollout import weight_loader
from cusearch_async.rollout.loop import RolloutLoop
from tests.conftest import SLOW
from tests.rollout.workers import QUESTIONS, SMALL, FakeEngine, FakeSearch, HeldRunner, running, until
from tests.transport.filling import start


class UnreadableStore:
    """An engine's weights: some versions cannot be read."""

    def __init__(self, engine: FakeEngine, *unreadable: str, error: Exception | None = None) -> None:
        self.unreadable, self.tried = set(unreadable), []
        load = engine.load

        async def reading(store, name, check):
            self.tried.append(name)
            if name in self.unreadable:
                raise error or WeightsUnavailable(f"{name} is missing or damaged")
            await load(store, name, check)

        engine.load = reading


async def test_a_torn_version_is_passed_over_and_the_next_one_taken(parts, caplog):
    _, buffer, runner, loop = parts
    store = UnreadableStore(loop._engine, "v000001-e1")
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == 16)
        await buffer.announce(1, "v000001-e1")
        await until(lambda: store.tried.count("v000001-e1") >= 2)
        assert (loop._engine.loaded, len(runner.running)) == ("v000000-e1", 16)
        assert "v000001-e1 is missing or damaged; continuing with v000000-e1" in caplog.text
        await buffer.announce(2, "v000002-e1")
        await until(lambda: loop._engine.loaded == "v000002-e1")


async def test_a_worker_without_room_for_a_version_continues_with_the_one_before(parts, caplog):
    _, buffer, runner, loop = parts
    store = UnreadableStore(loop._engine, "v000001-e1", error=WriteFailed("cannot write model.safetensors: disk full"))
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == 16)
        await buffer.announce(1, "v000001-e1")
        await until(lambda: store.tried.count("v000001-e1") >= 2)
        assert "cannot write model.safetensors: disk full; continuing with v000000-e1" in caplog.text
        store.unreadable.clear()
        await until(lambda: loop._engine.loaded == "v000001-e1")


async def test_a_worker_that_never_has_room_for_weights_names_its_disk(parts):
    _, buffer, _, loop = parts
    UnreadableStore(loop._engine, "v000000-e1", error=WriteFailed("cannot write model.safetensors: disk full"))
    loop._loader = weight_loader.PatientLoader(loop._engine, None, 0.3)
    await start(buffer)
    with pytest.raises(WriteFailed, match=r"^cannot write model.safetensors: disk full; .* loaded for 0\.3 s$"):
        await asyncio.wait_for(loop.run(asyncio.Event()), 5 * SLOW)


async def test_a_version_that_a_shared_disk_shows_late_is_loaded_when_it_is_there(parts):
    _, buffer, runner, loop = parts
    store = UnreadableStore(loop._engine, "v000000-e1")
    await start(buffer)
    async with running(loop):
        await until(lambda: len(store.tried) >= 2)
        store.unreadable.clear()
        await until(lambda: len(runner.running) == 16)


async def test_a_worker_with_nothing_to_do_gives_torn_weights_up_after_a_while(parts, monkeypatch):
    _, buffer, _, loop = parts
    UnreadableStore(loop._engine, "v000000-e1")
    loop._loader = weight_loader.PatientLoader(loop._engine, None, 0.3)
    await start(buffer)
    with pytest.raises(WeightsUnavailable, match=r"v000000-e1 is missing or damaged; no other version .* for 0\.3 s"):
        await asyncio.wait_for(loop.run(asyncio.Event()), 5 * SLOW)


async def test_the_first_version_and_each_so_many_are_compared_with_the_learners(parts, atlas_config):
    _, buffer, _, loop = parts
    config = load_config(atlas_config, [*SMALL, "--rollout.canary_every", "3"])
    engine, checks = FakeEngine(), []
    load = engine.load

    async def noting(store, name, check):
        checks.append(check)
        await load(store, name, check)

    engine.load = noting
    loop = RolloutLoop("w", config, buffer, engine, None, HeldRunner(), FakeSearch(), QUESTIONS)
    await start(buffer)
    async with running(loop):
        for version in range(1, 7):
            await until(lambda before=version - 1: engine.version == before)
            await buffer.announce(version, f"v{version:06d}-e1")
        await until(lambda: engine.version == 6)
    assert checks == [True, False, False, True, False, False, True]


async def test_a_worker_waits_for_a_learner_that_starts_again_and_publishes_what_cannot_be_read(parts, atlas_config):
    """After a power loss: it ended after redis.outage_s, and `launch`, with the learner that was loading, too."""
    _, buffer, runner, loop = parts
    config = load_config(atlas_config, [*SMALL, "--redis.outage_s", "0.05"])
    loop = RolloutLoop("w", config, buffer, FakeEngine(), None, runner, FakeSearch(), QUESTIONS)
    assert loop._loader._patience_s + 10 < config.run.stall_s, "its reason is told before the learner has stalled"
    store = UnreadableStore(loop._engine, "v000000-e1")
    await start(buffer)
    async with running(loop):
        await until(lambda: len(store.tried) >= 4)
        await buffer.announce(0, "v000000-e1-2")
        await until(lambda: loop._engine.loaded == "v000000-e1-2")


async def test_a_worker_with_episodes_to_play_never_gives_torn_weights_up(parts):
    _, buffer, runner, loop = parts
    store = UnreadableStore(loop._engine, "v000001-e1")
    loop._loader = weight_loader.PatientLoader(loop._engine, None, 0.05)
    await start(buffer)
    async with running(loop) as working:
        await until(lambda: len(runner.running) == 16)
        await buffer.announce(1, "v000001-e1")
        await until(lambda: store.tried.count("v000001-e1") >= 3)
        assert not working.done()
