"""The worker's loop on the buffer in memory, with an engine and a player that do what they are told."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import traceback

import pytest

from cusearch_async.algorithm.tickets import RunQuestions
from cusearch_async.config import load_config
from cusearch_async.errors import (
    ConfigError,
    EpisodeFailed,
    InvalidTrajectory,
    RetrievalUnavailable,
    SearchRefused,
    WeightsUnavailable,
)
from cusearch_async.lifecycle import progress, signals
from cusearch_async.rollout import loading
from cusearch_async.rollout import loop as rollout_loop
from cusearch_async.rollout.loop import RolloutLoop
from cusearch_async.transport.memory import MemoryBuffer, MemoryRun
from cusearch_async.types import Question
from tests.conftest import SLOW
from tests.strategies import make_trajectory
from tests.transport.conftest import RedisBackend, make_limits

QUESTIONS = RunQuestions([(1, [Question(id=f"q{i}", text="?", answers=("a",), category="x") for i in range(8)])], 0)
SMALL = ("--pool.questions", "4", "--pool.rollouts", "2", "--method.budget", "4", "--loss.minibatch", "4")


class FakeEngine:
    sampled_tokens, busy_s, last_token_age_s = 0, 0.0, 0.0

    def __init__(self) -> None:
        self.loaded, self.version = "", -1

    async def load(self, store: object, name: str, check: bool) -> None:
        self.loaded, self.version = name, int(name[1:].split("-", maxsplit=1)[0])


class HeldPlayer:
    """Episodes end when they are let go."""

    def __init__(self) -> None:
        self.playing: dict[tuple[int, int], asyncio.Event] = {}

    async def play(self, question: Question, ticket: int, rollout: int, worker: str):
        go = self.playing[ticket, rollout] = asyncio.Event()
        try:
            await go.wait()
        finally:
            self.playing.pop((ticket, rollout), None)
        return make_trajectory(ticket, rollout)


class FakeSearch:
    def status(self):
        return {}


@pytest.fixture
def parts(atlas_config):
    config = load_config(atlas_config, [*SMALL, "--pool.max_staleness", "1", "--rollout.max_episodes", "64"])
    run = MemoryRun()
    buffer, player = MemoryBuffer(run, make_limits(max_staleness=1)), HeldPlayer()
    loop = RolloutLoop("w", config, buffer, FakeEngine(), None, player, FakeSearch(), QUESTIONS)
    return run, buffer, player, loop


async def until(condition) -> None:
    async with asyncio.timeout(5 * SLOW):
        while not condition():
            await asyncio.sleep(0.01)


async def test_episodes_beyond_the_bound_of_restored_weights_are_given_back(parts):
    """Version 2 opens tickets below 16; the learner dies and goes on from step 1, whose weights open 12."""
    run, buffer, player, loop = parts
    await buffer.recover(2)
    await buffer.announce(2, "v000002-e1")
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: {ticket for ticket, _ in player.playing} == set(range(8, 16)))
    restarted = MemoryBuffer(run, make_limits(max_staleness=1))
    run.state = run.state.__class__(epoch=1, step=1, next_ticket=16, published=2, weights="v000002-e1")
    await restarted.recover(1)
    await restarted.announce(1, "v000001-e2")
    await until(lambda: {ticket for ticket, _ in player.playing} == set(range(8, 12)))
    await until(lambda: run.requeue == {12, 13, 14, 15})
    assert not run.attempts, "giving back is no failed attempt"
    for go in list(player.playing.values()):
        go.set()
    await until(lambda: run.ready == {8, 9, 10, 11})
    stop.set()
    await working
    assert not run.leases


async def test_a_worker_that_is_stopped_gives_everything_back(parts):
    run, buffer, player, loop = parts
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: len(player.playing) == 16)
    player.playing[0, 0].set()
    await until(lambda: "0:0" in run.entries)
    stop.set()
    await working
    assert run.requeue == set(range(8))
    assert not player.playing


async def test_a_worker_ends_though_its_engine_swallows_the_cancellation(parts):
    run, buffer, player, loop = parts
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: len(player.playing) == 16)
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


# What an episode's failure ends, and what not.


class FailingPlayer(HeldPlayer):
    """Fails the given places, once; the others end when they are let go."""

    def __init__(self, **failures) -> None:
        super().__init__()
        self.failures = {tuple(map(int, place.strip("p").split("_"))): error for place, error in failures.items()}

    async def play(self, question, ticket, rollout, worker):
        error = self.failures.pop((ticket, rollout), None)
        if error is not None:
            raise error
        return await super().play(question, ticket, rollout, worker)


def bug() -> TypeError:
    return TypeError("'NoneType' object is not subscriptable")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError(), "timeout"),
        (SearchRefused("it is refused (422)"), "search"),
        (EpisodeFailed("question 'q' makes a prompt of 600 tokens"), "episode"),
    ],
)
async def test_a_fault_in_the_data_fails_one_episode_is_named_and_counted(parts, caplog, error, kind):
    run, buffer, _, loop = parts
    loop._player = player = FailingPlayer(p3_1=error)
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: len(player.playing) == 15 and not player.failures)
    player.playing[3, 0].set()
    await until(lambda: (3, 1) in player.playing and run.attempts == {3: 1})
    status = loop._status()
    assert (status.failed_episodes, status.failed_episodes_by_kind) == (1, f"{kind}:1")
    assert (
        f"episode 3:1 failed, its ticket will be requeued: {error or 'it took longer than episode.timeout_s'}"
        in caplog.text
    )
    stop.set()
    await working


async def test_a_trajectory_that_the_buffer_refuses_fails_its_episode(parts):
    run, buffer, player, loop = parts
    put = buffer.put

    async def refuse(trajectory):
        if (trajectory.ticket, trajectory.rollout) == (0, 0):
            raise InvalidTrajectory("trajectory 0:0: token_ids must be at most 1000, got 2000")
        return await put(trajectory)

    buffer.put = refuse
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: len(player.playing) == 16)
    for place in ((0, 0), (0, 1)):
        player.playing[place].set()
    await until(lambda: run.attempts == {0: 1})
    assert loop._status().failed_episodes_by_kind == "trajectory:1"
    stop.set()
    await working


async def test_an_error_in_the_program_ends_the_worker_with_itself_as_the_last_line_and_its_ticket_has_failed(parts):
    """Or the same ticket would end one worker after another for ever."""
    run, buffer, _, loop = parts
    loop._player = FailingPlayer(p5_0=bug())
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")
    with pytest.raises(TypeError) as caught:
        await asyncio.wait_for(loop.run(asyncio.Event()), 5 * SLOW)
    lines = traceback.format_exception(caught.value)
    assert lines[-1] == "TypeError: 'NoneType' object is not subscriptable\n"
    assert run.attempts == {5: 1}
    assert run.requeue == set(range(8))
    assert not run.leases


async def test_an_outage_that_was_waited_for_in_vain_costs_its_tickets_no_attempt(parts):
    run, buffer, _, loop = parts
    loop._player = FailingPlayer(p5_0=RetrievalUnavailable("down"))
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")
    with pytest.raises(RetrievalUnavailable, match="down"):
        await asyncio.wait_for(loop.run(asyncio.Event()), 5 * SLOW)
    assert not run.attempts
    assert run.requeue == set(range(8))


@pytest.mark.parametrize("error", [bug(), ConfigError("episode.max_prompt_tokens"), RetrievalUnavailable("down")])
@pytest.mark.system
async def test_a_worker_on_redis_whose_episodes_all_fail_at_once_ends(parts, redis_url, error):
    """The first failure cancels a loop in the midst of a Redis command, which may swallow the cancellation."""

    class Failing:
        async def play(self, question, ticket, rollout, worker):
            raise error

    _, _, _, loop = parts
    backend = RedisBackend(redis_url)
    try:
        for _ in range(10):
            buffer = backend.make(max_staleness=1, max_attempts=1000)
            await buffer.recover(0)
            await buffer.announce(0, "v000000-e1")
            worker = RolloutLoop("w", loop._config, buffer, FakeEngine(), None, Failing(), FakeSearch(), QUESTIONS)
            with pytest.raises(type(error)) as caught:
                await asyncio.wait_for(worker.run(asyncio.Event()), 10 * SLOW)
            assert caught.value is error
            await buffer.reset()
    finally:
        await backend.close()


@pytest.mark.parametrize("swallows", ["admit", "state", "heartbeat", "play"])
async def test_a_worker_ends_whatever_swallows_the_one_cancellation(parts, monkeypatch, swallows):
    monkeypatch.setattr(signals, "CANCEL_AGAIN_S", 0.05)
    monkeypatch.setattr(rollout_loop, "HEARTBEAT_S", 0.02)
    _, buffer, player, loop = parts
    playing, inside, swallowed, fails = (asyncio.Event() for _ in range(4))
    owner = player if swallows == "play" else buffer
    call, play = getattr(owner, swallows), player.play

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
        return await (swallow if swallows == "play" else play)(question, ticket, rollout, worker)

    setattr(owner, swallows, swallow)
    player.play = fail
    if swallows == "play":
        playing.set()
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")
    working = asyncio.create_task(loop.run(asyncio.Event()))
    await until(lambda: len(loop._episodes) == 16)
    playing.set()
    await asyncio.wait_for(inside.wait(), 5 * SLOW)
    fails.set()
    with pytest.raises(TypeError):
        await asyncio.wait_for(working, 10 * SLOW)
    assert swallowed.is_set()


# Weights.


class TornStore:
    """An engine's weights: some versions cannot be read."""

    def __init__(self, engine: FakeEngine, *torn: str) -> None:
        self.torn, self.tried = set(torn), []
        load = engine.load

        async def reading(store, name, check):
            self.tried.append(name)
            if name in self.torn:
                raise WeightsUnavailable(f"{name} is missing or damaged")
            await load(store, name, check)

        engine.load = reading


