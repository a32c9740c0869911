"""The learner's heartbeat, sent by a thread, so that it continues while an update blocks the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cusearch_async.config import Config
from cusearch_async.errors import CusearchError, Fenced
from cusearch_async.training.ranks import Ranks
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import LearnerBuffer, LearnerStatus

log = logging.getLogger(__name__)

BEAT_S = 2.0
WARN_SILENT_EVERY_S = 30.0


class Heartbeat:
    """A thread with its own connection. It also checks the other ranks, for which rank 0 may wait in a collective: if a
    rank is silent for run.stall_s or learner.collective_timeout_s, the learner ends."""

    def __init__(self, config: Config, epoch: int, ranks: Ranks) -> None:
        self.step = 0
        """Learner step that is waited for or trained."""
        self._config = config
        self._epoch = epoch
        self._ranks = ranks
        self._ended = threading.Event()
        self._named_at = time.monotonic()

    @contextmanager
    def beating(self) -> Iterator[Heartbeat]:
        thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join(timeout=BEAT_S)

    def _run(self) -> None:
        """An error of the program ends the learner, with the error as its last line: without heartbeat and watch over
        the ranks it would go on as if it had both."""
        try:
            asyncio.run(self._beat())
        except Exception:
            log.critical("the heartbeat failed; the learner ends", exc_info=True)
            os._exit(1)

    async def _beat(self) -> None:
        """Errors of the connection are not raised here: the training loop ends the learner."""
        async with open_buffer(self._config) as buffer:
            buffer.follow_epoch(self._epoch)
            while not self._ended.is_set():
                self._watch_ranks()
                await self._send(buffer)
                await asyncio.to_thread(self._ended.wait, BEAT_S)
            try:
                await buffer.learner_leaves()
            except CusearchError as error:
                log.debug("the end of the learner could not be recorded: %s", error)

    async def _send(self, buffer: LearnerBuffer) -> None:
        status = LearnerStatus(epoch=self._epoch, host=socket.gethostname(), pid=os.getpid(), step=self.step)
        try:
            await buffer.learner_heartbeat(status)
        except Fenced:
            self._ended.set()
        except CusearchError as error:
            log.debug("no heartbeat: %s", error)

    def _watch_ranks(self) -> None:
        limits = {"run.stall_s": self._config.run.stall_s}
        limits["learner.collective_timeout_s"] = self._config.learner.collective_timeout_s
        key, limit_s = min(limits.items(), key=lambda limit: limit[1])
        named_s = min(WARN_SILENT_EVERY_S, limit_s / 2)
        silent = self._ranks.silent(named_s)
        if not silent:
            return
        names = ", ".join(f"rank {rank}" for rank in silent)
        if self._ranks.silent(limit_s):
            log.error(
                "%s has not reported for %.0f s (%s) in step %d; the learner ends", names, limit_s, key, self.step
            )
            os._exit(1)  # rank 0 itself may be waiting for it where nothing can wake it
        if time.monotonic() - self._named_at >= named_s:
            self._named_at = time.monotonic()
            log.warning("%s has not reported for %.0f s or more in step %d", names, named_s, self.step)
