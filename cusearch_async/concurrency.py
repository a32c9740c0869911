"""Concurrent calls: batched, shared while they are in flight, or in a thread; and the pause before a retry."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")

_MOST_DOUBLINGS = 60
CONTROL = (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit)
"""What ends work from outside: no failure of the work itself."""


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


@dataclass(slots=True, eq=False)
class _Shared(Generic[Answer]):
    task: asyncio.Task[Answer]
    waiting: int = 0


class InFlight(Generic[Key, Answer]):
    """Requests in flight by key. Answers are not cached."""

    def __init__(self, ends_unwaited: bool = False) -> None:
        """`ends_unwaited`: a request that nobody waits for any more is cancelled; else it continues."""
        self._ends_unwaited = ends_unwaited
        self._shared: dict[Key, _Shared[Answer]] = {}
        self._running: set[asyncio.Task[Answer]] = set()

    def __contains__(self, key: Key) -> bool:
        return key in self._shared

    async def share(self, key: Key, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """The answer of `ask()`, or of the request with this key that is already in flight.

        All callers of a request get the same answer or the same exception. A cancelled caller stops waiting; the
        request continues for the others."""
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _Shared(asyncio.create_task(ask()))
            self._running.add(shared.task)
            shared.task.add_done_callback(lambda _: self._leave(key, shared))
        shared.waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.waiting -= 1
            if self._ends_unwaited and not shared.waiting and not shared.task.done():
                shared.task.cancel()
                self._leave(key, shared)

    def _leave(self, key: Key, shared: _Shared[Answer]) -> None:
        """Its answer has come, or nobody waits for it; whoever asks from now on asks anew."""
        if self._shared.get(key) is shared:
            del self._shared[key]
        if shared.task.done():
            self._running.discard(shared.task)
            # Else asyncio warns of an exception that was never retrieved, when all callers were cancelled.
            _ = shared.task.cancelled() or shared.task.exception()

    async def close(self) -> None:
        """Cancel all requests in flight, and wait until they have ended."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def doubling_pause_s(failed: int, first_s: float, longest_s: float) -> float:
    """The pause after `failed` failures in a row: it doubles each time, from `first_s` up to `longest_s`."""
    return min(first_s * 2.0 ** min(failed - 1, _MOST_DOUBLINGS), longest_s)


class DaemonThreads(ThreadPoolExecutor):
    """A new thread for each call: one that never returns takes no other's place, and does not keep the process from
    ending, as the threads of asyncio.to_thread do. It is a ThreadPoolExecutor because event loops ask for one."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        called: Future[Any] = Future()

        def call() -> None:
            if not called.set_running_or_notify_cancel():
                return
            try:
                given = function(*args, **named)
            except BaseException as error:
                called.set_exception(error)
            else:
                called.set_result(given)

        threading.Thread(target=call, daemon=True).start()
        return called

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing waits for what is left."""


async def in_daemon_thread(function: Callable[[], Answer]) -> Answer:
    """What `function` gives, called in a thread that does not keep the process from ending."""
    context = contextvars.copy_context()
    return await asyncio.wrap_future(DaemonThreads().submit(context.run, function))
