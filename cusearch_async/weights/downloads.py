"""The client of weights.transport = "http": versions of the learner, or of a relay, on this machine.

It asks for what changed since the newest version that it has; without one, or where that does not help, it takes the
whole file. A download is checked while it arrives, resumes after a lost connection, and gets its name when it is
complete; it is then loaded like a version in a shared folder. A relay answers 202 while it downloads a version itself;
the client asks again.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import msgspec

from cusearch_async.config import weights_token
from cusearch_async.errors import ConfigError, RunInUse, WeightsUnavailable, first_line
from cusearch_async.files import entries, is_half_done, put_in_place, remove, remove_sealed, write_failed, writing
from cusearch_async.run.folder import locked
from cusearch_async.weights.difference import restore
from cusearch_async.weights.folder import NAME, WeightStore, newest_of, read_manifest
from cusearch_async.weights.interface import ADAPTER_CONFIG, MANIFEST, Manifest, OpenedVersion
from cusearch_async.weights.tensor_file import ArrivingTensors, BadTensorFile

log = logging.getLogger(__name__)

PATH = "/weights"
PIECE_BYTES = 4 << 20
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


@asynccontextmanager
async def downloading(url: str, run_folder: Path, folder: Path) -> AsyncIterator[Downloads]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield Downloads(url, run_folder, folder, session)


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
