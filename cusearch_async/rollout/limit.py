"""The longest time of an episode (episode.timeout_s)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self


class Limit:
    """Ends its block with a TimeoutError that says so after so many seconds, beside those in which the engine samples:
    that one is watched elsewhere, and slow where many share it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left = seconds
        self._clock = asyncio.Timeout(None)
        self._runs = False
        self._turns = 0

    async def __aenter__(self) -> Self:
        await self._clock.__aenter__()
        return self

    async def __aexit__(self, *ended: Any) -> None:
        self._runs = False
        try:
            await self._clock.__aexit__(*ended)
        except TimeoutError as error:
            raise TimeoutError(f"it took longer than episode.timeout_s ({self._seconds:g} s)") from error

    @property
    def has_expired(self) -> bool:
        return self._clock.expired()

    def begin(self) -> None:
        """From now on time counts."""
        self._runs = True
        self._continue()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Around a turn of the policy; several may be under way."""
        if self._may_change and not self._turns and (end := self._clock.when()) is not None:
            self._left = end - asyncio.get_running_loop().time()
            self._clock.reschedule(None)
        self._turns += 1
        try:
            yield
        finally:
            self._turns -= 1
            self._continue()

    @property
    def _may_change(self) -> bool:
        return self._runs and not self._clock.expired()

    def _continue(self) -> None:
        if self._may_change and not self._turns:
            self._clock.reschedule(asyncio.get_running_loop().time() + self._left)