async def test_a_torn_version_is_passed_over_and_the_next_one_taken(parts, caplog):
    _, buffer, player, loop = parts
    torn = TornStore(loop._engine, "v000001-e1")
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: len(player.playing) == 16)
    await buffer.announce(1, "v000001-e1")
    await until(lambda: torn.tried.count("v000001-e1") >= 2)
    assert (loop._engine.loaded, len(player.playing)) == ("v000000-e1", 16)
    assert "v000001-e1 is missing or damaged; continuing with v000000-e1" in caplog.text
    await buffer.announce(2, "v000002-e1")
    await until(lambda: loop._engine.loaded == "v000002-e1")
    stop.set()
    await working


async def test_a_version_that_a_shared_disk_shows_late_is_loaded_when_it_is_there(parts):
    _, buffer, player, loop = parts
    torn = TornStore(loop._engine, "v000000-e1")
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: len(torn.tried) >= 2)
    torn.torn.clear()
    await until(lambda: len(player.playing) == 16)
    stop.set()
    await working


async def test_a_worker_with_nothing_to_do_gives_torn_weights_up_after_a_while(parts, monkeypatch):
    _, buffer, _, loop = parts
    TornStore(loop._engine, "v000000-e1")
    loop._loader = loading.PatientLoader(loop._engine, None, 0.3)
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")
    with pytest.raises(WeightsUnavailable, match=r"v000000-e1 is missing or damaged; no other version .* for 0\.3 s"):
        await asyncio.wait_for(loop.run(asyncio.Event()), 5 * SLOW)


