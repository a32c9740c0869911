"""Copies of versions on this machine, for all of its processes: each is fetched once, and checked while it arrives."""

from __future__ import annotations

import asyncio
import fcntl
import io
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from cusearch_async.errors import ConfigError, WeightsUnavailable
from cusearch_async.files import (
    entries,
    is_half_done,
    put_in_place,
    remove,
    remove_sealed,
    try_lock,
    write_failed,
    writing,
)
from cusearch_async.weights.folder import NAME, WeightStore, newest_of, read_manifest
from cusearch_async.weights.interface import ADAPTER_CONFIG, MANIFEST, Manifest, OpenedVersion
from cusearch_async.weights.tensor_file import ArrivingTensors, BadTensorFile

log = logging.getLogger(__name__)

KEPT = 3
"""Versions that are kept, those that were opened last."""
POLL_S = 0.1


class Copies(ABC):
    """Copies in `folder` of the versions at `place`."""

    def __init__(self, place: str, folder: Path, known: set[str] | None = None) -> None:
        """`known` may be another's of the same process, for the same folder."""
        self._place, self.folder = place, folder
        self._store = WeightStore(folder)
        self.known: set[str] = set() if known is None else known
        """Copies that are known to be of the versions there, not of another run's with their names."""

    @abstractmethod
    async def names(self) -> list[str]:
        """Of the versions there, oldest first. Raises: WeightsUnavailable."""

    @abstractmethod
    async def receive(self, name: str, file: str, into: BinaryIO, tensors: ArrivingTensors | None) -> None:
        """Give each piece of a version's file to `keep`. Raises: WeightsUnavailable; BadTensorFile; WriteFailed."""

    async def fetch(self, name: str, file: str, target: Path, tensors: ArrivingTensors | None = None) -> None:
        """Write a version's file to `target`; `tensors` checks it. Raises: as `receive`."""
        try:
            into = target.open("wb")
        except OSError as error:
            raise write_failed(target, error) from error
        with into:
            await self.receive(name, file, into, tensors)
        if tensors is not None:
            tensors.finish()

    async def fetch_difference(self, name: str, manifest: Manifest, folder: Path) -> bool:
        """Whether the file of tensors is in `folder`, made from another version here and what has changed."""
        return False

    async def newest_of(self, version: int) -> str | None:
        return newest_of(version, await self.names())

    async def open(self, name: str) -> OpenedVersion:
        """Fetches the version, unless another process with this folder has, and the copy is intact. Raises:
        WeightsUnavailable; ConfigError where this process is refused; WriteFailed."""
        directory = self._store.directory(name)
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_failed(directory, error) from error
        async with _alone(directory.parent / ".lock"):
            manifest = await self._copy_of(name, directory)
            if manifest is None:
                await asyncio.to_thread(remove_sealed, directory, MANIFEST)
                manifest = await self._fetch_version(name, directory)
            self.known.add(name)
            with suppress(OSError):  # of a disk that can no longer be written, the copy serves
                os.utime(directory)
            await asyncio.to_thread(self._remove_old, directory)
        return OpenedVersion(name, manifest, directory)

    async def is_current(self, name: str) -> bool:
        """Whether the copy is of the version there, as far as it can be asked for. Otherwise `open` fetches it."""
        directory = self._store.directory(name)
        is_it = (directory / MANIFEST).exists() and await self._is_there(name, directory)
        if not is_it:
            self.known.discard(name)
        return is_it

    async def _copy_of(self, name: str, directory: Path) -> Manifest | None:
        """The manifest of the copy that is here; None without one, and for one that is damaged or another run's."""
        if is_half_done(directory, MANIFEST):
            return None
        try:
            manifest = await asyncio.to_thread(self._store.verify, name)
        except WeightsUnavailable as error:
            log.warning("%s; it is fetched again", error)
            return None
        if name not in self.known and not await self._is_there(name, directory):
            log.warning("%s is of another run than %s at %s; it is fetched again", directory, name, self._place)
            return None
        return manifest

    async def _is_there(self, name: str, directory: Path) -> bool:
        """Whether the version there has this copy's manifest, as far as it can be asked for."""
        ours, theirs = (directory / MANIFEST).read_bytes(), io.BytesIO()  # a full disk does not matter here
        try:
            await self.receive(name, MANIFEST, theirs, None)
        except WeightsUnavailable:
            return True
        return theirs.getvalue() == ours

    async def _fetch_version(self, name: str, directory: Path) -> Manifest:
        for path, _ in entries(directory.parent, NAME):  # nobody else is fetching
            if is_half_done(path, MANIFEST):
                await asyncio.to_thread(remove, path)
        with writing(directory, durable=False) as unfinished:
            unfinished.mkdir()
            try:
                await self.fetch(name, MANIFEST, unfinished / MANIFEST)
                manifest = read_manifest(unfinished, name)
                if manifest.adapter is not None:
                    (unfinished / ADAPTER_CONFIG).write_bytes(msgspec.json.encode(manifest.adapter))
                if not await self.fetch_difference(name, manifest, unfinished):
                    tensors = ArrivingTensors(manifest.file, manifest.tensors)
                    await self.fetch(name, manifest.file, unfinished / manifest.file, tensors)
            except BaseException as error:
                remove(unfinished)
                if isinstance(error, BadTensorFile):
                    raise WeightsUnavailable(f"{name} at {self._place} is damaged: {error}") from error
                raise
        put_in_place(directory, durable=False)
        return manifest

    def _remove_old(self, newest: Path) -> None:
        """Whatever the machine's clock said when they were opened, `newest` stays."""
        there = ((path.stat().st_mtime_ns, path) for path, _ in entries(self._store.folder, NAME) if path != newest)
        for _, path in sorted(there)[: 1 - KEPT]:
            remove_sealed(path, MANIFEST)


def keep(piece: bytes, file: BinaryIO, tensors: ArrivingTensors | None) -> None:
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
    """Excludes the other processes of this machine. Raises: ConfigError where nothing can be locked; WriteFailed."""
    with _opened(lock) as file:
        try:
            while not try_lock(file, fcntl.LOCK_EX):
                await asyncio.sleep(POLL_S)
        except OSError as error:
            if file.writable():
                raise ConfigError(
                    f"{lock} cannot be locked ({error.strerror}), so two processes would write one copy; put "
                    f"{lock.parent} on a file system with locks, such as this machine's own disk (weights.folder; of a "
                    "relay run.folder)"
                ) from error
        yield


def _opened(lock: Path) -> BinaryIO:
    try:
        return lock.open("a+b")
    except OSError as error:
        try:
            return lock.open("rb")  # where nothing can be written, the copies serve, locked or not
        except OSError:
            raise write_failed(lock, error) from error
