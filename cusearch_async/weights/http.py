"""weights.transport = "http": the learner serves the files of published versions; each other machine downloads them
(downloads.py).

Requests need the bearer token of the run (`config.weights_token`).

    GET /weights                 names of the versions, oldest first
    GET /weights/NAME/FILE       a file of one, or a range of it
    GET /weights/NAME/FILE/from/BASE   what it changed of the version BASE, where that is much less
    GET /weights/last?client=C   answered at the learner's end, with the name of the last version

Not covered: encryption. Outside a private network put a proxy with TLS, or a tunnel, before the learner.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.typedefs import Handler

from cusearch_async.config import Config, make_weights_token
from cusearch_async.errors import ConfigError, WeightsUnavailable, WriteFailed, first_line
from cusearch_async.files import put_in_place, remove, writing
from cusearch_async.http_server import has_token
from cusearch_async.lifecycle.progress import log_waiting
from cusearch_async.lifecycle.signals import ending_at_once, unless_stopped
from cusearch_async.machine import usable_cores
from cusearch_async.weights.difference import write_difference
from cusearch_async.weights.downloads import PATH, PIECE_BYTES, SILENCE_S, Downloads, downloading
from cusearch_async.weights.folder import WeightStore
from cusearch_async.weights.interface import ADAPTER_TENSORS, MANIFEST, TENSORS

log = logging.getLogger(__name__)

FILES = (MANIFEST, TENSORS, ADAPTER_TENSORS)
"""The files of a version that can be downloaded."""
WORTH_IT = 0.7
"""A difference is sent if it has less than this share of the file's bytes."""
POLL_S = 0.1
RETRY_S = 1.0
MOST_ASKED = 30
"""Times that a client is told the last version at the learner's end: one that cannot get it is then given up."""


