"""Sends published weights to engines that share no folder with the learner (weights.url).

Each worker has a connection and a process group of its own with the learner: gloo, or NCCL as vLLM's weight transfer
has it. What is sent is read from the published files, so the training loop has no part in it, and a worker that is slow
or dies holds up no other. Over NCCL one tensor at a time is copied to the learner's GPU.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import msgspec
import torch
from aiohttp import web
from safetensors import safe_open

from cusearch_async.errors import ConfigError, WeightsUnavailable, first_line
from cusearch_async.lifecycle.progress import log_waiting
from cusearch_async.transport.gloo import GlooGroup
from cusearch_async.transport.weight_link import (
    PATH,
    Answer,
    Join,
    Joined,
    Open,
    Opened,
    Refused,
    Request,
    Send,
    Sent,
    notice_silence,
)
from cusearch_async.transport.weights import StoredVersion, WeightStore

log = logging.getLogger(__name__)

NCCL = "cusearch_async.training.nccl"
"""Imported for an engine on a GPU only: it brings vLLM."""
POLL_S = 0.05
RETRY_S = 0.5
CLOSE_S = 1.0
"""How long a worker has to say that it has seen the end."""
OWED_S = 30.0
"""How long the learner stays at its end for workers that have opened a version and do not have it yet."""


class Group(Protocol):
    def broadcast(self, tensor: torch.Tensor) -> None: ...

    def destroy(self) -> None: ...


class Connection:
    """What one worker asks for."""

    def __init__(self, open_version: Callable[[str], Awaitable[StoredVersion]], address: str) -> None:
        """`address` is the one of this machine that the worker has reached."""
        self._open_version = open_version
        self._address = address
        self._thread = ThreadPoolExecutor(1, "sending")
        self._group: asyncio.Future[Group] | None = None
        self._file: Any = None
        self._names: list[str] = []

    async def answer(self, request: Request) -> Answer:
        """Raises: RuntimeError when the group does not meet, or a tensor cannot be sent."""
        match request:
            case Join(backend=backend, ranks=ranks):
                return await self._join(backend, ranks)
            case Open(name=name):
                return await self._open(name)
            case Send():
                await self._send()
                return Sent()

    @property
    def is_owed(self) -> bool:
        """Whether the worker has opened a version and does not have it yet."""
        return self._file is not None

    async def _join(self, backend: str, ranks: int) -> Answer:
        """Answers before the engine's ranks can have come."""
        if backend == "nccl" and not torch.cuda.is_available():
            return Refused("it has no GPU, and NCCL sends from GPU to GPU; set weights.folder in place of weights.url")
        try:
            group = await _group_of(backend)
        except ImportError as error:
            return Refused(f"it sends over NCCL with vLLM, which cannot be imported there: {error}")
        if self._group is not None:
            raise RuntimeError("Join came twice")
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listener = socket.create_server((self._address, 0), family=family)
        port = listener.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._group = loop.run_in_executor(self._thread, group, self._address, port, 0, 1 + ranks, listener)
        return Joined(port)

    async def _open(self, name: str) -> Answer:
        try:
            version = await self._open_version(name)
            self._file = safe_open(version.directory / version.manifest.file, framework="pt")
        except (WeightsUnavailable, OSError) as error:
            return Refused(first_line(error))
        self._names = list(version.manifest.tensors)
        return Opened(version.manifest)

    async def _send(self) -> None:
        if self._group is None or self._file is None:
            raise RuntimeError("Send came before Join and Open")
        group = await asyncio.shield(self._group)  # a worker that goes now must not cancel it: it is destroyed then
        await asyncio.get_running_loop().run_in_executor(self._thread, self._broadcast, group)
        self._file = None

    def _broadcast(self, group: Group) -> None:
        for name in self._names:
            group.broadcast(self._file.get_tensor(name))

    def close(self) -> None:
        """Ends what is under way, and a group that is about to meet as soon as it has; waits for nothing."""
        self._file = None
        if self._group is not None:
            self._group.add_done_callback(_destroy)
        self._thread.shutdown(wait=False)


