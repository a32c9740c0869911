"""Work that runs concurrently with the event loop: tasks of the training loop, and the learner in its thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from cusearch_async.learner.interface import Learner, Lent
from cusearch_async.lifecycle.gpu_share import GpuLock, GpuShare
from cusearch_async.lifecycle.signals import end_tasks
from cusearch_async.metrics.table import Metrics
from cusearch_async.types import Trajectory

if TYPE_CHECKING:  # it brings torch
    from cusearch_async.weights.interface import Canary

T = TypeVar("T")


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


class InThread:
    """A learner in a thread, so that the event loop keeps running while it trains: the same calls, to be awaited. They
    run in order, awaited or not."""

    def __init__(self, learner: Learner, executor: ThreadPoolExecutor, lock: GpuLock | None) -> None:
        self._learner = learner
        self._executor = executor
        self._gpus = GpuShare(lock, lambda: self._call(learner.reload), lambda: self._call(learner.offload))

    def active(self) -> AbstractAsyncContextManager[None]:
        """For all other calls of a colocated run: the learner has the GPUs inside. Raises: Stalled when the engines
        keep them."""
        return self._gpus.active()

    def update(
        self, selected: Sequence[Trajectory], advantages: NDArray[np.float64], step: int
    ) -> asyncio.Future[Metrics]:
        return self._call(self._learner.update, selected, advantages, step)

    @property
    def waited_s(self) -> float:
        return self._learner.waited_s

    def lend(self) -> asyncio.Future[Lent]:
        return self._call(self._learner.lend)

    def canary(self) -> asyncio.Future[Canary]:
        return self._call(self._learner.canary)

    def capture(self, folder: Path) -> asyncio.Future[Callable[[], None]]:
        return self._call(self._learner.capture, folder)

    def _call(self, method: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, method, *arguments)


@asynccontextmanager
async def in_thread(learner: Learner, lock: GpuLock | None = None) -> AsyncIterator[InThread]:
    """`learner` in a new thread, which ends with the context. `lock` is taken, if the run is colocated."""
    executor = ThreadPoolExecutor(1, "learner", learner.enter_thread)
    try:
        yield InThread(learner, executor, lock)
    finally:
        await asyncio.to_thread(executor.shutdown)  # without blocking the event loop
