"""The client of weights.transport = "http": versions of the learner, or of a relay, on this machine.

It asks for what changed since the newest version that it has; without one, or where that does not help, it takes the
whole file. A download is checked while it arrives, resumes after a lost connection, and gets its name when it is
complete; it is then loaded like a version in a shared folder. A learner answers 202 while it makes a difference, and a
relay while it downloads a version itself; the client asks again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

import aiohttp
import msgspec

from cusearch_async.config import weights_token
from cusearch_async.errors import (
    ConfigError,
    CusearchError,
    LearnerUnreachable,
    WeightsUnavailable,
    WriteFailed,
    first_line,
)
from cusearch_async.files import remove, write_failed
from cusearch_async.weights.copies import Copies, keep
from cusearch_async.weights.difference import restore
from cusearch_async.weights.interface import Manifest
from cusearch_async.weights.tensor_file import ArrivingTensors, BadTensorFile

log = logging.getLogger(__name__)

PATH = "/weights"
PIECE_BYTES = 4 << 20
MIB = 2**20
_SHOWN = 500
"""Bytes of an error answer that a message repeats."""
RETRY_S = 1.0
CONNECT_S = 15.0
SILENCE_S = 30
"""The other machine is taken for dead after this time without data."""
_OF_A_PROXY = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
"""Of a proxy, or a relay, that does not reach the learner."""
ATTEMPTS = 3
"""To download a file, without a byte of progress."""


class _NotYet(WeightsUnavailable):
    """A relay is downloading the version, or the difference is being made."""


@asynccontextmanager
async def downloading(
    url: str, run_folder: Path, folder: Path, known: set[str] | None = None
) -> AsyncIterator[Downloads]:
    """`known`: as in `Copies`."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield Downloads(url, run_folder, folder, session, known)


class Downloads(Copies):
    """Versions of the learner at `url`, kept in `folder`."""

    def __init__(
        self, url: str, run_folder: Path, folder: Path, session: aiohttp.ClientSession, known: set[str] | None = None
    ) -> None:
        url = url.rstrip("/")
        super().__init__(f"the learner at {url}", folder, known)
        self._url = url
        self._run_folder = run_folder
        self._session = session

    async def names(self) -> list[str]:
        return await self._names("") or []

    async def last(self, client: str, have: str) -> list[str]:
        """The name of the last version, when the learner ends. Raises: WeightsUnavailable."""
        last = await self._names("/last", client=client, have=have)
        if last is None:  # blanks alone: a proxy has ended the answer of a learner that died
            raise LearnerUnreachable(f"the learner at {self._url} ended before it named its last version")
        return last

    async def follow_to_the_end(self) -> None:
        """When the learner ends, download the last version, which can then be opened without it."""
        client, have, told = secrets.token_hex(8), "", ""
        while True:
            try:
                for last in await self.last(client, have):
                    await self.open(last)
                    have = last
            except (CusearchError, OSError) as error:
                if not isinstance(error, WeightsUnavailable) and str(error) != told:
                    told = str(error)
                    log.warning("the last version: %s; will try again", first_line(error))
            await asyncio.sleep(RETRY_S)

    async def fetch_difference(self, name: str, manifest: Manifest, folder: Path) -> bool:
        """Whether the file of tensors is in `folder`, restored from the newest version here and what has changed."""
        bases = [base for base in self._store.names() if (self._store.directory(base) / manifest.file).exists()]
        if not bases:
            return False
        base, packed, whole = bases[-1], folder / "difference", folder / manifest.file
        try:
            await self.fetch(name, f"{manifest.file}/from/{base}", packed)
            sent = packed.stat().st_size
            await asyncio.to_thread(_restore, self._store.directory(base), packed, whole, manifest)
        except (WeightsUnavailable, BadTensorFile, WriteFailed) as error:  # there may be room for the whole file alone
            log.info("%s is downloaded whole: %s", name, first_line(error))
            return False
        finally:
            remove(packed)
        log.info("%s: %.1f of %.1f MiB downloaded, from %s", name, sent / MIB, whole.stat().st_size / MIB, base)
        return True

    async def receive(self, name: str, file: str, into: BinaryIO, tensors: ArrivingTensors | None) -> None:
        """Resumes a lost connection at the next byte."""
        failures = 0
        while True:
            began = into.tell()
            try:
                headers = {"Range": f"bytes={began}-"} if began else {}
                async with self._get(f"/{name}/{file}", headers) as response:
                    async for piece in response.content.iter_chunked(PIECE_BYTES):
                        await asyncio.to_thread(keep, piece, into, tensors)
                return
            except _NotYet:
                await asyncio.sleep(RETRY_S)
            except WeightsUnavailable:
                failures = failures + 1 if into.tell() == began else 0
                if into.tell() == 0 or failures == ATTEMPTS:
                    raise
                await asyncio.sleep(RETRY_S)

    async def _names(self, path: str, **query: str) -> list[str] | None:
        """None for an answer of blanks."""
        async with self._get(path, query=query) as response:
            answer = (await response.read()).strip()
        try:
            return msgspec.json.decode(answer, type=list[str]) if answer else None
        except (ValueError, msgspec.MsgspecError) as error:
            raise LearnerUnreachable(f"the learner at {self._url} answers no names of versions: {error}") from error

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
                    kind = LearnerUnreachable if response.status in _OF_A_PROXY else WeightsUnavailable
                    text = (await response.content.read(_SHOWN)).decode(errors="replace")
                    raise kind(f"the learner at {self._url} answers {response.status}: {text}")
                if response.status == HTTPStatus.ACCEPTED:
                    raise _NotYet(f"{self._url} does not have it yet")
                yield response
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise LearnerUnreachable(
                f"the learner does not answer at weights.url {self._url} ({first_line(error)})"
            ) from error


def _restore(base: Path, packed: Path, whole: Path, manifest: Manifest) -> None:
    """Raises: BadTensorFile; WriteFailed."""
    tensors = ArrivingTensors(manifest.file, manifest.tensors)
    try:
        with whole.open("wb") as into:
            restore(base / manifest.file, packed, into, tensors)
    except OSError as error:
        raise write_failed(whole, error) from error
