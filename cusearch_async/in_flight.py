"""Sends equal requests that are in flight at the same time only once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")


class InFlight(Generic[Key, Answer]):
    """Requests in flight by key. Answers are not cached."""

    def __init__(self) -> None:
        self._tasks: dict[Key, asyncio.Task[Answer]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._tasks

    async def share(self, key: Key, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """The answer of `ask()`, or of the request with this key that is already in flight.

        All callers of a request get the same answer or the same exception. A cancelled caller stops waiting; the
        request continues for the others."""
        task = self._tasks.get(key)
        if task is None:
            task = asyncio.create_task(ask())
            self._tasks[key] = task
            task.add_done_callback(lambda _: self._tasks.pop(key))
            task.add_done_callback(_retrieve_exception)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel what is in flight, and wait until it has ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Prevents asyncio's warning about an exception that was never retrieved, when all callers were cancelled."""
    if not task.cancelled():
        task.exception()
