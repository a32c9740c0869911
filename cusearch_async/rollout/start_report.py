"""Reports to the run that a worker is starting, until its own heartbeats begin."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cusearch_async.config import Config
from cusearch_async.errors import CusearchError
from cusearch_async.run.identity import Identity
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import WorkerStatus

log = logging.getLogger(__name__)

BEAT_S = 2.0


class Starting:
    """A thread with a separate connection: loading an engine blocks the event loop for minutes."""

    def __init__(self, config: Config, name: str, identity: Identity) -> None:
        self._config = config
        self._name = name
        self._identity = identity
        self._doing, self._since = "", time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._try_to_report, name="starting", daemon=True)
        self._is_ready = False

    def does(self, what: str) -> None:
        """The worker's present work, like `loading vLLM`."""
        self._doing, self._since = what, time.monotonic()

    def is_ready(self) -> None:
        """From now on the worker reports its status itself."""
        self._is_ready = True
        self._ended.set()

    @contextmanager
    def reporting(self) -> Iterator[Starting]:
        """A worker that does not become ready is removed from the run at the end."""
        self._thread.start()
        try:
            yield self
        finally:
            self.end()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(timeout=BEAT_S)

    def _try_to_report(self) -> None:
        try:
            asyncio.run(self._report())
        except Exception as error:
            log.warning("cannot report that this worker is starting: %s: %s", type(error).__name__, error)

    async def _report(self) -> None:
        async with open_buffer(self._config, identity=self._identity) as buffer:
            while not self._ended.is_set():
                status = WorkerStatus(starting=self._doing, alive_s=round(time.monotonic() - self._since, 1))
                try:
                    await buffer.heartbeat(self._name, [], status)
                except CusearchError as error:  # the worker itself ends with it, when it asks for tickets
                    log.debug("no heartbeat: %s", error)
                await asyncio.to_thread(self._ended.wait, BEAT_S)
            if self._is_ready:
                return
            try:
                await buffer.leave(self._name, [])
            except CusearchError as error:
                log.debug("the end of the worker could not be recorded: %s", error)