class HttpTransport:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._url = config.weights.url or ""
        self._store = WeightStore(config.weights_folder, keeps=config.eval.keeps)

    def store(self) -> WeightStore:
        return self._store

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Waits up to run.wait_s for the port, which an earlier learner may be about to leave. At the end it waits for
        running downloads, and for clients that need the last version.

        Raises: ConfigError when nothing can listen at weights.url."""
        server = Server(self._store, make_weights_token(self._config.folder))
        async with listening(server, self._url, self._config.run.wait_s):
            yield
            await server.end()

    @asynccontextmanager
    async def source(self, needs_last: bool = False) -> AsyncIterator[Downloads]:
        """Versions are kept in the folder `downloaded` of weights.folder or run.folder, for all processes with it."""
        folder = self._config.weights_folder.with_name("downloaded")
        async with downloading(self._url, self._config.folder, folder) as downloads:
            with self._following(downloads) if needs_last else nullcontext():
                yield downloads

    @contextmanager
    def _following(self, opened: Downloads) -> Iterator[None]:
        """In a thread: while an engine is loaded, the event loop of its process stands still. What it downloads can be
        `opened` when nobody, or another run, listens there."""
        loop, ended = asyncio.new_event_loop(), asyncio.Event()

        async def follow() -> None:
            async with downloading(self._url, self._config.folder, opened.folder, opened.known) as downloads:
                await unless_stopped(asyncio.ensure_future(downloads.follow_to_the_end()), ended)

        thread = threading.Thread(target=loop.run_until_complete, args=(follow(),), name="last weights", daemon=True)
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join()
            loop.close()


@asynccontextmanager
async def listening(server: Server, url: str, patience_s: float) -> AsyncIterator[None]:
    """Waits up to `patience_s` for the port. Raises: ConfigError when nothing can listen at `url`."""
    runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    try:
        await _listen(runner, url, patience_s)
        log.info("serving weights at %s", url)
        yield
    finally:
        await runner.cleanup()


class Server:
    """The side that has the versions."""

    def __init__(self, store: WeightStore, token: str) -> None:
        self._store = store
        self._token = token
        self._ending = asyncio.Event()
        self.sending = 0
        self._differences: dict[Path, asyncio.Future[None]] = {}
        """Files of differences that are made, or have been."""
        self._put_off: dict[tuple[str, ...], float] = {}
        """Those that were asked for too early, as (base, name, file) -> when."""
        self.asking = 0
        """Open questions for the last version."""
        self._needing: dict[str, float] = {}
        """Clients that were given its name, and have not said that they have it -> when that was."""
        self._told = Counter[str]()
        """How often they were given it."""
        self._sent_at = 0.0
        """When an answer to a download ended: a lost connection is taken up again after it."""

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._authorized])
        application.router.add_get(PATH, self._names)
        application.router.add_get(f"{PATH}/last", self._last)
        application.router.add_get(f"{PATH}/{{name}}/{{file}}", self._file)
        application.router.add_get(f"{PATH}/{{name}}/{{file}}/from/{{base}}", self._difference)
        application.on_response_prepare.append(_notice_silence)
        return application

    async def end(self) -> None:
        """Wait until no download runs, and every client that needs the last version has it, or is silent."""
        self._ending.set()
        with log_waiting(log, "waiting for others to download the last weights"):
            while self.sending or self.asking or self._is_missed(time.monotonic()):
                await asyncio.sleep(POLL_S)

    def _is_missed(self, now: float) -> bool:
        """Whether a client is expected back."""
        expected = (*self._needing.values(), *self._put_off.values())
        return any(now - max(heard, self._sent_at) < SILENCE_S for heard in expected)

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not has_token(request, self._token):
            return web.json_response({"error": "the bearer token is not that of this run"}, status=401)
        return await handler(request)

    async def _names(self, request: web.Request) -> web.Response:
        return web.json_response(self._store.names())

    async def _last(self, request: web.Request) -> web.StreamResponse:
        """A client that has the last version already gives its name as `have`. Blanks, which JSON ignores, show both
        sides that the other is there."""
        client, response = request.query.get("client", ""), web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        self.asking += 1
        try:
            while not self._ending.is_set():
                await response.write(b" ")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), SILENCE_S / 3)
            last = self._store.names()[-1:]
            await response.write(json.dumps(last).encode())
        except (asyncio.CancelledError, OSError):  # the client is gone
            self._needing.pop(client, None)
            raise
        finally:
            self.asking -= 1
        self._needing[client] = time.monotonic()
        self._told[client] += 1
        if last == [request.query.get("have")] or self._told[client] >= MOST_ASKED:
            self._needing.pop(client)
        return response

    async def _file(self, request: web.Request) -> web.StreamResponse:
        try:
            return _Counted(self._path(request.match_info["name"], request.match_info["file"]), self)
        except WeightsUnavailable as error:
            return web.json_response({"error": str(error)}, status=404)

    async def _difference(self, request: web.Request) -> web.StreamResponse:
        asked = base, name, file = tuple(request.match_info[part] for part in ("base", "name", "file"))
        try:
            new = self._path(name, file)
            made = new.with_name(f"{file}.from-{base}")
            if made not in self._differences:  # once it is begun, it does not need the file of `base`
                old = self._path(base, file)
                self._differences = {path: done for path, done in self._differences.items() if path.parent.exists()}
                self._differences[made] = asyncio.ensure_future(asyncio.to_thread(_make_difference, old, new, made))
            making = self._differences[made]
            await asyncio.wait({making}, timeout=SILENCE_S / 3)
            if not making.done():
                self._put_off[asked] = time.monotonic()
                return web.json_response({}, status=HTTPStatus.ACCEPTED)
            self._put_off.pop(asked, None)
            making.result()
        except (WeightsUnavailable, WriteFailed, OSError, ValueError) as error:
            self._put_off.pop(asked, None)
            self.sent()  # the whole file is asked for next
            return web.json_response({"error": first_line(error)}, status=404)
        return _Counted(made, self)

    def sent(self) -> None:
        """An answer to a download has ended, whether or not all of it arrived."""
        self._sent_at = time.monotonic()

    def _path(self, name: str, file: str) -> Path:
        """Raises: WeightsUnavailable."""
        path = self._store.directory(name) / file
        if file not in FILES or not path.is_file():
            raise WeightsUnavailable(f"version {name} has no {file}, or is no longer kept")
        return path


def _make_difference(old: Path, new: Path, made: Path) -> None:
    """Raises: WriteFailed; OSError; ValueError where it would not help."""
    if old.stat().st_size != new.stat().st_size:
        raise ValueError(f"{new.parent.name} and {old.parent.name} have files of unequal sizes")
    with writing(made, durable=False) as unfinished, unfinished.open("wb") as file:
        write_difference(old, new, file, threads=max(1, usable_cores() // 2))
        if file.tell() > WORTH_IT * new.stat().st_size:
            remove(unfinished)
            raise ValueError(f"{new.parent.name} differs too much from {old.parent.name}")
    put_in_place(made, durable=False)


class _Counted(web.FileResponse):
    """Counted among the running downloads while it is sent."""

    def __init__(self, path: Path, server: Server) -> None:
        super().__init__(path, chunk_size=PIECE_BYTES)
        self._server = server

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        self._server.sending += 1
        try:
            return await super().prepare(request)
        finally:
            self._server.sending -= 1
            self._server.sent()


async def _notice_silence(request: web.BaseRequest, _: web.StreamResponse) -> None:
    """End the download of a machine that is gone after SILENCE_S; TCP itself waits for a quarter of an hour."""
    connection = request.transport and request.transport.get_extra_info("socket")
    if connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)


async def _listen(runner: web.AppRunner, url: str, patience_s: float) -> None:
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
    if urlsplit(url).scheme != "http":
        raise ConfigError(f"weights.url {url}: only others may reach it by https, through a proxy; use http here")
    deadline, waits = asyncio.get_running_loop().time() + patience_s, f"waiting for port {port} of {host} to be free"
    with log_waiting(log, waits), ending_at_once(waits) as end_if_asked:
        while True:
            try:
                await web.TCPSite(runner, host, port).start()
                return
            except OSError as error:
                if asyncio.get_running_loop().time() > deadline or error.errno != errno.EADDRINUSE:
                    raise ConfigError(
                        f"weights.url: this process cannot listen at {host}, port {port} ({error.strerror}); use an "
                        "address of its machine and a free port"
                    ) from error
            await asyncio.sleep(RETRY_S)
            end_if_asked()
