"""What an episode's failure ends, and what not; on the buffer in memory and on Redis."""

from __future__ import annotations

import asyncio
import contextlib
import traceback

import aiohttp
import pytest

from cusearch_async.errors import ConfigError, EpisodeFailed, InvalidTrajectory, RetrievalUnavailable, SearchRefused
from cusearch_async.lifecycle import signals
from cusearch_async.rollout import loop as rollout_loop
from cusearch_async.rollout.loop import RolloutLoop
from tests.conftest import SLOW
from tests.fakes import Panic
from tests.rollout.workers import QUESTIONS, FailingRunner, FakeEngine, FakeSearch, HeldRunner, running, until
from tests.transport.conftest import RedisBackend
from tests.transport.filling import start


class ToolBroke(EpisodeFailed):
    """An error of a user's own environment."""


def bug() -> TypeError:
    return TypeError("'NoneType' object is not subscriptable")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("it took longer than episode.timeout_s (600 s)"), "timeout"),
        (SearchRefused("it is refused (422)"), "search"),
        (EpisodeFailed("question 'q' makes a prompt of 600 tokens"), "episode"),
        (aiohttp.ServerTimeoutError("a tool's server was silent"), "timeout"),
        (ToolBroke("the calculator is out of ink"), "episode"),
    ],
)
async def test_a_fault_in_the_data_fails_one_episode_is_named_and_counted(parts, caplog, error, kind):
    run, buffer, _, loop = parts
    loop._runner = runner = FailingRunner(p3_1=error)
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == 15 and not runner.failures)
        runner.running[3, 0].set()
        await until(lambda: (3, 1) in runner.running and run.attempts == {3: 1})
        status = loop._status()
        assert (status.failed_episodes, status.failed_episodes_by_kind) == (1, f"{kind}:1")
        assert f"episode 3:1 failed, its ticket will be requeued: {error}" in caplog.text


async def test_a_trajectory_that_the_buffer_refuses_fails_its_episode(parts):
    run, buffer, runner, loop = parts
    put = buffer.put

    async def refuse(trajectory):
        if (trajectory.ticket, trajectory.rollout) == (0, 0):
            raise InvalidTrajectory("trajectory 0:0: token_ids must be at most 1000, got 2000")
        return await put(trajectory)

    buffer.put = refuse
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == 16)
        for place in ((0, 0), (0, 1)):
            runner.running[place].set()
        await until(lambda: run.attempts == {0: 1})
        assert loop._status().failed_episodes_by_kind == "trajectory:1"


async def test_a_panic_ends_the_worker_and_its_ticket_has_failed(parts):
    run, buffer, _, loop = parts
    loop._runner = FailingRunner(p5_0=Panic("index out of bounds"))
    await start(buffer)
    with pytest.raises(BaseException, match="index out of bounds"):
        await asyncio.wait_for(loop.run(asyncio.Event()), 5 * SLOW)
    assert run.attempts == {5: 1}
    assert run.requeue == set(range(8))


async def test_an_error_in_the_program_ends_the_worker_with_itself_as_the_last_line_and_its_ticket_has_failed(parts):
    """Or the same ticket would end one worker after another for ever."""
    run, buffer, _, loop = parts
    loop._runner = FailingRunner(p5_0=bug())
    await start(buffer)
    with pytest.raises(TypeError) as caught:
        await asyncio.wait_for(loop.run(asyncio.Event()), 5 * SLOW)
    lines = traceback.format_exception(caught.value)
    assert lines[-1] == "TypeError: 'NoneType' object is not subscriptable\n"
    assert run.attempts == {5: 1}
    assert run.requeue == set(range(8))
    assert not run.leases


async def test_an_outage_that_was_waited_for_in_vain_costs_its_tickets_no_attempt(parts):
    run, buffer, _, loop = parts
    loop._runner = FailingRunner(p5_0=RetrievalUnavailable("down"))
    await start(buffer)
    with pytest.raises(RetrievalUnavailable, match="down"):
        await asyncio.wait_for(loop.run(asyncio.Event()), 5 * SLOW)
    assert not run.attempts
    assert run.requeue == set(range(8))


@pytest.mark.parametrize("error", [bug(), ConfigError("episode.max_prompt_tokens"), RetrievalUnavailable("down")])
@pytest.mark.system
async def test_a_worker_on_redis_whose_episodes_all_fail_at_once_ends(parts, redis_url, error):
    """The first failure cancels a loop in the midst of a Redis command, which may swallow the cancellation."""

    class Failing(HeldRunner):
        async def run(self, question, ticket, rollout, worker):
            raise error

    _, _, _, loop = parts
    backend = RedisBackend(redis_url)
    try:
        for _ in range(10):
            buffer = backend.make(max_staleness=1, max_attempts=1000)
            await start(buffer)
            worker = RolloutLoop("w", loop._config, buffer, FakeEngine(), None, Failing(), FakeSearch(), QUESTIONS)
            with pytest.raises(type(error)) as caught:
                await asyncio.wait_for(worker.run(asyncio.Event()), 10 * SLOW)
            assert caught.value is error
            await buffer.reset()
    finally:
        await backend.close()


@pytest.mark.parametrize("swallows", ["admit", "state", "heartbeat", "run"])
async def test_a_worker_ends_whatever_swallows_the_one_cancellation(parts, monkeypatch, swallows):
    monkeypatch.setattr(signals, "CANCEL_AGAIN_S", 0.05)
    monkeypatch.setattr(rollout_loop, "HEARTBEAT_S", 0.02)
    _, buffer, runner, loop = parts
    playing, inside, swallowed, fails = (asyncio.Event() for _ in range(4))
    owner = runner if swallows == "run" else buffer
    call, original = getattr(owner, swallows), runner.run

    async def swallow(*args):
        if playing.is_set() and not inside.is_set():
            inside.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            swallowed.set()
        return await call(*args)

    async def fail(question, ticket, rollout, worker):
        if (ticket, rollout) == (0, 0):
            await fails.wait()
            raise bug()
        return await (swallow if swallows == "run" else original)(question, ticket, rollout, worker)

    setattr(owner, swallows, swallow)
    runner.run = fail
    if swallows == "run":
        playing.set()
    await start(buffer)
    working = asyncio.create_task(loop.run(asyncio.Event()))
    await until(lambda: len(loop._episodes) == 16)
    playing.set()
    await asyncio.wait_for(inside.wait(), 5 * SLOW)
    fails.set()
    with pytest.raises(TypeError):
        await asyncio.wait_for(working, 10 * SLOW)
    assert swallowed.is_set()
