"""Asked one by one, done many at a time."""

from __future__ import annotations

import asyncio

import pytest

from cusearch_async.batcher import Batcher
from tests.conftest import SLOW


class Doubler:
    def __init__(self):
        self.batches: list[list[int]] = []
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, items):
        self.batches.append(list(items))
        await self.go.wait()
        if 13 in items:
            raise ValueError("thirteen")
        return [2 * item for item in items]


async def test_what_is_asked_at_once_is_done_at_once_and_each_gets_its_own_answer():
    double = Doubler()
    batcher = Batcher(double, max_batch=4)
    assert await asyncio.gather(*(batcher(i) for i in range(10))) == [2 * i for i in range(10)]
    assert double.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert await batcher(5) == 10, "a later one starts it again"


async def test_while_one_batch_is_done_the_next_gathers():
    double = Doubler()
    double.go.clear()
    batcher = Batcher(double, max_batch=64)
    first = asyncio.create_task(batcher(1))
    await asyncio.sleep(0)
    later = [asyncio.create_task(batcher(i)) for i in (2, 3)]
    await asyncio.sleep(0)
    double.go.set()
    assert await asyncio.gather(first, *later) == [2, 4, 6]
    assert double.batches == [[1], [2, 3]]


async def test_a_failure_is_its_batchs_and_no_others():
    batcher = Batcher(Doubler(), max_batch=2)
    found = await asyncio.gather(*(batcher(i) for i in (12, 13, 14, 15)), return_exceptions=True)
    assert [type(one) for one in found] == [ValueError, ValueError, int, int]


async def test_one_that_is_cancelled_takes_no_other_with_it():
    batcher = Batcher(Doubler(), max_batch=64)
    tasks = [asyncio.create_task(batcher(i)) for i in range(4)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert await asyncio.gather(*tasks[1:]) == [2, 4, 6]
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]


async def test_a_batch_that_is_cancelled_or_answered_short_hangs_nobody():
    outcomes = iter([asyncio.CancelledError(), None])

    async def do(items):
        outcome = next(outcomes, items)
        if isinstance(outcome, BaseException):
            raise outcome
        return list(outcome or [])

    batcher = Batcher(do, max_batch=4)
    async with asyncio.timeout(5 * SLOW):
        with pytest.raises(asyncio.CancelledError):
            await asyncio.gather(batcher(1), batcher(2))
        with pytest.raises(ValueError, match="a batch of 2 items got 0 answers"):
            await asyncio.gather(batcher(1), batcher(2))
        assert await batcher(5) == 5


async def test_what_nobody_waits_for_any_more_is_not_done():
    double = Doubler()
    double.go.clear()
    batcher = Batcher(double, max_batch=1)
    tasks = [asyncio.create_task(batcher(i)) for i in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    double.go.set()
    assert await tasks[2] == 4
    assert double.batches == [[0], [2]]
