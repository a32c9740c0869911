"""The learner's heartbeat: it continues while the learner works, and ends with it, not before."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from cusearch_async.config import load_config
from cusearch_async.errors import BufferUnavailable
from cusearch_async.training import heartbeat as module
from cusearch_async.training.background import in_thread
from cusearch_async.training.heartbeat import Heartbeat
from cusearch_async.transport.limits import limits_of
from cusearch_async.transport.memory import MemoryBuffer, MemoryRun
from tests.conftest import SLOW, wait_until_async
from tests.training.learners import Learner

NOBODY = SimpleNamespace(silent=lambda after_s: [], is_asked_to_stop=lambda: False)
"""One rank alone."""


class Buffer(MemoryBuffer):
    """Keeps when it was told that the learner is alive."""

    def __init__(self, run, config):
        super().__init__(run, limits_of(config))
        self.beats: list[float] = []

    async def learner_heartbeat(self, status):
        self.beats.append(time.monotonic())
        await super().learner_heartbeat(status)


async def ended(heartbeat):
    return not heartbeat.is_busy


@pytest.fixture
async def scene(atlas_config, monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    config = load_config(atlas_config, [])
    buffer = Buffer(MemoryRun(), config)
    await buffer.recover(0)
    return SimpleNamespace(config=config, buffer=buffer)


async def test_it_tells_the_step_and_at_the_end_that_the_learner_has_ended(scene):
    async with Heartbeat(scene.buffer, NOBODY, 60, 60, asyncio.Event()) as heartbeat:
        heartbeat.step = 7

        async def told():
            learner = await scene.buffer.learner()
            return learner and (learner.epoch, learner.step) == (scene.buffer.epoch, 7)

        await wait_until_async(told, 10)
    assert await scene.buffer.learner() is None


async def test_an_update_does_not_delay_it_nor_does_its_end_after_an_error(scene):
    """The training loop has failed while the learner still works: what waits for the learner lets the loop go on."""
    learner, took = Learner([]), []

    def work(step):
        began = time.monotonic()
        time.sleep(0.5)
        took.append((began, time.monotonic()))

    async def fail():
        async with in_thread(learner) as trainer:
            trainer.update([], [], 0)
            raise BufferUnavailable("Redis is gone")

    learner.at_update = work
    async with Heartbeat(scene.buffer, NOBODY, 60, 60, asyncio.Event()):
        with pytest.raises(BufferUnavailable):
            await fail()
    [(began, ended)] = took
    assert sum(began < at < ended for at in scene.buffer.beats) > 3, "fifty are due in half a second"


async def test_an_outage_does_not_end_it_and_a_new_learner_does(scene):
    errors = [BufferUnavailable("Redis is gone"), BufferUnavailable("Redis is gone")]
    beat = scene.buffer.learner_heartbeat

    async def unsteady(status):
        if errors:
            raise errors.pop()
        await beat(status)

    scene.buffer.learner_heartbeat = unsteady
    async with Heartbeat(scene.buffer, NOBODY, 60, 60, asyncio.Event()) as heartbeat:
        await wait_until_async(scene.buffer.learner, 10)
        successor = Buffer(scene.buffer._run, scene.config)
        await successor.recover(0)

        await wait_until_async(lambda: ended(heartbeat), 10)
        heartbeat.check()


async def told_before_the_end(scene, monkeypatch, ranks, collective_s):
    """What is told of another rank, in step 7, before the process ends with status 1."""
    told, ends = [], []

    async def tell(error):
        told.append(str(error))

    async def has_ended():
        return ends

    monkeypatch.setattr("os._exit", lambda status: ends.append((status, len(told))))
    async with Heartbeat(scene.buffer, ranks, 60, collective_s, asyncio.Event(), 7, tell):
        await wait_until_async(has_ended, 10)
    assert ends[0] == (1, 1)
    return told[0]


async def test_a_silent_rank_is_told_of_before_the_process_ends(scene, monkeypatch):
    """No hook heard of it, and the run was "running or killed"."""
    ranks = SimpleNamespace(silent=lambda after_s: [3], is_asked_to_stop=lambda: False)
    told = await told_before_the_end(scene, monkeypatch, ranks, 40)
    assert told.startswith("rank 3 has not reported for 40 s (learner.collective_timeout_s) in step 7; the learner")


async def test_a_failed_rank_of_this_machine_is_told_of_where_rank_0_does_not_end_by_itself(scene, monkeypatch):
    """On a GPU rank 0 waits for it until long after the process is ended: no hook heard of it."""
    monkeypatch.setattr(module, "failed_ranks", ["rank 3 ended with status -9"])
    monkeypatch.setattr(module, "ENDING_S", 0.2)
    told = await told_before_the_end(scene, monkeypatch, NOBODY, 60)
    assert told == "rank 3 ended with status -9; the learner ends"


async def test_the_run_is_stopped_where_another_rank_is_asked_to(scene):
    stop = asyncio.Event()
    ranks = SimpleNamespace(silent=lambda after_s: [], is_asked_to_stop=lambda: True)
    async with Heartbeat(scene.buffer, ranks, 60, 60, stop), asyncio.timeout(10 * SLOW):
        await stop.wait()


async def test_an_error_of_the_program_is_raised_by_the_next_look(scene):
    """Without its watch over the ranks the learner must not go on."""

    def silent(after_s):
        raise TypeError("a rank has no name")

    ranks = SimpleNamespace(silent=silent, is_asked_to_stop=lambda: False)
    async with Heartbeat(scene.buffer, ranks, 60, 60, asyncio.Event()) as heartbeat:
        await wait_until_async(lambda: ended(heartbeat), 10)
        with pytest.raises(TypeError, match="a rank has no name"):
            heartbeat.check()


async def test_a_buffer_that_does_not_answer_does_not_keep_the_learner(scene):
    scene.buffer.learner_leaves = lambda: asyncio.sleep(3600)
    async with asyncio.timeout(10 * SLOW), Heartbeat(scene.buffer, NOBODY, 60, 60, asyncio.Event()):
        pass
