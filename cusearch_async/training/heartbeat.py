"""The learner's heartbeat, and its watch over the other ranks, concurrently with the training loop."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from cusearch_async.errors import CusearchError, Fenced, RanksFailed, Stalled
from cusearch_async.lifecycle.children import ENDING_S, failed_ranks
from cusearch_async.training.background import Background
from cusearch_async.transport.interface import LearnerBuffer, LearnerStatus

if TYPE_CHECKING:
    from cusearch_async.learner.ranks import Ranks

log = logging.getLogger(__name__)

BEAT_S = 2.0
WARN_SILENT_EVERY_S = 30.0


class Heartbeat(Background):
    """Inside the context, reports to the buffer every `BEAT_S` that this learner is alive, and at the end that it has
    ended. The learner works in a thread, so an update does not delay it.

    It also checks the other ranks, for which rank 0 may wait in a collective: if a rank is silent for run.stall_s or
    learner.collective_timeout_s, or has failed on this machine, the process ends. `stop` is set when another rank asks
    for that. `check` raises an error of the program in here."""

    def __init__(
        self,
        buffer: LearnerBuffer,
        ranks: Ranks,
        stall_s: float,
        collective_timeout_s: float,
        stop: asyncio.Event,
        step: int = 0,
        before_end: Callable[[Exception], Awaitable[None]] | None = None,
    ) -> None:
        """`before_end` is called before the process ends because of another rank."""
        super().__init__()
        self._before_end = before_end
        self.step = step
        """Learner step that is waited for or trained."""
        self._buffer = buffer
        self._ranks = ranks
        limits = ("run.stall_s", stall_s), ("learner.collective_timeout_s", collective_timeout_s)
        self._limit = min(limits, key=lambda limit: limit[1])
        self._named_at = time.monotonic()
        self._failed_at = math.inf
        self._stop = stop

    async def __aenter__(self) -> Heartbeat:
        self.start(self._beat())
        return self

    async def __aexit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        await super().__aexit__(*error)
        try:
            async with asyncio.timeout(BEAT_S):
                await self._buffer.learner_leaves()
        except (CusearchError, TimeoutError) as unrecorded:
            log.debug("the end of the learner could not be recorded: %s", unrecorded)

    async def _beat(self) -> None:
        """Errors of the connection are not raised here: the training loop ends the learner."""
        epoch = self._buffer.epoch
        while True:
            await self._watch_ranks()
            status = LearnerStatus(epoch=epoch, host=socket.gethostname(), pid=os.getpid(), step=self.step)
            try:
                await self._buffer.learner_heartbeat(status)
            except Fenced:
                return
            except CusearchError as error:
                log.debug("no heartbeat: %s", error)
            await asyncio.sleep(BEAT_S)

    async def _watch_ranks(self) -> None:
        if not self._stop.is_set() and self._ranks.is_asked_to_stop():
            log.info("stopping: another rank was asked to")
            self._stop.set()
        if failed_ranks:
            self._failed_at = min(self._failed_at, time.monotonic())
            if time.monotonic() - self._failed_at >= ENDING_S / 2:  # rank 0 has not ended by itself
                await self._end(RanksFailed(f"{failed_ranks[0]}; the learner ends"))
        key, limit_s = self._limit
        named_s = min(WARN_SILENT_EVERY_S, limit_s / 2)
        silent = self._ranks.silent(named_s)
        if not silent:
            return
        names = ", ".join(f"rank {rank}" for rank in silent)
        if self._ranks.silent(limit_s):
            why = f"{names} has not reported for {limit_s:.0f} s ({key}) in step {self.step}; the learner ends"
            await self._end(Stalled(why))
        if time.monotonic() - self._named_at >= named_s:
            self._named_at = time.monotonic()
            log.warning("%s has not reported for %.0f s or more in step %d", names, named_s, self.step)

    async def _end(self, why: CusearchError) -> NoReturn:
        """Rank 0 itself may be waiting for the rank where nothing can wake it."""
        log.error("%s", why)
        if self._before_end is not None:
            await self._before_end(why)
        os._exit(1)
