"""A TCP proxy before Redis whose network fails on demand.

What is held back arrives later, as TCP sends it again; what is lost ends its connection. A command that is delivered a
second time, or long after its sender has given up waiting, goes to the server on a connection of its own."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass
class Late:
    """One command to be delivered `after` later commands, at most `most_s` seconds on."""

    sha: bytes
    """SHA-1 of the script that it calls."""
    after: int
    most_s: float
    is_copy: bool
    """Delivered in time as well; else its sender hears nothing and sends it again."""
    caught: asyncio.Event


class Link:
    """All connections of one kind of process to Redis."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._up, self._down = asyncio.Event(), asyncio.Event()
        self._up.set()
        self._down.set()
        self._loses_answers = False
        self._is_half_open = False
        self._delay_s = 0.0
        self._random = random.Random(0)
        self._late: Late | None = None
        self._commands = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.scripts: dict[bytes, str] = {}
        """SHA-1 -> name of the scripts to look out for."""
        self.seen: dict[str, float] = {}
        """Script -> when it was last called."""
        self.port = 0

    async def start(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    # --- faults ---------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Every connection ends now."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def lose_answers(self, seconds: float) -> None:
        """Commands are carried out, their answers never come."""
        self._loses_answers = True
        try:
            await asyncio.sleep(seconds)
        finally:
            self._loses_answers = False
            self.cut()

    async def half_open(self, seconds: float) -> None:
        """The server's side is gone, the client is not told."""
        self._is_half_open = True
        try:
            await asyncio.sleep(seconds)
        finally:
            self._is_half_open = False
            self.cut()

    async def delay(self, seconds: float, most_s: float) -> None:
        """Every piece of data takes up to `most_s`, either way."""
        self._delay_s = most_s
        try:
            await asyncio.sleep(seconds)
        finally:
            self._delay_s = 0.0

    async def partition(self, seconds: float, *, up: bool, down: bool) -> None:
        """Commands, answers or both wait until the partition heals."""
        held = [gate for gate, is_held in ((self._up, up), (self._down, down)) if is_held]
        for gate in held:
            gate.clear()
        try:
            await asyncio.sleep(seconds)
        finally:
            for gate in held:
                gate.set()

    async def deliver_late(self, script: str, after: int, most_s: float, *, is_copy: bool, patience_s: float) -> bool:
        """Whether a call of `script` came by within `patience_s`; it is delivered late in the background."""
        sha = next(sha for sha, name in self.scripts.items() if name == script)
        self._late = late = Late(sha, after, most_s, is_copy, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(late.caught.wait(), patience_s)
        self._late = None
        return late.caught.is_set()

    # --- data -----------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            pumps = [self._commands_up(reader, server_writer), self._answers_down(server_reader, writer)]
            await _until_one_ends(pumps)
        finally:
            self._writers.discard(writer)
            for one in (writer, server_writer):
                one.close()

    async def _commands_up(self, reader: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        unfinished = b""
        while data := await reader.read(2**16):
            await self._take_time(self._up)
            if self._is_half_open:
                continue
            whole = end_of_commands(unfinished + data)
            message, unfinished = (unfinished + data)[:whole], (unfinished + data)[whole:]
            self._commands += bool(message)
            self._look(message)
            if message and not self._is_held(message):
                server.write(message)
                await server.drain()
        if unfinished:
            server.write(unfinished)

    def _look(self, message: bytes) -> None:
        for sha, name in self.scripts.items():
            if sha in message:
                self.seen[name] = time.monotonic()

    async def _answers_down(self, server: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await server.read(2**16):
            await self._take_time(self._down)
            if not (self._loses_answers or self._is_half_open):
                writer.write(data)
                await writer.drain()

    async def _take_time(self, gate: asyncio.Event) -> None:
        await gate.wait()
        if self._delay_s:
            await asyncio.sleep(self._random.uniform(0, self._delay_s))

    def _is_held(self, message: bytes) -> bool:
        """Whether the message is the one to be late, and does not go now."""
        late = self._late
        if late is None or late.caught.is_set() or late.sha not in message:
            return False
        late.caught.set()
        task = asyncio.create_task(self._deliver(message, self._commands + late.after, late.most_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return not late.is_copy

    async def _deliver(self, message: bytes, at: int, most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while self._commands < at:
                    await asyncio.sleep(0.01)
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._target)
            writer.write(message)
            await asyncio.wait_for(reader.read(2**16), 5)
            writer.close()


async def _until_one_ends(pumps: Iterable[Coroutine[Any, Any, None]]) -> None:
    tasks = [asyncio.create_task(pump) for pump in pumps]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def end_of_commands(data: bytes) -> int:
    """Length of the whole commands at the start of `data`, each an array of bulk strings as clients send them."""
    whole = place = 0
    while True:
        end = data.find(b"\r\n", place)
        if end < 0 or data[place : place + 1] != b"*":
            return whole
        parts, place = int(data[place + 1 : end]), end + 2
        for _ in range(parts):
            end = data.find(b"\r\n", place)
            if end < 0:
                return whole
            place = end + 2 + int(data[place + 1 : end]) + 2
        if place > len(data):
            return whole
        whole = place
