"""weights.transport = "http": the learner serves the files of published versions; each other machine downloads them.

Requests need the bearer token of the run (`config.weights_token`). A client asks for what changed since the newest
version that it has; without one, or where that does not help, it takes the whole file. A download is checked while it
arrives, resumes after a lost connection, and gets its name when it is complete; it is then loaded like a version in a
shared folder.

    GET /weights                 names of the versions, oldest first
    GET /weights/NAME/FILE       a file of one, or a range of it
    GET /weights/NAME/FILE/from/BASE   what it changed of the version BASE, where that is much less
    GET /weights/last?client=C   answered at the learner's end, with the name of the last version

A relay answers 202 while it downloads the version itself; the client asks again.

Not covered: encryption. Outside a private network put a proxy with TLS, or a tunnel, before the learner.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.typedefs import Handler

from cusearch_async.config import Config, make_weights_token, weights_token
from cusearch_async.errors import ConfigError, RunInUse, WeightsUnavailable, WriteFailed, first_line
from cusearch_async.files import entries, is_half_done, put_in_place, remove, remove_sealed, write_failed, writing
from cusearch_async.http_server import has_token
from cusearch_async.lifecycle.progress import log_waiting
from cusearch_async.lifecycle.signals import end_tasks
from cusearch_async.run.folder import locked
from cusearch_async.weights.difference import restore, write_difference
from cusearch_async.weights.folder import NAME, WeightStore, newest_of, read_manifest
from cusearch_async.weights.interface import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    MANIFEST,
    TENSORS,
    Manifest,
    OpenedVersion,
)
from cusearch_async.weights.tensor_file import ArrivingTensors, BadTensorFile

log = logging.getLogger(__name__)

PATH = "/weights"
FILES = (MANIFEST, TENSORS, ADAPTER_TENSORS)
"""The files of a version that can be downloaded."""
PIECE_BYTES = 4 << 20
WORTH_IT = 0.7
"""A difference is sent if it has less than this share of the file's bytes."""
MIB = 2**20
KEPT = 3
"""Downloaded versions that are kept, those that were opened last."""
POLL_S = 0.1
RETRY_S = 1.0
CONNECT_S = 15.0
SILENCE_S = 30
"""The other machine is taken for dead after this time without data."""
ATTEMPTS = 3
"""To download a file, without a byte of progress."""


class _NotYet(WeightsUnavailable):
    """A relay is downloading the version."""


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
            following = [asyncio.ensure_future(downloads.follow_to_the_end())] if needs_last else []
            try:
                yield downloads
            finally:
                await end_tasks(following)


