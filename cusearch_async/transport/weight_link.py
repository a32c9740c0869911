"""A worker's connection to the learner, for weights that come without files (weights.url).

The worker asks and the learner answers, as JSON over a WebSocket: Join for a process group of the learner and the
engine's ranks, Open for a version, Send for its tensors, which then come over the group. What the worker has opened
stays whole, also when the version is deleted.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from cusearch_async.config import Config
from cusearch_async.errors import WeightsUnavailable
from cusearch_async.transport.gloo import MEET_S
from cusearch_async.transport.weights import Manifest, WeightStore

PATH = "/weights"
LONGEST_MESSAGE = 64 << 20
"""A manifest of half a million tensors is shorter."""
SILENCE_S = 30
"""The other machine is gone when it has confirmed nothing for so long."""
OPEN_S = 600.0
"""The learner reads all of a version to verify it."""

Backend = Literal["gloo", "nccl"]


class Join(msgspec.Struct, tag=True):
    backend: Backend
    ranks: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    """The engine's, which are 1, 2, … in the group; the learner is 0."""


class Joined(msgspec.Struct, tag=True):
    port: int
    """Where the learner waits for the engine's ranks, at the address that the worker has for it."""


class Open(msgspec.Struct, tag=True):
    name: str


class Opened(msgspec.Struct, tag=True):
    manifest: Manifest


class Send(msgspec.Struct, tag=True):
    """The tensors of the open version, in the order of its manifest."""


class Sent(msgspec.Struct, tag=True):
    pass


class Refused(msgspec.Struct, tag=True):
    why: str


Request = Join | Open | Send
Answer = Joined | Opened | Sent | Refused
A = TypeVar("A", Joined, Opened, Sent)


@dataclass(frozen=True, slots=True)
class SentVersion:
    """A version that the learner holds open for this worker."""

    name: str
    manifest: Manifest
    link: WeightLink


def notice_silence(connection: socket.socket) -> None:
    """Errors of a connection whose other machine is gone come after SILENCE_S; TCP itself waits for hours."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)


class WeightLink:
    """Connects when it is first asked, and again after `close`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.host = urlsplit(url).hostname or ""
        self.is_joined = False
        """Whether the learner has a group with the engine."""
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def open(self, name: str) -> SentVersion:
        """Raises: WeightsUnavailable when the learner cannot be reached, or does not have the version."""
        if self._socket is None or self._socket.closed:
            await self.close()
            await self._connect()
        opened = await self._ask(Open(name), Opened, OPEN_S)
        return SentVersion(name, opened.manifest, self)

    async def join(self, backend: Backend, ranks: int) -> int:
        """The port of the learner where the engine's ranks are expected now. Raises: WeightsUnavailable."""
        return (await self._ask(Join(backend, ranks), Joined, MEET_S)).port

    async def send(self) -> None:
        """Have the learner send what is open; returns when it has. Raises: WeightsUnavailable."""
        await self._ask(Send(), Sent, None)

    async def close(self) -> None:
        self.is_joined = False
        if self._session is not None:
            await self._session.close()
        self._session = self._socket = None

    async def _connect(self) -> None:
        self._session = aiohttp.ClientSession()
        try:
            self._socket = await self._session.ws_connect(self.url.rstrip("/") + PATH, max_msg_size=LONGEST_MESSAGE)
            notice_silence(self._socket.get_extra_info("socket"))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            await self.close()
            raise WeightsUnavailable(f"the learner does not answer at weights.url {self.url} ({error})") from error

    async def _ask(self, request: Request, kind: type[A], within_s: float | None) -> A:
        if self._socket is None:
            raise WeightsUnavailable(f"the connection to the learner at {self.url} is closed")
        try:
            async with asyncio.timeout(within_s):
                await self._socket.send_bytes(msgspec.json.encode(request))
                answer = msgspec.json.decode(await self._socket.receive_bytes(), type=Answer)
        except (aiohttp.ClientError, OSError, TypeError, TimeoutError, msgspec.MsgspecError) as error:
            await self.close()
            raise WeightsUnavailable(
                f"the learner at {self.url} has broken off the connection ({type(error).__name__}: {error})"
            ) from error
        if isinstance(answer, Refused):
            raise WeightsUnavailable(f"the learner at {self.url} says: {answer.why}")
        if not isinstance(answer, kind):
            await self.close()
            raise WeightsUnavailable(f"the learner at {self.url} has answered {answer} to {request}")
        return answer


WeightSource = WeightStore | WeightLink
"""Where a worker gets published weights from."""


@asynccontextmanager
async def open_weights(config: Config) -> AsyncIterator[WeightSource]:
    """A worker's weights: in the folder that it shares with the learner, or from the learner at weights.url."""
    if config.weights.url is None:
        yield WeightStore(config.weights_folder)
        return
    link = WeightLink(config.weights.url)
    try:
        yield link
    finally:
        await link.close()
