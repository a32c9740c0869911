"""weights.transport = "object": versions in an object store, at weights.objects.

    s3://bucket/prefix/v000012-e3/model.safetensors
    s3://bucket/prefix/v000012-e3/manifest.json            last, and removed first
    s3://bucket/prefix/run.json                            the run that the prefix is for

The learner writes a version into its own folder, then there; other machines fetch it, each once. They need nothing of
the learner's machine. A version stays there as long as the staleness bound lets anybody roll out with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from cusearch_async.config import Config
from cusearch_async.errors import ConfigError, WeightsUnavailable, WriteFailed
from cusearch_async.objects import Objects
from cusearch_async.run.folder import MARKER, marker_in, read_marker
from cusearch_async.weights.copies import Copies, keep
from cusearch_async.weights.folder import KEPT, NAME, WeightStore, order_of
from cusearch_async.weights.interface import MANIFEST, Manifest
from cusearch_async.weights.tensor_file import ArrivingTensors

log = logging.getLogger(__name__)


class ObjectTransport:
    def __init__(self, config: Config) -> None:
        """Raises: ConfigError for a store that is not known; MissingExtra."""
        self._config = config
        self._objects = open_objects(config.weights.objects or "")

    def store(self) -> ObjectStore:
        usable = self._config.pool.max_staleness // self._config.learner.publish_every + 1
        kept = max(KEPT, usable + 1)  # the oldest of them until the next is announced
        return ObjectStore(self._config.weights_folder, self._objects, kept, self._config.eval.keeps)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Raises: ConfigError where the prefix is another run's; WeightsUnavailable; WriteFailed."""
        await asyncio.to_thread(self._mark)
        yield

    def _mark(self) -> None:
        """A learner removes the versions of earlier ones, so that two runs would remove each other's."""
        own = read_marker(self._config.folder)
        refuse_others(self._objects, self._config.run.name, own.id if own else "")
        self._objects.put(MARKER, self._config.folder / MARKER)

    @asynccontextmanager
    async def source(self, needs_last: bool = False) -> AsyncIterator[ObjectCopies]:
        """Versions are kept in the folder `downloaded` of weights.folder or run.folder, for all processes with it."""
        yield ObjectCopies(self._objects, self._config.weights_folder.with_name("downloaded"))


def open_objects(url: str) -> Objects:
    """Raises: ConfigError; MissingExtra."""
    return Objects(url, "weights.objects", WeightsUnavailable)


def refuse_others(objects: Objects, run: str, run_id: str = "") -> None:
    """Raises: ConfigError where the versions are another run's, also one of the same name; WeightsUnavailable."""
    if MARKER not in objects.paths():
        return
    theirs = marker_in(objects.read(MARKER), f"weights.objects {objects.url}")
    if theirs.run != run:
        raise ConfigError(
            f"weights.objects {objects.url} is for run {theirs.run!r}, not for {run!r}; choose another prefix"
        )
    if run_id and theirs.id != run_id:
        raise ConfigError(
            f"weights.objects {objects.url} is for another run {run!r} than this folder's, made {theirs.created}; "
            "choose another prefix, or delete what is there"
        )


def versions_in(objects: Objects) -> dict[str, set[str]]:
    """The files of each version, whole or not. Raises: WeightsUnavailable."""
    found: dict[str, set[str]] = {}
    for path in objects.paths():
        name, _, file = path.rpartition("/")
        if NAME.fullmatch(name):
            found.setdefault(name, set()).add(file)
    return found


class ObjectStore(WeightStore):
    """Versions in a folder of the learner's, and in an object store."""

    def __init__(
        self, folder: Path, objects: Objects, kept: int = KEPT, keeps: Callable[[int], bool] = lambda version: False
    ) -> None:
        """The newest `kept` versions stay in the object store."""
        super().__init__(folder, keeps=keeps)
        self._objects = objects
        self._count = kept

    def highest_epoch(self) -> int:
        """Raises: WeightsUnavailable."""
        return max((super().highest_epoch(), *(order_of(name)[0] for name in versions_in(self._objects))))

    def _hand_on(self, name: str, manifest: Manifest) -> None:
        """Raises: WriteFailed."""
        directory = self.directory(name)
        for file in (manifest.file, MANIFEST):
            self._objects.put(f"{name}/{file}", directory / file)
        try:
            self._remove_old_objects(manifest.epoch)
        except (WeightsUnavailable, WriteFailed) as error:  # the version is there
            log.warning("old versions stay in the object store until the next one: %s", error)

    def verify(self, name: str) -> Manifest:
        try:
            is_there = MANIFEST in versions_in(self._objects).get(name, ())
        except WeightsUnavailable as error:
            log.warning("%s; %s is taken to be there", error, name)
            is_there = True
        if not is_there:
            raise WeightsUnavailable(f"{self._objects.url} has no whole version {name}")
        return super().verify(name)

    def _remove_old_objects(self, epoch: int) -> None:
        """Also what earlier learners left unfinished."""
        files = {name: of for name, of in versions_in(self._objects).items() if order_of(name)[0] <= epoch}
        whole = [name for name, of in files.items() if MANIFEST in of]
        for name in files.keys() - self._kept(whole, self._count):
            if name in whole or order_of(name)[0] < epoch:
                self._objects.remove_sealed(name, files[name], MANIFEST)


class ObjectCopies(Copies):
    """Copies of the versions in an object store."""

    def __init__(self, objects: Objects, folder: Path) -> None:
        super().__init__(objects.url, folder)
        self._objects = objects

    async def names(self) -> list[str]:
        files = await asyncio.to_thread(versions_in, self._objects)
        return sorted((name for name, of in files.items() if MANIFEST in of), key=order_of)

    async def receive(self, name: str, file: str, into: BinaryIO, tensors: ArrivingTensors | None) -> None:
        async with aclosing(self._objects.pieces(f"{name}/{file}")) as pieces:
            async for piece in pieces:
                await asyncio.to_thread(keep, piece, into, tensors)
