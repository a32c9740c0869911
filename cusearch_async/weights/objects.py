"""weights.transport = "object": versions in an object store, at weights.objects.

    s3://bucket/prefix/v000012-e3/model.safetensors
    s3://bucket/prefix/v000012-e3/manifest.json            last, and removed first

The learner writes a version into its own folder, then there; other machines fetch it, each once. They need nothing of
the learner's machine. Region, endpoint and secrets are what obstore finds in the environment (AWS_REGION,
AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, …).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from cusearch_async.config import Config
from cusearch_async.errors import ConfigError, WeightsUnavailable, WriteFailed, first_line, packages_of
from cusearch_async.files import write_failed
from cusearch_async.weights.copies import Copies, keep
from cusearch_async.weights.folder import NAME, WeightStore, order_of
from cusearch_async.weights.interface import MANIFEST, Manifest
from cusearch_async.weights.tensor_file import ArrivingTensors

PIECE_BYTES = 8 << 20
AT_ONCE = 4
"""Pieces of a file that are fetched concurrently."""


class ObjectTransport:
    def __init__(self, config: Config) -> None:
        """Raises: ConfigError for a store that is not known; MissingExtra."""
        self._config = config
        self._url = config.weights.objects or ""
        self._objects = Objects(self._url)

    def store(self) -> ObjectStore:
        return ObjectStore(self._config.weights_folder, self._objects, keeps=self._config.eval.keeps)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def source(self, needs_last: bool = False) -> AsyncIterator[ObjectCopies]:
        """Versions are kept in the folder `downloaded` of weights.folder or run.folder, for all processes with it."""
        yield ObjectCopies(self._objects, self._config.weights_folder.with_name("downloaded"))


class Objects:
    """The files of versions in an object store."""

    def __init__(self, url: str) -> None:
        """Raises: ConfigError; MissingExtra."""
        with packages_of("objects"):
            import obstore  # noqa: PLC0415
            from obstore.exceptions import BaseError  # noqa: PLC0415
            from obstore.store import from_url  # noqa: PLC0415
        self.url = url
        self._obstore: Any = obstore
        self._errors = (OSError, BaseError)
        """obstore raises FileNotFoundError and the like, too."""
        try:
            self._store: Any = from_url(url)
        except self._errors as error:
            raise ConfigError(f"weights.objects {url} cannot be opened: {first_line(error)}") from error

    @contextmanager
    def _told(self, what: str, kind: type[WeightsUnavailable | WriteFailed]) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise kind(f"{what} {self.url}: {first_line(error)}") from error

    def files(self) -> dict[str, set[str]]:
        """Of each version, whole or not. Raises: WeightsUnavailable."""
        found: dict[str, set[str]] = {}
        with self._told("cannot list", WeightsUnavailable):
            for item in self._obstore.list(self._store).collect():
                name, _, file = item["path"].rpartition("/")
                if NAME.fullmatch(name):
                    found.setdefault(name, set()).add(file)
        return found

    def put(self, name: str, files: Mapping[str, Path]) -> None:
        """One after the other, large ones in parts. Raises: WriteFailed."""
        for file, path in files.items():
            with self._told(f"cannot write {name}/{file} to", WriteFailed):
                self._obstore.put(self._store, f"{name}/{file}", path)

    def remove(self, name: str, files: set[str]) -> None:
        """The manifest first. Raises: WriteFailed."""
        with self._told(f"cannot remove {name} from", WriteFailed):
            for file in sorted(files, key=lambda file: file != MANIFEST):
                self._obstore.delete(self._store, f"{name}/{file}")

    async def pieces(self, name: str, file: str) -> AsyncGenerator[bytes]:
        """Those of a file, in order. obstore asks again for one that fails. Raises: WeightsUnavailable."""
        path, waiting = f"{name}/{file}", deque[asyncio.Future[Any]]()
        try:
            with self._told(f"cannot read {path} from", WeightsUnavailable):
                size = (await self._obstore.head_async(self._store, path))["size"]
                for start in range(0, size, PIECE_BYTES):
                    length = min(PIECE_BYTES, size - start)
                    asked = self._obstore.get_range_async(self._store, path, start=start, length=length)
                    waiting.append(asyncio.ensure_future(asked))
                    if len(waiting) == AT_ONCE:
                        yield bytes(await waiting.popleft())
                while waiting:
                    yield bytes(await waiting.popleft())
        finally:
            for asked in waiting:
                asked.cancel()


class ObjectStore(WeightStore):
    """Versions in a folder of the learner's, and in an object store."""

    def __init__(self, folder: Path, objects: Objects, keeps: Callable[[int], bool] = lambda version: False) -> None:
        super().__init__(folder, keeps=keeps)
        self._objects = objects

    def highest_epoch(self) -> int:
        """Raises: WeightsUnavailable."""
        return max((super().highest_epoch(), *(order_of(name)[0] for name in self._objects.files())))

    def _hand_on(self, name: str, manifest: Manifest) -> None:
        """Raises: WriteFailed; WeightsUnavailable."""
        directory = self.directory(name)
        self._objects.put(name, {file: directory / file for file in (manifest.file, MANIFEST)})
        self._remove_old_objects(manifest.epoch)

    def verify(self, name: str) -> Manifest:
        if MANIFEST not in self._objects.files().get(name, ()):
            raise WeightsUnavailable(f"{self._objects.url} has no whole version {name}")
        return super().verify(name)

    def _remove_old_objects(self, epoch: int) -> None:
        """The same as in the folder, and what earlier learners left unfinished."""
        files = {name: of for name, of in self._objects.files().items() if order_of(name)[0] <= epoch}
        whole = [name for name, of in files.items() if MANIFEST in of]
        for name in files.keys() - self._kept(whole):
            if name in whole or order_of(name)[0] < epoch:
                self._objects.remove(name, files[name])


class ObjectCopies(Copies):
    """Copies of the versions in an object store."""

    def __init__(self, objects: Objects, folder: Path) -> None:
        super().__init__(objects.url, folder)
        self._objects = objects

    async def names(self) -> list[str]:
        files = await asyncio.to_thread(self._objects.files)
        return sorted((name for name, of in files.items() if MANIFEST in of), key=order_of)

    async def fetch(self, name: str, file: str, target: Path, tensors: ArrivingTensors | None = None) -> None:
        try:
            into = target.open("wb")
        except OSError as error:
            raise write_failed(target, error) from error
        with into:
            async with aclosing(self._objects.pieces(name, file)) as pieces:
                async for piece in pieces:
                    await asyncio.to_thread(keep, piece, into, tensors)
        if tensors is not None:
            tensors.finish()