async def _group_of(backend: str) -> Any:
    """The class of a process group. That of NCCL imports vLLM, which takes seconds: in a thread, the loop goes on."""
    if backend == "gloo":
        return GlooGroup
    return (await asyncio.to_thread(importlib.import_module, NCCL)).NcclGroup


def _destroy(made: asyncio.Future[Group]) -> None:
    if not made.cancelled() and made.exception() is None:
        threading.Thread(target=made.result().destroy, name="destroying", daemon=True).start()  # NCCL takes seconds


class Sender:
    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._newest: tuple[str, asyncio.Future[StoredVersion]] | None = None
        self._connected: dict[web.WebSocketResponse, Connection] = {}
        self._is_ending = False

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get(PATH, self.connect)
        return application

    async def end(self) -> None:
        """Workers get what they have opened, and are disconnected: aiohttp would wait until they go."""
        self._is_ending = True
        deadline = time.monotonic() + OWED_S
        while time.monotonic() < deadline and any(connection.is_owed for connection in self._connected.values()):
            await asyncio.sleep(POLL_S)
        await asyncio.gather(*(connected.close() for connected in self._connected))

    async def open(self, name: str) -> StoredVersion:
        """A version, verified once for all workers. Raises: WeightsUnavailable."""
        if self._is_ending:
            raise WeightsUnavailable("it is about to end")
        if self._newest is None or self._newest[0] != name or _has_failed(self._newest[1]):
            self._newest = name, asyncio.ensure_future(self._store.open(name))
        return await asyncio.shield(self._newest[1])

    async def connect(self, http: web.Request) -> web.WebSocketResponse:
        """One connection, to its end."""
        connected = web.WebSocketResponse(timeout=CLOSE_S)
        await connected.prepare(http)
        if http.transport is None:  # gone already
            return connected
        connection = Connection(self.open, http.transport.get_extra_info("sockname")[0])
        self._connected[connected] = connection
        notice_silence(http.transport.get_extra_info("socket"))
        try:
            async for message in connected:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                answer = await connection.answer(msgspec.json.decode(message.data, type=Request))
                await connected.send_bytes(msgspec.json.encode(answer))
        except Exception as error:  # whatever it is, the learner and its other workers go on
            log.warning("sending weights to %s ended: %s", http.remote, first_line(error))
        finally:
            connection.close()
            del self._connected[connected]
        return connected


def _has_failed(opened: asyncio.Future[StoredVersion]) -> bool:
    return opened.done() and (opened.cancelled() or opened.exception() is not None)


@asynccontextmanager
async def sending(store: WeightStore, url: str | None, patience_s: float) -> AsyncIterator[None]:
    """Weights are sent at `url` inside the context; with None there is nothing to do.

    Raises: ConfigError when nothing can listen there for `patience_s`; an earlier learner may be about to end."""
    if url is None:
        yield
        return
    parts = urlsplit(url)
    sender = Sender(store)
    runner = web.AppRunner(sender.application(), access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_S)
    await runner.setup()
    try:
        await _listen(runner, parts.hostname or "", parts.port or 80, patience_s)
        log.info("sending weights at %s", url)
        yield
    finally:
        await sender.end()
        await runner.cleanup()


async def _listen(runner: web.AppRunner, host: str, port: int, patience_s: float) -> None:
    deadline = asyncio.get_running_loop().time() + patience_s
    with log_waiting(log, f"waiting for port {port} of {host} to be free"):
        while True:
            try:
                await web.TCPSite(runner, host, port).start()
                return
            except OSError as error:
                if asyncio.get_running_loop().time() > deadline or error.errno != errno.EADDRINUSE:
                    raise ConfigError(
                        f"weights.url: the learner cannot listen at {host}, port {port} ({error.strerror}); use an "
                        "address of its machine and a free port"
                    ) from error
            await asyncio.sleep(RETRY_S)
