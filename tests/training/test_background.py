"""Work that goes on behind the training loop."""

from __future__ import annotations

import asyncio
import gc

import pytest

from cusearch_async.errors import BufferLost
from cusearch_async.training.background import Background


async def fail() -> None:
    raise BufferLost("nothing is there")


async def test_what_has_failed_is_raised_by_the_next_call():
    async with Background() as background:
        background.start(fail())
        with pytest.raises(BufferLost, match="nothing is there"):
            await background.finish()
        with pytest.raises(BufferLost):
            background.check()


async def test_what_has_failed_beside_the_error_that_ends_the_loop_is_not_said_again(caplog):
    """Asyncio would log it with a stack trace, behind the learner's last line."""

    async def loop() -> None:
        async with Background() as background:
            background.start(fail())
            await asyncio.sleep(0)
            raise ValueError("the loop failed too")

    with pytest.raises(ValueError, match="the loop failed too"):
        await loop()
    gc.collect()
    assert not caplog.records


async def test_what_is_not_finished_is_cancelled():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def loop() -> None:
        async with Background() as background:
            background.start(work())
            await begun.wait()
            raise ValueError("the loop failed")

    with pytest.raises(ValueError, match="the loop failed"):
        await loop()
    assert ended.is_set()
