"""An episode's time: that in which the engine samples does not count."""

from __future__ import annotations

import asyncio

import pytest

from cusearch_async.rollout.limit import Limit

LIMIT_S, LONGER_S = 0.05, 0.2


async def run(episode) -> Limit:
    async with Limit(LIMIT_S) as limit:
        limit.begin()
        await episode(limit)
    return limit


async def hangs(*_) -> None:
    await asyncio.Event().wait()


async def test_what_hangs_beside_the_engine_is_ended():
    with pytest.raises(TimeoutError, match=r"^it took longer than episode.timeout_s \(0.05 s\)$"):
        await run(hangs)


async def test_an_environments_own_timeout_is_not_the_episodes():
    async def fails(_: Limit) -> None:
        raise TimeoutError("no answer of the judge")

    with pytest.raises(TimeoutError, match=r"^no answer of the judge$"):
        await run(fails)


async def test_a_slow_engine_ends_nothing_and_the_time_that_is_left_counts_after_it():
    sampled = []

    async def episode(limit: Limit) -> None:
        with limit.sampling():
            sampled.append(await asyncio.sleep(LONGER_S))
        await hangs()

    with pytest.raises(TimeoutError):
        await run(episode)
    assert sampled


async def test_of_two_turns_at_once_the_last_one_counts():
    async def episode(limit: Limit) -> None:
        with limit.sampling():
            with limit.sampling():
                pass
            await asyncio.sleep(LONGER_S)

    assert not (await run(episode)).has_expired


async def test_no_time_counts_before_it_begins_or_after_its_end():
    async with Limit(LIMIT_S) as limit:
        await asyncio.sleep(LONGER_S)
        limit.begin()
    with limit.sampling():
        pass
    assert not limit.has_expired


async def test_a_turn_that_begins_when_the_time_is_over_changes_nothing():
    async def episode(limit: Limit) -> None:
        try:
            await hangs()
        finally:
            with limit.sampling():
                pass

    with pytest.raises(TimeoutError):
        await run(episode)
