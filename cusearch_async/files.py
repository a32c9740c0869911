"""Writes files and folders so that they are complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from cusearch_async.errors import ConfigError, WriteFailed, first_line


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file atomically: it is synced to disk, then renamed. Readers see the old content, or all of `content`.
    `mode`, reduced by the umask, is set before anything is written.

    Raises: OSError, and leaves no partial file."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        unfinished.touch(mode)
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def refuse_unwritable(path: Path, option: str) -> None:
    """Check before long work that a file can be written. Writes nothing, and does not make missing folders.

    Raises: ConfigError that names `option`, the option with the path."""
    with writing_output(path, option):
        if path.exists():
            path.open("ab").close()
        else:
            folder = next(parent for parent in path.absolute().parents if parent.exists())
            tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def writing_output(path: Path, option: str) -> Iterator[None]:
    """Wraps code that writes a file where a user wants it. Nothing is deleted: the path may be a device.

    Raises: ConfigError that names `option`, the option with the path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ConfigError(f"{option} {path} cannot be written: {reason}; choose another") from error


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a line of JSON; after a torn last line it starts a new line. Raises: WriteFailed."""
    try:
        with path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            is_torn = file.read(1) not in (b"\n", b"")
            file.write((b"\n" if is_torn else b"") + json.dumps(row).encode() + b"\n")
    except OSError as error:
        raise write_failed(path, error) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Wraps all code that writes the file or folder `path`.

    Raises: WriteFailed in one line when the write fails; then `path` is deleted, and its space is free."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):  # torch.save's writer
            raise
        failed = write_failed(path, error)
        remove(path)
        raise failed from error


def remove(path: Path) -> None:
    """Delete a file or a folder if it exists. Errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Sync a folder, its sub-folders and all their files to disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def write_failed(path: Path, error: Exception) -> WriteFailed:
    """The error with its reason. torch and safetensors do not always report the reason; then a full disk is checked."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    standing = next(parent for parent in path.absolute().parents if parent.exists())
    if not isinstance(error, OSError) and shutil.disk_usage(standing).free < 2**20:
        reason = "No space left on device"
    return WriteFailed(f"cannot write {path}: {reason}")
