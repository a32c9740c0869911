"""Concurrent calls: batched, shared while they are in flight, or in a thread; and the pause before a retry."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")

_MOST_DOUBLINGS = 60


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
            task = self._tasks[key] = asyncio.create_task(ask())
            task.add_done_callback(lambda _: self._tasks.pop(key))
            # Else asyncio warns of an exception that was never retrieved, when all callers were cancelled.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel all requests in flight, and wait until they have ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def doubling_pause_s(failed: int, first_s: float, longest_s: float) -> float:
    """The pause after `failed` failures in a row: it doubles each time, from `first_s` up to `longest_s`."""
    return min(first_s * 2.0 ** min(failed - 1, _MOST_DOUBLINGS), longest_s)


async def in_daemon_thread(function: Callable[[], Answer]) -> Answer:
    """What `function` gives, called in a new thread; one that never returns does not keep the process from ending, as
    those of asyncio.to_thread do."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Answer] = loop.create_future()

    def tell(act: Callable[[Any], None], what: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if done.done() else act(what))

    def call() -> None:
        try:
            given = function()
        except BaseException as error:
            tell(done.set_exception, error)
        else:
            tell(done.set_result, given)

    threading.Thread(target=contextvars.copy_context().run, args=(call,), daemon=True).start()
    return await done
