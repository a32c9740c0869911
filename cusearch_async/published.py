"""Folders and files that are published: there whole or not at all, and known by a manifest.

What is published is written under another name beside its place, flushed to disk, and renamed. A manifest is the last
file that is written in a folder and the first that is deleted, so a folder without its manifest is half done: half
written, or half deleted.
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
    """Of a file when it was written."""

    bytes: int
    xxh3: str


# --- to write -------------------------------------------------------------------------------------------


def unfinished(target: Path) -> Path:
    """What `target` is called until it is published."""
    return target.with_name(UNFINISHED + target.name)


@contextmanager
def writing(target: Path) -> Iterator[Path]:
    """Where to write a folder or file that is to be published as `target`. Nothing is there yet, and its folder is; at
    the end all of it is safe on disk.

    Raises: WriteFailed in one line when the disk refuses; nothing of it is left then."""
    path = unfinished(target)
    with files.writing(path):
        remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
        sync_tree(path)


def publish(target: Path) -> None:
    """Give what was written its name; a file replaces the one before it, a folder nothing.

    Raises: WriteFailed; what was written is gone then."""
    path = unfinished(target)
    with files.writing(path):
        path.rename(target)
        sync(target.parent)


def delete(folder: Path, manifest: str) -> None:
    """Delete a published folder; it does not count any more from the first moment on."""
    remove(folder / manifest)
    remove(folder)


# --- what is there --------------------------------------------------------------------------------------


def entries(store: Path, form: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    """What is in `store` under a name of this form, published or unfinished; by name."""
    paths = sorted(store.iterdir()) if store.is_dir() else []
    return [(path, name) for path in paths if (name := form.fullmatch(path.name.removeprefix(UNFINISHED)))]


def is_half_done(folder: Path, manifest: str) -> bool:
    return folder.name.startswith(UNFINISHED) or not (folder / manifest).exists()


# --- whether it is whole --------------------------------------------------------------------------------


def list_files(folder: Path) -> dict[str, FileRecord]:
    """Size and checksum of every file below `folder`, by its path from there."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _record_of(path) for path in paths}


def torn_files(folder: Path, listed: Mapping[str, FileRecord]) -> list[str]:
    """The listed files that are not as they were written; reads all of them."""
    return [name for name, record in listed.items() if not _is_whole(folder / name, record)]


def _is_whole(path: Path, record: FileRecord) -> bool:
    return path.is_file() and path.stat().st_size == record.bytes and _record_of(path) == record


def _record_of(path: Path) -> FileRecord:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return FileRecord(path.stat().st_size, digest.hexdigest())
