"""How many searches a retriever is asked at once, and how soon again: fewer while it says that they are too many."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait; None where it names none, or a date."""
    wanted = headers.get("Retry-After", "").strip()
    return float(wanted) if re.fullmatch(r"\d+(\.\d+)?", wanted) else None


class Pace:
    """At most `most` requests at once. Each "too many" halves their number, and lets all wait as long as the server
    says, or twice as long as the last time; each answer adds a little (Chiu and Jain 1989)."""

    def __init__(self, most: int) -> None:
        self._most, self._room = most, float(most)
        self._slots = asyncio.Semaphore(most)
        self._in_flight = 0
        self._freed = asyncio.Event()
        self._pause_s = 0.0
        self._not_before = 0.0

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Around a request. Waits until it may be made."""
        async with self._slots:
            while self._in_flight >= int(self._room):
                self._freed.clear()
                await self._freed.wait()
            self._in_flight += 1
            try:
                while (wait_s := self._not_before - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                yield
            finally:
                self._in_flight -= 1
                self._freed.set()

    def slow_down(self, headers: Mapping[str, str]) -> None:
        """The server has refused a request as too many, with these `headers`."""
        now, wanted_s = time.monotonic(), retry_after_s(headers)
        if now >= self._not_before:  # else it was asked before the pause began
            self._room = max(1.0, self._room / 2)
            self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
        pause_s = self._pause_s if wanted_s is None else min(wanted_s, _LONGEST_PAUSE_S)
        self._not_before = max(self._not_before, now + pause_s)

    def speed_up(self) -> None:
        """The server has answered a request."""
        self._pause_s /= 2
        self._room = min(float(self._most), self._room + 1 / self._room)
        self._freed.set()