@asynccontextmanager
async def downloading(url: str, run_folder: Path, folder: Path) -> AsyncIterator[Downloads]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield Downloads(url, run_folder, folder, session)


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
        self.asking = 0
        """Open questions for the last version."""
        self._needing: dict[str, float] = {}
        """Clients that were given its name, and have not said that they have it -> when that was."""

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
        return any(now - heard < SILENCE_S for heard in self._needing.values())

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
        if last == [request.query.get("have")]:
            self._needing.pop(client)
        return response

    async def _file(self, request: web.Request) -> web.StreamResponse:
        try:
            return _Counted(self._path(request.match_info["name"], request.match_info["file"]), self)
        except WeightsUnavailable as error:
            return web.json_response({"error": str(error)}, status=404)

    async def _difference(self, request: web.Request) -> web.StreamResponse:
        base, name, file = (request.match_info[part] for part in ("base", "name", "file"))
        try:
            old, new = self._path(base, file), self._path(name, file)
            made = new.with_name(f"{file}.from-{base}")
            if made not in self._differences:
                self._differences = {path: done for path, done in self._differences.items() if path.parent.exists()}
                self._differences[made] = asyncio.ensure_future(asyncio.to_thread(_make_difference, old, new, made))
            await asyncio.shield(self._differences[made])
        except (WeightsUnavailable, WriteFailed, OSError, ValueError) as error:
            return web.json_response({"error": first_line(error)}, status=404)
        return _Counted(made, self)

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
        write_difference(old, new, file, threads=max(1, len(os.sched_getaffinity(0)) // 2))
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


class Downloads:
    """Versions of the learner at `url`, kept in `folder`."""

    def __init__(self, url: str, run_folder: Path, folder: Path, session: aiohttp.ClientSession) -> None:
        self._url = url.rstrip("/")
        self._run_folder = run_folder
        self._store = WeightStore(folder)
        self._session = session

    async def newest_of(self, version: int) -> str | None:
        return newest_of(version, await self.names())

    async def names(self) -> list[str]:
        """Of the learner's versions, oldest first. Raises: WeightsUnavailable."""
        names: list[str] = await self._json("")
        return names

    async def last(self, client: str, have: str) -> list[str]:
        """The name of the last version, when the learner ends. Raises: WeightsUnavailable."""
        last: list[str] = await self._json("/last", client=client, have=have)
        return last

    async def open(self, name: str) -> OpenedVersion:
        """Downloads the version, unless another process with this folder has. Raises: WeightsUnavailable; ConfigError
        for a token that the learner refuses; WriteFailed."""
        directory = self._store.directory(name)
        directory.parent.mkdir(parents=True, exist_ok=True)
        async with _alone(directory.parent / ".lock"):
            if is_half_done(directory, MANIFEST):
                manifest = await self._download(name, directory)
            else:
                manifest = await asyncio.to_thread(self._store.verify, name)
            os.utime(directory)
            self._remove_old()
        return OpenedVersion(name, manifest, directory)

    async def follow_to_the_end(self) -> None:
        """When the learner ends, download the last version, which can then be opened without it."""
        client, have = secrets.token_hex(8), ""
        while True:
            try:
                for last in await self.last(client, have):
                    await self.open(last)
                    have = last
            except WeightsUnavailable as error:
                log.debug("%s", error)
            await asyncio.sleep(RETRY_S)

    async def _download(self, name: str, directory: Path) -> Manifest:
        for path, _ in entries(directory.parent, NAME):  # nobody else is downloading
            if is_half_done(path, MANIFEST):
                remove(path)
        with writing(directory, durable=False) as unfinished:
            unfinished.mkdir()
            try:
                await self._fetch(f"/{name}/{MANIFEST}", unfinished / MANIFEST)
                manifest = read_manifest(unfinished, name)
                if manifest.adapter is not None:
                    (unfinished / ADAPTER_CONFIG).write_bytes(msgspec.json.encode(manifest.adapter))
                if not await self._fetch_difference(name, manifest, unfinished):
                    tensors = ArrivingTensors(manifest.file, manifest.tensors)
                    await self._fetch(f"/{name}/{manifest.file}", unfinished / manifest.file, tensors)
            except BaseException as error:
                remove(unfinished)
                if isinstance(error, BadTensorFile):
                    raise WeightsUnavailable(f"{name} of the learner at {self._url} is damaged: {error}") from error
                raise
        put_in_place(directory, durable=False)
        return manifest

    async def _fetch_difference(self, name: str, manifest: Manifest, folder: Path) -> bool:
        """Whether the file of tensors is in `folder`, restored from the newest version here and what has changed."""
        bases = [base for base in self._store.names() if (self._store.directory(base) / manifest.file).exists()]
        if not bases:
            return False
        base, packed, whole = bases[-1], folder / "difference", folder / manifest.file
        try:
            await self._fetch(f"/{name}/{manifest.file}/from/{base}", packed)
            sent = packed.stat().st_size
            await asyncio.to_thread(_restore, self._store.directory(base), packed, whole, manifest)
        except (WeightsUnavailable, BadTensorFile) as error:
            log.info("%s is downloaded whole: %s", name, first_line(error))
            return False
        finally:
            remove(packed)
        log.info("%s: %.1f of %.1f MiB downloaded, from %s", name, sent / MIB, whole.stat().st_size / MIB, base)
        return True

    async def _fetch(self, path: str, target: Path, tensors: ArrivingTensors | None = None) -> None:
        """Resumes a lost connection at the next byte."""
        failures = 0
        with target.open("wb") as into:
            while True:
                began = into.tell()
                try:
                    async with self._get(path, {"Range": f"bytes={began}-"} if began else {}) as response:
                        async for piece in response.content.iter_chunked(PIECE_BYTES):
                            await asyncio.to_thread(_keep, piece, into, tensors)
                    break
                except _NotYet:
                    await asyncio.sleep(RETRY_S)
                except WeightsUnavailable:
                    failures = failures + 1 if into.tell() == began else 0
                    if into.tell() == 0 or failures == ATTEMPTS:
                        raise
                    await asyncio.sleep(RETRY_S)
        if tensors is not None:
            tensors.finish()

    async def _json(self, path: str, **query: str) -> Any:
        async with self._get(path, query=query) as response:
            return await response.json()

    @asynccontextmanager
    async def _get(
        self, path: str, headers: dict[str, str] | None = None, query: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Raises: WeightsUnavailable, also for a connection that is lost inside the context."""
        headers = {"Authorization": f"Bearer {weights_token(self._run_folder)}", **(headers or {})}
        try:
            async with self._session.get(self._url + PATH + path, headers=headers, params=query) as response:
                if response.status == HTTPStatus.UNAUTHORIZED:
                    raise ConfigError(
                        f"the learner at {self._url} refuses the token of this process; set CUSEARCH_WEIGHTS_TOKEN to "
                        "the same text for both, or copy weights-token from the learner's run folder to "
                        f"{self._run_folder}"
                    )
                if response.status >= HTTPStatus.BAD_REQUEST:
                    raise WeightsUnavailable(
                        f"the learner at {self._url} answers {response.status}: {(await response.text())[:500]}"
                    )
                if response.status == HTTPStatus.ACCEPTED:
                    raise _NotYet(f"the relay at {self._url} does not have it yet")
                yield response
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise WeightsUnavailable(
                f"the learner does not answer at weights.url {self._url} ({first_line(error)})"
            ) from error

    def _remove_old(self) -> None:
        there = sorted((path.stat().st_mtime_ns, path) for path, _ in entries(self._store.folder, NAME))
        for _, path in there[:-KEPT]:
            remove_sealed(path, MANIFEST)


def _restore(base: Path, packed: Path, whole: Path, manifest: Manifest) -> None:
    """Raises: BadTensorFile; WriteFailed."""
    tensors = ArrivingTensors(manifest.file, manifest.tensors)
    try:
        with whole.open("wb") as into:
            restore(base / manifest.file, packed, into, tensors)
    except OSError as error:
        raise write_failed(whole, error) from error


def _keep(piece: bytes, file: BinaryIO, tensors: ArrivingTensors | None) -> None:
    """Raises: BadTensorFile, before anything is written; WriteFailed."""
    if tensors is not None:
        tensors.add(piece)
    try:
        file.write(piece)
        file.flush()
    except OSError as error:
        raise write_failed(Path(file.name), error) from error


@asynccontextmanager
async def _alone(lock: Path) -> AsyncIterator[None]:
    """Excludes the other processes of this machine."""
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(locked(lock, fcntl.LOCK_EX, f"{lock.parent} is in use"))
                break
            except RunInUse:
                await asyncio.sleep(POLL_S)
        yield


async def _notice_silence(request: web.BaseRequest, _: web.StreamResponse) -> None:
    """End the download of a machine that is gone after SILENCE_S; TCP itself waits for a quarter of an hour."""
    connection = request.transport and request.transport.get_extra_info("socket")
    if connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)


async def _listen(runner: web.AppRunner, url: str, patience_s: float) -> None:
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
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
