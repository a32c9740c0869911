"""An event loop in another thread, which is given up where what it runs blocks it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, Self, TypeVar

from cusearch_async.agents.blocking import REMEDY, is_blocked, newest_line
from cusearch_async.errors import ConfigError, EpisodeFailed

T = TypeVar("T")

LOOK_S, END_S = 0.5, 5.0


class OtherLoop:
    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="trial", daemon=True)
        self.is_blocked = False

    async def _serve(self) -> None:
        self._loop.set_result(asyncio.get_running_loop())
        await self._end.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_blocked and self._thread.is_alive():
            self._loop.result().call_soon_threadsafe(self._end.set)
            self._thread.join(END_S)  # a program is ended, connections are closed
        gc.collect()  # clients that were left open complain of this loop where they are collected in another

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises: what it raises; TimeoutError when it takes too long; ConfigError when it blocks the loop."""
        loop = self._loop.result()
        running = asyncio.run_coroutine_threadsafe(self._patiently(work), loop)
        while not running.done():
            if is_blocked(loop, self._patience_s):
                self.is_blocked = True
                line = newest_line(self._thread.ident or 0)
                raise ConfigError(f"it blocks the event loop (its newest frame: {line}); {REMEDY}")
            wait([running], LOOK_S)
        return running.result()

    async def _patiently(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._patience_s):
                return await work
        except SystemExit as error:
            raise EpisodeFailed(f"SystemExit: {error}") from error
