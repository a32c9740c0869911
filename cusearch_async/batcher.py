"""Combines single async calls into batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batcher(Generic[Item, Answer]):
    """Calls that arrive while a batch is running form the next batch. A single call starts at once."""

    def __init__(self, do: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]], max_batch: int) -> None:
        """`do` returns one answer per item, in the same order. When it fails, all calls of the batch fail."""
        self._do = do
        self._max_batch = max_batch
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._doing: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if self._doing is None:
            self._doing = asyncio.create_task(self._do_all())
        return await answer

    async def _do_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
                wanted = [one for one in batch if not one[1].cancelled()]
                if wanted:
                    await self._do_batch(wanted)
        finally:
            self._doing = None

    async def _do_batch(self, batch: Sequence[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._do([item for item, _ in batch])
            if len(answers) != len(batch):
                raise ValueError(f"a batch of {len(batch)} items got {len(answers)} answers")
        except BaseException as error:  # every caller must get the error
            for _, wait in batch:
                if isinstance(error, Exception) and not wait.cancelled():
                    wait.set_exception(error)
                wait.cancel()
            if not isinstance(error, Exception):
                raise
            return
        for (_, wait), answer in zip(batch, answers, strict=True):
            if not wait.cancelled():
                wait.set_result(answer)
