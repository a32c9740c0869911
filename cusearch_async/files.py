"""Files and folders that are there whole or not at all."""

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
    """Write a file, safe on disk before it has its name; readers see what was there before, or all of `content`.
    `mode` less the process's umask says who may read it, from its first moment on.

    Raises: OSError, and leaves nothing behind."""
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
    """Before hours of work: can the file be written? Leaves nothing behind, folders that are missing are still to be
    made.

    Raises: ConfigError naming `option`, which gave the path."""
    try:
        if path.exists():
            path.open("ab").close()
        else:
            folder = next(parent for parent in path.absolute().parents if parent.exists())
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}; choose another") from error


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a line of JSON, behind a torn line on one of its own. Raises: WriteFailed."""
    try:
        with path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            is_torn = file.read(1) not in (b"\n", b"")
            file.write((b"\n" if is_torn else b"") + json.dumps(row).encode() + b"\n")
    except OSError as error:
        raise _write_failed(path, error) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around everything that writes the file or folder `path`.

    Raises: WriteFailed in one line when the disk refuses; what there was of `path` is then gone, and its space free."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):  # torch.save's writer
            raise
        failed = _write_failed(path, error)
        remove(path)
        raise failed from error


def remove(path: Path) -> None:
    """Delete a file or a folder, whether it is there or not, as far as the disk lets us."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def sync(path: Path) -> None:
    """Have a file safe on disk, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Have a folder, its sub-folders and all files in them safe on disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def _write_failed(path: Path, error: Exception) -> WriteFailed:
    """torch and safetensors do not always pass on why the system refused; a full disk is the likely reason."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    standing = next(parent for parent in path.absolute().parents if parent.exists())
    if not isinstance(error, OSError) and shutil.disk_usage(standing).free < 2**20:
        reason = "No space left on device"
    return WriteFailed(f"cannot write {path}: {reason}")
