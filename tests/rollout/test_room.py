"""Episodes for whose groups another worker is faster, and the room of a worker that has them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.rollout import loop as rollout_loop
from cusearch_async.rollout.room import Room
from tests.rollout.workers import BeatingBuffer, running, until
from tests.strategies import make_trajectory
from tests.transport.filling import start

MOST = 16


@pytest.fixture
def most() -> int:
    return MOST


@pytest.fixture
def buffer_class():
    return BeatingBuffer


@pytest.fixture(autouse=True)
def fast_heartbeats(monkeypatch):
    monkeypatch.setattr(rollout_loop, "HEARTBEAT_S", 0.02)


async def test_an_episode_whose_group_another_worker_has_finished_is_left_off(parts):
    run, buffer, runner, loop = parts
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == MOST)
        for rollout in range(2):
            await buffer.put(make_trajectory(3, rollout, worker="faster"))
        await until(lambda: (3, 0) not in runner.running and (3, 1) not in runner.running)
        await until(lambda: buffer.status.late_episodes == 2)
        assert (buffer.status.in_flight, buffer.status.episodes) == (MOST - 2, 0)
        assert (run.ready, run.attempts, run.requeue) == ({3}, {}, set())


async def test_an_episode_that_comes_late_is_counted_and_costs_no_attempt(parts):
    run, buffer, runner, loop = parts
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == MOST)
        await buffer.put(make_trajectory(3, 0, worker="faster"))
        runner.running[3, 0].set()
        await until(lambda: buffer.status.late_episodes == 1)
        runner.running[3, 1].set()
        await until(lambda: buffer.status.episodes == 1)
        assert (run.ready, run.attempts) == ({3}, {})


async def test_an_episode_that_is_being_put_is_not_left_off(parts, monkeypatch):
    """Its own put closes the group, and the answer is on its way."""
    _, buffer, runner, loop = parts
    answers, put = asyncio.Event(), buffer.put

    async def slow_to_answer(trajectory):
        outcome = await put(trajectory)
        await answers.wait()
        return outcome

    monkeypatch.setattr(buffer, "put", slow_to_answer)
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == MOST)
        for rollout in range(2):
            runner.running[3, rollout].set()
        await until(lambda: len(loop._putting) == 2)
        beats = buffer.beats
        await until(lambda: buffer.beats > beats + 2)
        answers.set()
        await until(lambda: buffer.status.episodes == 2)
        assert buffer.status.late_episodes == 0


async def test_a_worker_that_is_always_late_has_one_group_in_flight(parts):
    run, buffer, runner, loop = parts
    await start(buffer)
    async with running(loop):
        await until(lambda: len(runner.running) == MOST)
        for ticket in sorted(run.leases):
            for rollout in range(2):
                await buffer.put(make_trajectory(ticket, rollout, worker="faster"))
        await until(lambda: not runner.running)
        for step in range(2):
            await buffer.commit(await buffer.claim(step), [])
        await buffer.announce(2, "v000002-e1")
        await until(lambda: buffer.status.version == 2 and buffer.status.in_flight)
        assert (len(runner.running), len(run.leases)) == (2, 1), "there are eight"


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 64), st.integers(1, 8))
def test_there_is_always_room_for_a_group_and_never_for_more_than_the_setting(ends, most, least):
    least = min(least, most)
    room = Room(most, least)
    for in_time in ends:
        before = room.size
        room.note(in_time)
        assert least <= room.size <= most
        assert room.size >= before if in_time else room.size <= before


def test_four_episodes_in_time_make_up_for_a_late_one():
    room = Room(MOST, 2)
    room.note(in_time=False)
    assert room.size == MOST - 1
    for _ in range(4):
        assert room.size == MOST - 1
        room.note(in_time=True)
    assert room.size == MOST
