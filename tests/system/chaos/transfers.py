"""Faults of weights on their way to another machine: a link that stands before the learner's server or the object
store, and what goes wrong in the middle of a transfer, or with the copy that a machine has."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from tests.conftest import SLOW
from tests.system.chaos.proxy import Link
from tests.system.chaos.spoiling import spoil

if TYPE_CHECKING:
    from tests.system.chaos.scene import Scene

LEAST_BYTES = (1, 2000)
"""Of the answer that is hit: any, or one with tensors."""
TRANSFERS = ("cut", "flipped", "ends early", "silent", "worker killed", "learner killed")


class WebLink(Link):
    """All connections to one web server."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self._least = 0
        self._change: Callable[[bytes], bytes] = bytes
        self._caught, self._released = asyncio.Event(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def catching(self, least: int, change: Callable[[bytes], bytes], patience_s: float) -> AsyncIterator[bool]:
        """Whether a piece of an answer of at least so many bytes came within `patience_s`. It is changed, and waits as
        long as the context is open."""
        self._least, self._change = least, change
        self._caught, self._released = asyncio.Event(), asyncio.Event()
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._caught.wait(), patience_s)
            yield self._caught.is_set()
        finally:
            self._least = 0
            self._released.set()

    async def _commands_up(self, reader: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            await self._take_time(self._up)
            if not self._is_half_open:
                server.write(data)
                await server.drain()

    async def _answers_down(self, server: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await server.read(2**16):
            await self._take_time(self._down)
            if self._loses_answers or self._is_half_open:
                continue
            is_it = 0 < self._least <= len(data)
            if is_it:
                self._least = 0
                data = self._change(data)
                self._caught.set()
                await self._released.wait()
            writer.write(data)
            await writer.drain()
            if is_it and not data:
                return


def transfer(how: str) -> Callable[[Scene, random.Random], Awaitable[str | None]]:
    async def act(scene: Scene, draw: random.Random) -> str | None:
        def change(data: bytes) -> bytes:
            if how == "ends early":
                return b""
            if how == "flipped":
                place = draw.randrange(len(data))
                return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
            return data

        link = scene.links["weights"]
        assert isinstance(link, WebLink)
        async with link.catching(draw.choice(LEAST_BYTES), change, 10 * SLOW) as is_caught:
            if not is_caught:
                return None
            if how == "cut":
                link.cut()
            elif how == "silent":
                await asyncio.sleep(draw.choice((0.3, 1.0, 4.0)))
            elif how == "worker killed":
                scene.kill(draw.choice(scene.workers))
            elif how == "learner killed":
                scene.kill("learner")
        return how

    return act


async def spoiled_copy(scene: Scene, draw: random.Random) -> str | None:
    """A file of what a machine has is spoiled, and its worker has to start with it."""
    worker = draw.choice(scene.workers)
    scene.take_down(worker)
    try:
        files = sorted((scene.host(worker) / "downloaded").glob("v*/*"))
        return spoil(draw.choice(files), draw) if files else None
    finally:
        scene.launch(worker)
