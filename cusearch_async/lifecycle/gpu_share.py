"""Colocation: learner and engines use the same GPUs in turn.

A file in the run's folder is locked by whoever has the GPUs: the learner alone, or any number of engines together. The
kernel releases the lock when its process ends for any reason, so a killed process keeps nobody waiting.

Every turn ends: engines idle once the staleness bound is reached or the buffer is full, and the learner gives the GPUs
back after every step.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from cusearch_async.config import Config
from cusearch_async.errors import ConfigError, Stalled
from cusearch_async.files import try_lock
from cusearch_async.lifecycle.progress import log_waiting
from cusearch_async.run import folder as run_folder

log = logging.getLogger(__name__)

POLL_S = 0.02


class GpuLock:
    """This process's claim to the GPUs of the run in `folder`."""

    def __init__(self, folder: Path, role: Literal["learner", "engine"], patience_s: float) -> None:
        self._path = folder / run_folder.GPUS
        self._file = self._path.open("a+")  # a shared lock on NFS needs a file that can be read
        self._kind = fcntl.LOCK_EX if role == "learner" else fcntl.LOCK_SH
        self._others = "the engines" if role == "learner" else "the learner"
        self._patience_s = patience_s

    async def take(self) -> None:
        """Wait for the others to give the GPUs back. Raises: Stalled when they do not; ConfigError without locks."""
        if self._try_to_take():
            return
        with log_waiting(log, f"waiting for {self._others} to give back the GPUs"):
            try:
                async with asyncio.timeout(self._patience_s):
                    while not self._try_to_take():
                        await asyncio.sleep(POLL_S)
            except TimeoutError:
                raise Stalled(
                    f"{self._others} did not give back the GPUs for {self._patience_s:g} s (run.stall_s); whoever has "
                    f"{self._path} open has them (lsof, fuser)"
                ) from None

    def _try_to_take(self) -> bool:
        try:
            return try_lock(self._file, self._kind)
        except OSError as error:
            raise ConfigError(
                f"run.colocate: {self._path} cannot be locked ({error.strerror}); choose a run.folder on a file system "
                "with locks"
            ) from error

    def release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def gpu_lock(config: Config, role: Literal["learner", "engine"]) -> GpuLock | None:
    """The lock of a colocated run; None where each process has GPUs, or a share of them, for itself.

    Raises: ConfigError when the run's folder is another's, or cannot be written."""
    if not config.run.colocate:
        return None
    run_folder.mark(config.folder, config.run.name)
    return GpuLock(config.folder, role, config.run.stall_s)


class GpuShare:
    """Has the GPUs, and is awake on them, while anybody is inside `active`. Without a lock it always is."""

    def __init__(
        self, lock: GpuLock | None, wake_up: Callable[[], Awaitable[None]], sleep: Callable[[], Awaitable[None]]
    ) -> None:
        """With a lock, which is taken, it must be made in an event loop. It sleeps unless somebody needs it."""
        self._lock = lock
        self._wake_up = wake_up
        self._sleep = sleep
        self._users = 0
        self._is_awake = True
        self._change: asyncio.Task[None] | None = None
        if lock is not None:
            self._changing(lock)

    @asynccontextmanager
    async def active(self) -> AsyncIterator[None]:
        """Waits for the GPUs. Raises: Stalled; what waking up or falling asleep has failed with."""
        if self._lock is None:
            yield
            return
        self._users += 1
        try:
            while not self._is_awake or self._is_changing:
                await asyncio.shield(self._changing(self._lock))
            yield
        finally:
            self._users -= 1
            self._changing(self._lock)

    @property
    def _is_changing(self) -> bool:
        return self._change is not None and not self._change.done()

    def _changing(self, lock: GpuLock) -> asyncio.Task[None]:
        """The task that wakes up and falls asleep as needed: a new one, unless one runs or has failed."""
        change = self._change
        if change is None or (change.done() and not change.cancelled() and not change.exception()):
            change = self._change = asyncio.create_task(self._follow_users(lock))
            # asyncio logs no error that nobody awaits, because the process ends for another reason
            change.add_done_callback(lambda change: change.cancelled() or change.exception())
        return change

    async def _follow_users(self, lock: GpuLock) -> None:
        while self._is_awake != bool(self._users):
            if self._users:
                await lock.take()
                await self._wake_up()
                self._is_awake = True
            else:
                self._is_awake = False
                await self._sleep()
                lock.release()
                await asyncio.sleep(2 * POLL_S)  # the learner may have its next pool: whoever waits has its turn first
