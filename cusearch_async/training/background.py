"""Work that runs concurrently with the training loop: publishing a weight version, writing a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from cusearch_async.lifecycle.signals import end_tasks


class Background:
    """One piece of work at a time. Its error is raised by the next call. Work that is not finished at the end of the
    context is cancelled; its threads are waited for when the event loop ends."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._task is not None:
            await end_tasks([self._task])
            if not self._task.cancelled():
                self._task.exception()  # else asyncio would log it with a stack trace

    @property
    def is_busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin `work`; call `finish` before."""
        self._task = asyncio.create_task(work)

    def check(self) -> None:
        """Raises: the error of work that has failed."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def finish(self) -> None:
        """Wait until the work is done. Raises: its error."""
        if self._task is not None:
            await asyncio.shield(self._task)
