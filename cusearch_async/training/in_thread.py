"""A learner that works in a separate thread, so that the event loop keeps running while it trains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cusearch_async.learner.interface import Learner, Lent
from cusearch_async.lifecycle.gpu_share import GpuLock, GpuShare
from cusearch_async.metrics.table import Metrics
from cusearch_async.types import Trajectory
from cusearch_async.weights.interface import Canary

T = TypeVar("T")


class InThread:
    """The same learner with calls to await; they run in order, awaited or not."""

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
