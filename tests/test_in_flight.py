"""Equal requests in flight are made once."""

from __future__ import annotations

import asyncio
import gc

import pytest

from cusearch_async.in_flight import InFlight


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


async def test_nothing_is_kept_of_a_request_that_is_answered():
    in_flight, asked = InFlight[str, str](), Asked()
    asked.answer.set_result("answer")
    for _ in range(2):
        await (await waiting(in_flight, asked))
        assert "key" not in in_flight
    assert asked.count == 2


async def test_a_failure_is_everybodys():
    in_flight, asked = InFlight[str, str](), Asked()
    tasks = [await waiting(in_flight, asked) for _ in range(3)]
    asked.answer.set_exception(ValueError("no"))
    assert [str(error) for error in await asyncio.gather(*tasks, return_exceptions=True)] == ["no"] * 3


async def test_one_who_is_cancelled_takes_nobodys_answer():
    in_flight, asked = InFlight[str, str](), Asked()
    impatient, patient = [await waiting(in_flight, asked) for _ in range(2)]
    impatient.cancel()
    asked.answer.set_result("answer")
    assert await patient == "answer"
    assert impatient.cancelled()


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
