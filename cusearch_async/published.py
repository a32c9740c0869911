"""Publishes files and folders so that they are complete or absent.

They are written next to the target under a temporary name, synced to disk (unless they need not outlive a crash of the
machine), and renamed. The manifest is the last file that is written in a folder and the first that is deleted. So a
folder without its manifest is only partly written, or partly deleted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import xxhash

from cusearch_async import files
from cusearch_async.files import remove, sync, sync_tree

UNFINISHED = ".unfinished-"
_CHUNK = 2**22


class FileRecord(msgspec.Struct):
    """Size and checksum of a file when it was written."""

    bytes: int
    xxh3: str


# --- to write -------------------------------------------------------------------------------------------


def unfinished(target: Path) -> Path:
    """The name of `target` until it is published."""
    return target.with_name(UNFINISHED + target.name)


@contextmanager
def writing(target: Path, durable: bool = True) -> Iterator[Path]:
    """Yields the path at which to write the folder or file `target`. The path does not exist yet, its parent does. At
    the end everything is synced to disk if it is to be `durable`.

    Raises: WriteFailed in one line when the write fails; then nothing of it is left."""
    with files.writing(unfinished(target)):
        remove(unfinished(target))
        target.parent.mkdir(parents=True, exist_ok=True)
    with filling(target, durable) as path:
        yield path


@contextmanager
def filling(target: Path, durable: bool = True) -> Iterator[Path]:
    """As `writing`, where the path may exist already: several processes write into a folder."""
    path = unfinished(target)
    with files.writing(path):
        yield path
        if durable:
            sync_tree(path)


def publish(target: Path, durable: bool = True) -> None:
    """Rename what was written to `target`. A file replaces an earlier file; a folder must not exist yet.

    Raises: WriteFailed; then what was written is deleted."""
    path = unfinished(target)
    with files.writing(path):
        path.rename(target)
        if durable:
            sync(target.parent)


def delete(folder: Path, manifest: str) -> None:
    """Delete a published folder, its manifest first."""
    remove(folder / manifest)
    remove(folder)


# --- what is there --------------------------------------------------------------------------------------


def entries(store: Path, form: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    """All entries of `store` whose names match `form`, published or unfinished, sorted by name."""
    paths = sorted(store.iterdir()) if store.is_dir() else []
    return [(path, name) for path in paths if (name := form.fullmatch(path.name.removeprefix(UNFINISHED)))]


def is_half_done(folder: Path, manifest: str) -> bool:
    return folder.name.startswith(UNFINISHED) or not (folder / manifest).exists()


# --- whether it is whole --------------------------------------------------------------------------------


def list_files(folder: Path) -> dict[str, FileRecord]:
    """Size and checksum of every file below `folder`, by its relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _record_of(path) for path in paths}


def torn_files(folder: Path, listed: Mapping[str, FileRecord]) -> list[str]:
    """The listed files that do not match their size and checksum; reads all of them."""
    return [name for name, record in listed.items() if not _is_whole(folder / name, record)]


def _is_whole(path: Path, record: FileRecord) -> bool:
    return path.is_file() and path.stat().st_size == record.bytes and _record_of(path) == record


def _record_of(path: Path) -> FileRecord:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return FileRecord(path.stat().st_size, digest.hexdigest())
