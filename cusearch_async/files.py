"""Writes files and folders so that they are complete or absent.

They are written next to their target as `.unfinished-NAME`, or `.unfinished-NAME.HEX` where others may write the same
file meanwhile; synced to disk (unless they need not outlive a crash of the machine); and renamed. The manifest is the
last file that is written in a folder and the first that is deleted. So a folder without its manifest is only partly
written, or partly deleted.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from cusearch_async.errors import ConfigError, CusearchError, WriteFailed, first_line

_UNFINISHED = re.compile(r"\.unfinished-(.+?)(?:\.[0-9a-f]{16})?")
_OF_THE_DISK = ("inline_container", "os error", "write error")
"""In what torch.save, tokenizers and FAISS say, whose errors have no type for a disk."""


def write_file(path: Path, content: bytes, mode: int = 0o666, replace: bool = True) -> None:
    """Write a file atomically: it is synced to disk, then gets its name. Readers see the old content, or all of
    `content`, also when several processes write it. `mode`, reduced by the umask, is set before anything is written.

    Raises: OSError, and leaves no partial file; FileExistsError when it is not to `replace` the one that is there."""
    unfinished = _unfinished(path.with_name(f"{path.name}.{secrets.token_hex(8)}"))
    try:
        unfinished.touch(mode)
        unfinished.write_bytes(content)
        sync(unfinished)
        if replace:
            unfinished.replace(path)
        else:
            path.hardlink_to(unfinished)  # unlike a rename, this never replaces a file
        sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def writing(target: Path, durable: bool = True, begun: bool = False) -> Iterator[Path]:
    """Yields the path at which to write the file or folder `target`; `put_in_place` then gives it its name. The path
    does not exist yet, its parent does; with `begun` it holds what several processes have written there since. At the
    end everything is synced to disk if it is to be `durable`.

    Raises: WriteFailed in one line when the write fails; then nothing of it is left."""
    path = _unfinished(target)
    with whole_or_absent(path):
        if not begun:
            remove(path)
            path.parent.mkdir(parents=True, exist_ok=True)
        yield path
        if durable:
            for written in (*path.rglob("*"), path):
                sync(written)


def put_in_place(target: Path, durable: bool = True) -> None:
    """Rename what was written to `target`. A file replaces an earlier file; a folder must not exist yet.

    Raises: WriteFailed; then what was written is deleted."""
    path = _unfinished(target)
    with whole_or_absent(path):
        path.rename(target)
        if durable:
            sync(target.parent)


@contextmanager
def whole_or_absent(path: Path) -> Iterator[None]:
    """Wraps all code that writes the file or folder `path`.

    Raises: WriteFailed in one line when the write fails; then `path` is deleted, and its space is free."""
    try:
        yield
    except Exception as error:  # WriteFailed is of another process, which writes into the folder too
        failed = write_failed(path, error) if _is_of_the_disk(error) else None
        remove(path)
        if failed is None:
            raise
        raise failed from error


def _is_of_the_disk(error: Exception) -> bool:
    if isinstance(error, CusearchError):  # it has its name
        return False
    return isinstance(error, OSError | SafetensorError) or any(part in str(error) for part in _OF_THE_DISK)


def write_failed(path: Path, error: Exception) -> WriteFailed:
    """The error with its reason. Libraries do not always report it; then a full disk is checked."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    standing = next(parent for parent in path.absolute().parents if parent.exists())
    if not getattr(error, "strerror", None) and shutil.disk_usage(standing).free < 2**20:
        reason = "No space left on device"
    return WriteFailed(f"cannot write {path}: {reason}")


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a line of JSON; after an incomplete last line it starts a new line. Raises: WriteFailed."""
    try:
        with path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            is_incomplete = file.read(1) not in (b"\n", b"")
            file.write((b"\n" if is_incomplete else b"") + json.dumps(row).encode() + b"\n")
    except OSError as error:
        raise write_failed(path, error) from error


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Delete a file or a folder if it exists. Errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def remove_sealed(folder: Path, manifest: str) -> None:
    """Delete a folder, its manifest first."""
    remove(folder / manifest)
    remove(folder)


def try_lock(file: IO[Any], how: int) -> bool:
    """Lock an open file (fcntl.LOCK_EX or LOCK_SH) until it is closed here and wherever it is inherited; False when
    others hold it. Raises: OSError where the file system has no locks."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def refuse_unwritable(path: Path, option: str, ending: str = "") -> None:
    """Check before long work that a file can be written, with this `ending` if one is given. Writes nothing, and does
    not make missing folders.

    Raises: ConfigError that names `option`, the option with the path."""
    if ending and path.suffix != ending:
        raise ConfigError(f"{option} must be a {ending} file, got {path}")
    with _named(path, option):
        if path.exists():
            path.open("ab").close()
        else:
            folder = next(parent for parent in path.absolute().parents if parent.exists())
            tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def writing_output(path: Path, option: str) -> Iterator[None]:
    """Wraps code that writes a file where a user wants it, and makes its folder. Nothing is deleted: the path may be a
    device.

    Raises: ConfigError that names `option`, the option with the path."""
    with _named(path, option):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield


@contextmanager
def _named(path: Path, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ConfigError(f"{option} {path} cannot be written: {reason}; choose another") from error


def final_name(name: str) -> str:
    """The name that something gets when it is finished; its own when it is."""
    unfinished = _UNFINISHED.fullmatch(name)
    return unfinished[1] if unfinished else name


def entries(store: Path, form: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    """All entries of `store` whose names match `form`, finished or not, sorted by name."""
    paths = sorted(store.iterdir()) if store.is_dir() else []
    return [(path, name) for path in paths if (name := form.fullmatch(final_name(path.name)))]


def is_half_done(folder: Path, manifest: str) -> bool:
    return folder.name != final_name(folder.name) or not (folder / manifest).exists()


def _unfinished(target: Path) -> Path:
    return target.with_name(f".unfinished-{target.name}")
