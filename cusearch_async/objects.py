"""Files in an object store: S3 and its like, Google Cloud, Azure.

Region, endpoint and secrets are what obstore finds in the environment (AWS_REGION, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID,
GOOGLE_APPLICATION_CREDENTIALS, …).
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cusearch_async.errors import ConfigError, CusearchError, ObjectsUnavailable, WriteFailed, first_line, packages_of

PIECE_BYTES = 8 << 20
LEAST_PART_BYTES, MOST_PARTS = 5 << 20, 9_000
"""Of a file that is put; S3 takes 10,000 parts."""
AT_ONCE = 4
"""Pieces of a file that are fetched concurrently."""


class Objects:
    """The files at `url`, by their paths below it."""

    def __init__(self, url: str, key: str, unreadable: type[CusearchError] = ObjectsUnavailable) -> None:
        """`key` is the setting with the `url`; `unreadable` is raised where the store cannot be read.

        Raises: ConfigError; MissingExtra."""
        with packages_of("objects"):
            import obstore  # noqa: PLC0415
            from obstore.exceptions import BaseError  # noqa: PLC0415
            from obstore.store import from_url  # noqa: PLC0415
        self.url = url
        self._unreadable = unreadable
        self._obstore: Any = obstore
        self._errors = (OSError, BaseError)
        """obstore raises FileNotFoundError and the like, too."""
        try:
            self._store: Any = from_url(url)
        except self._errors as error:
            raise ConfigError(f"{key} {url} cannot be opened: {first_line(error)}") from error

    @contextmanager
    def _told(self, what: str, kind: type[CusearchError]) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise kind(f"{what} {self.url}: {reason_of(error)}") from error

    def paths(self) -> list[str]:
        """Of all files. Raises: `unreadable`."""
        with self._told("cannot list", self._unreadable):
            return [item["path"] for item in self._obstore.list(self._store).collect()]

    def put(self, path: str, file: Path) -> None:
        """A large file in parts; it is there when all of it is. Raises: WriteFailed."""
        with self._told(f"cannot write {path} to", WriteFailed):
            part = max(LEAST_PART_BYTES, -(-file.stat().st_size // MOST_PARTS))
            self._obstore.put(self._store, path, file, chunk_size=part)

    def read(self, path: str) -> bytes:
        """All of a small file. Raises: `unreadable`."""
        with self._told(f"cannot read {path} from", self._unreadable):
            return bytes(self._obstore.get(self._store, path).bytes())

    def remove(self, path: str) -> None:
        """One that is not there is removed. Raises: WriteFailed."""
        with self._told(f"cannot remove {path} from", WriteFailed), suppress(FileNotFoundError):
            self._obstore.delete(self._store, path)

    def remove_sealed(self, folder: str, files: Iterable[str], manifest: str) -> None:
        """The files of a folder, its manifest first, as `files.remove_sealed`. Raises: WriteFailed."""
        for file in sorted(files, key=lambda file: file != manifest):
            self.remove(f"{folder}/{file}")

    async def pieces(self, path: str) -> AsyncGenerator[bytes]:
        """Those of a file, in order. obstore asks again for one that fails. Raises: `unreadable`."""
        waiting = deque[asyncio.Future[Any]]()
        try:
            with self._told(f"cannot read {path} from", self._unreadable):
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


def reason_of(error: BaseException) -> str:
    """The first line of an error; of S3's answers, which are XML, with their code and message."""
    told = re.findall(r"<(?:Code|Message)>([^<]+)</", str(error))
    line = first_line(error).partition("<?xml")[0].strip(" :")
    return ": ".join([line, *told])