async def test_a_worker_with_episodes_to_play_never_gives_torn_weights_up(parts):
    _, buffer, player, loop = parts
    torn = TornStore(loop._engine, "v000001-e1")
    loop._loader = loading.PatientLoader(loop._engine, None, 0.05)
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: len(player.playing) == 16)
    await buffer.announce(1, "v000001-e1")
    await until(lambda: torn.tried.count("v000001-e1") >= 3)
    assert not working.done()
    stop.set()
    await working


# Grants and leases.


async def test_a_grant_that_comes_after_the_weights_went_back_is_released(parts):
    """Asked with version 6, answered when version 0 is loaded: its bound is 8."""
    run, buffer, player, loop = parts
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
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await asyncio.wait_for(asked.wait(), 5 * SLOW)
    restarted = MemoryBuffer(run, make_limits(max_staleness=1))
    await restarted.recover(0)
    await restarted.announce(0, "v000000-e2")
    await until(lambda: loop._engine.version == 0)
    held.set()
    await until(lambda: run.requeue == set(range(24, 32)))
    assert all(ticket < 8 for ticket, _ in player.playing)
    assert not run.attempts
    stop.set()
    await working


class BeatingBuffer(MemoryBuffer):
    """Keeps what the worker said at its last heartbeat."""

    tickets: tuple[int, ...] = ()

    async def heartbeat(self, worker, tickets, status):
        self.tickets, self.status = tuple(tickets), status
        await super().heartbeat(worker, tickets, status)


async def test_the_leases_of_a_hung_engine_are_not_renewed_and_it_says_so(parts, monkeypatch, caplog):
    monkeypatch.setattr(rollout_loop, "HEARTBEAT_S", 0.02)
    run, _, player, loop = parts
    loop._buffer = buffer = BeatingBuffer(run, make_limits(max_staleness=1))
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: set(buffer.tickets) == set(range(8)))
    assert buffer.status.last_token_age_s == 0
    loop._engine.last_token_age_s = loop._config.redis.lease_s + 1
    await until(lambda: buffer.tickets == ())
    assert buffer.status.last_token_age_s == loop._config.redis.lease_s + 1
    assert caplog.text.count("the engine has produced no token for 61 s") == 1
    loop._engine.last_token_age_s = 0.5
    await until(lambda: set(buffer.tickets) == set(range(8)))
    assert len(player.playing) == 16, "the episodes go on"
    stop.set()
    await working


async def test_a_worker_that_waits_for_its_first_weights_says_so(parts, monkeypatch, caplog):
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.05)
    caplog.set_level("INFO")
    _, buffer, player, loop = parts
    load, let = loop._engine.load, asyncio.Event()

    async def load_slowly(store, name, check):
        await let.wait()
        await load(store, name, check)

    loop._engine.load = load_slowly
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    await until(lambda: "waiting for the learner to publish weights: 0 s" in caplog.messages)
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")
    await until(lambda: "waiting for the first weights to be loaded: 0 s" in caplog.messages)
    let.set()
    await until(lambda: player.playing)
    said = len(caplog.messages)
    await asyncio.sleep(0.2)
    assert len(caplog.messages) == said, "a worker that plays waits for nothing"
    stop.set()
    await working


async def test_a_worker_that_is_stopped_before_the_first_weights_ends(parts):
    stop = asyncio.Event()
    working = asyncio.create_task(parts[-1].run(stop))
    await asyncio.sleep(0.05)
    stop.set()
    await asyncio.wait_for(working, 5 * SLOW)
