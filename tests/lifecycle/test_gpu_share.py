"""GPUs that learner and engines have in turn: never both, and nobody waits for a dead process."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from cusearch_async.errors import ConfigError, EngineDied, Stalled
from cusearch_async.lifecycle.gpu_share import GpuLock, GpuShare
from tests.conftest import SLOW

HOLD = """
import asyncio, sys, time
from pathlib import Path
from cusearch_async.lifecycle.gpu_share import GpuLock
lock = GpuLock(Path(sys.argv[1]), sys.argv[2], 60)
asyncio.run(lock.take())
print("taken", flush=True)
time.sleep(600)
"""


def lock(folder, role, patience_s=60.0):
    return GpuLock(folder, role, patience_s)


class Sleeper:
    """Learner or engine; `on_gpus` are those that are awake."""

    def __init__(self, name, role, folder, on_gpus):
        self.name, self.on_gpus = name, on_gpus
        self.lock = lock(folder, role)
        self.calls = []
        self.fails_at = None

    async def start(self):
        await self.lock.take()
        self.on_gpus.add(self.name)
        self.turns = GpuShare(self.lock, self._wake_up, self._sleep)
        return self

    async def _wake_up(self):
        self.calls.append("wake up")
        if self.fails_at == "wake up":
            raise EngineDied("no memory")
        self.on_gpus.add(self.name)
        await asyncio.sleep(0)

    async def _sleep(self):
        self.calls.append("sleep")
        await asyncio.sleep(0)
        self.on_gpus.discard(self.name)


@pytest.fixture
def on_gpus():
    return set()


async def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"run\.colocate: .*gpus\.lock cannot be locked .*choose a run\.folder"):
        await lock(tmp_path, "learner").take()


async def settle(times=20):
    for _ in range(times):
        await asyncio.sleep(0)


async def test_the_learner_excludes_engines_and_engines_do_not_exclude_each_other(tmp_path):
    learner, one, two = (lock(tmp_path, role, 0.05) for role in ("learner", "engine", "engine"))
    await one.take()
    await two.take()
    with pytest.raises(Stalled, match=r"the engines did not give back the GPUs for 0.05 s \(run.stall_s\)"):
        await learner.take()
    one.release()
    with pytest.raises(Stalled, match=str(tmp_path / "gpus.lock")):
        await learner.take()
    two.release()
    await learner.take()
    with pytest.raises(Stalled, match="the learner did not give back the GPUs"):
        await one.take()


@pytest.mark.parametrize(("has_them", "waits"), [("learner", "engine"), ("engine", "learner")])
async def test_a_process_that_is_killed_keeps_nobody_waiting(tmp_path, has_them, waits):
    command = [sys.executable, "-c", HOLD, str(tmp_path), has_them]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    try:
        assert holder.stdout.readline() == "taken\n"
        taking = asyncio.create_task(lock(tmp_path, waits).take())
        await settle()
        assert not taking.done()
        holder.send_signal(signal.SIGKILL)
        await taking
    finally:
        holder.kill()
        holder.communicate()


async def test_a_learner_with_a_pool_at_hand_lets_a_waiting_engine_have_its_turn(tmp_path, on_gpus):
    """It took the GPUs again at once, and moved all to the host and back for nothing, until no pool was left."""
    learner = await Sleeper("learner", "learner", tmp_path, on_gpus).start()
    order, engine = [], lock(tmp_path, "engine")

    async def load() -> None:
        await engine.take()
        order.append("engine")
        engine.release()

    async with learner.turns.active():
        waiting = asyncio.create_task(load())
        await settle()
    for step in range(3):
        await asyncio.sleep(0)  # the next pool is claimed while all is moved to the host
        async with learner.turns.active():
            order.append(step)
    await waiting
    assert order[0] == "engine"


async def test_it_sleeps_when_it_is_not_needed_and_wakes_up_for_the_first(tmp_path, on_gpus):
    engine = await Sleeper("engine", "engine", tmp_path, on_gpus).start()
    await settle()
    assert engine.calls == ["sleep"]
    async with engine.turns.active():
        assert on_gpus == {"engine"}
        async with engine.turns.active():
            pass
        await settle()
        assert on_gpus == {"engine"}, "the other one still needs it"
    await settle()
    assert engine.calls == ["sleep", "wake up", "sleep"]
    await lock(tmp_path, "learner", 0.05).take()


async def test_without_a_lock_it_never_sleeps(tmp_path):
    async def never():
        raise AssertionError

    turns = GpuShare(None, never, never)
    async with turns.active():
        await settle()
    await settle()


async def test_who_is_cancelled_while_it_waits_leaves_the_others_their_turn(tmp_path, on_gpus):
    learner = await Sleeper("learner", "learner", tmp_path, on_gpus).start()
    engine = Sleeper("engine", "engine", tmp_path, on_gpus)
    async with learner.turns.active():
        starting = asyncio.create_task(engine.start())
    await starting
    await settle()

    async def generate():
        async with engine.turns.active():
            assert on_gpus == {"engine"}

    async with learner.turns.active():
        first, second = asyncio.create_task(generate()), asyncio.create_task(generate())
        await settle()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    await second


async def test_a_failure_to_wake_up_is_everybodys(tmp_path, on_gpus):
    engine = await Sleeper("engine", "engine", tmp_path, on_gpus).start()
    await settle()
    engine.fails_at = "wake up"
    for _ in range(2):
        with pytest.raises(EngineDied, match="no memory"):
            async with engine.turns.active():
                raise AssertionError
    assert engine.calls == ["sleep", "wake up"], "it is not tried again"


@pytest.mark.parametrize("seed", range(20))
async def test_learner_and_engines_are_never_on_the_gpus_together(tmp_path, on_gpus, seed):
    """Each of them is used by several tasks, some of which are cancelled wherever they are."""
    rng = random.Random(seed)
    everyone = [Sleeper("learner", "learner", tmp_path, on_gpus)]
    everyone += [Sleeper(f"engine {i}", "engine", tmp_path, on_gpus) for i in range(2)]
    for each in everyone:
        await each.start()
        await settle(50)
    used = []

    async def use(who, pauses):
        async with who.turns.active():
            for _ in range(pauses):
                assert who.name in on_gpus
                assert on_gpus == {"learner"} or "learner" not in on_gpus
                await asyncio.sleep(0)
            used.append(who.name)

    tasks = []
    for _ in range(60):
        tasks.append(asyncio.create_task(use(rng.choice(everyone), rng.randrange(6))))
        if rng.random() < 0.2:
            rng.choice(tasks).cancel()
        await settle(rng.randrange(8))
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, 60 * SLOW)
    assert set(used) == {each.name for each in everyone}
