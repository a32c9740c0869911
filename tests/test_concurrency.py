"""Calls that are batched or shared, and pauses between attempts."""

from __future__ import annotations

import asyncio
import gc

import pytest

from cusearch_async.concurrency import Batcher, InFlight, doubling_pause_s
from tests.conftest import SLOW

# --- batches --------------------------------------------------------------------------------------------


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


async def test_concurrent_calls_form_batches_and_each_gets_its_own_answer():
    double = Doubler()
    batcher = Batcher(double, max_batch=4)
    assert await asyncio.gather(*(batcher(i) for i in range(10))) == [2 * i for i in range(10)]
    assert double.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert await batcher(5) == 10, "a later one starts it again"


async def test_while_one_batch_runs_the_next_gathers_without_cancelled_calls():
    double = Doubler()
    double.go.clear()
    batcher = Batcher(double, max_batch=64)
    tasks = [asyncio.create_task(batcher(1))]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(batcher(i)) for i in (2, 3, 4)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    double.go.set()
    assert await asyncio.gather(tasks[0], tasks[1], tasks[3]) == [2, 4, 8]
    assert double.batches == [[1], [2, 4]]


async def test_a_failure_is_its_batchs_and_no_others():
    batcher = Batcher(Doubler(), max_batch=2)
    found = await asyncio.gather(*(batcher(i) for i in (12, 13, 14, 15)), return_exceptions=True)
    assert [type(one) for one in found] == [ValueError, ValueError, int, int]


async def test_a_cancelled_call_cancels_no_other_of_its_batch():
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


# --- shared requests ------------------------------------------------------------------------------------


class Asked:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.count = 0
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ask(self) -> str:
        self.count += 1
        return await asyncio.shield(self.answer)


async def waiting(in_flight: InFlight[str, str], asked: Asked, key: str = "key") -> asyncio.Task[str]:
    task = asyncio.create_task(in_flight.share(key, asked.ask))
    await asyncio.sleep(0)
    return task


async def test_equal_requests_share_one_answer_and_others_have_their_own():
    in_flight, asked, other = InFlight[str, str](), Asked(), Asked()
    tasks = [await waiting(in_flight, asked) for _ in range(3)] + [await waiting(in_flight, other, "other")]
    asked.answer.set_result("answer")
    other.answer.set_result("another")
    assert await asyncio.gather(*tasks) == ["answer"] * 3 + ["another"]
    assert (asked.count, other.count) == (1, 1)
    await (await waiting(in_flight, asked))
    assert asked.count == 2, "nothing is kept of a request that is answered"
    assert "key" not in in_flight


async def test_a_failure_is_everybodys():
    in_flight, asked = InFlight[str, str](), Asked()
    tasks = [await waiting(in_flight, asked) for _ in range(3)]
    asked.answer.set_exception(ValueError("no"))
    assert [str(error) for error in await asyncio.gather(*tasks, return_exceptions=True)] == ["no"] * 3


async def test_a_cancelled_caller_takes_nobodys_answer():
    in_flight, asked = InFlight[str, str](), Asked()
    impatient, patient = [await waiting(in_flight, asked) for _ in range(2)]
    impatient.cancel()
    asked.answer.set_result("answer")
    assert await patient == "answer"
    assert impatient.cancelled()


async def test_a_request_may_end_with_the_last_who_waits_for_it():
    in_flight, asked = InFlight[str, str](ends_unwaited=True), Asked()
    may_end, ended = asyncio.Event(), asyncio.Event()

    async def ask() -> str:
        try:
            return await asked.ask()
        finally:
            await may_end.wait()
            ended.set()

    callers = [asyncio.create_task(in_flight.share("key", ask)) for _ in range(2)]
    await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.wait(callers[:1])
    assert "key" in in_flight
    callers[1].cancel()
    await asyncio.wait(callers)
    assert "key" not in in_flight
    again = await waiting(in_flight, asked)
    may_end.set()
    await asyncio.wait_for(ended.wait(), 5 * SLOW)
    asked.answer.set_result("answer")
    assert await again == "answer"
    assert asked.count == 2, "whoever comes after them asks anew"


async def test_else_it_continues():
    in_flight, asked = InFlight[str, str](), Asked()
    task = await waiting(in_flight, asked)
    task.cancel()
    await asyncio.wait([task])
    again = await waiting(in_flight, asked)
    asked.answer.set_result("answer")
    assert await again == "answer"
    assert asked.count == 1


async def test_a_failure_that_nobody_waits_for_any_more_is_not_complained_about():
    unseen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    in_flight, asked = InFlight[str, str](), Asked()
    task = await waiting(in_flight, asked)
    task.cancel()
    asked.answer.set_exception(ValueError("no"))
    while "key" in in_flight:
        await asyncio.sleep(0)
    asked.answer.exception()
    del task, asked
    gc.collect()
    await asyncio.sleep(0)
    assert unseen == []


async def test_closing_ends_what_is_in_flight():
    in_flight, asked = InFlight[str, str](), Asked()
    task = await waiting(in_flight, asked)
    await in_flight.close()
    assert "key" not in in_flight
    with pytest.raises(asyncio.CancelledError):
        await task


# --- pauses ---------------------------------------------------------------------------------------------


def test_each_pause_is_twice_as_long_as_the_one_before_up_to_a_bound():
    assert [doubling_pause_s(failed, 0.5, 3.0) for failed in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert doubling_pause_s(10**9, 0.1, 2.0) == 2.0
