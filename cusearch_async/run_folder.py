"""The folder of a run: whose it is, and what of it may be deleted.

    <folder>/run.json      the marker: which run this folder belongs to, and since when; a launch or a demo locks it
    <folder>/learner.lock  every learner locks it for its life, so that nobody deletes the folder under it
    <folder>/...           the children named in CHILDREN, and nothing else of ours

We delete only what we made: a folder without a marker is left alone, and in one with a marker only known children go.
"""

from __future__ import annotations

import datetime
import fcntl
import logging
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from cusearch_async.errors import ConfigError, RunInUse

log = logging.getLogger(__name__)

MARKER = "run.json"
LEARNER = "learner.lock"
METRICS = "metrics.jsonl"
SCORES = "eval.jsonl"
CHILDREN = (
    "config.toml",
    "launch.toml",
    LEARNER,
    "starts",
    "checkpoints",
    "weights",
    METRICS,
    SCORES,
    *(f"eval_{when}.{kind}" for when in ("before", "after") for kind in ("json", "md", "html")),
    "tensorboard",
    "logs",
    "redis",
    "summary.json",
    "plot.png",
)
"""Everything that a run writes into its folder, besides the marker."""


class Marker(msgspec.Struct, frozen=True):
    run: str
    """run.name of the config that made the folder."""
    id: str
    """Random; two runs of one name have different ones."""
    created: str
    """ISO 8601, UTC."""


def mark(folder: Path, run: str) -> Marker:
    """Make `folder` the folder of run `run`, or find that it is; several processes may do so at once.

    Raises: ConfigError when it belongs to another run, holds what no run has made, or cannot be written."""
    found = read_marker(folder) or _make_marker(folder, run)
    _refuse_other(found, folder, run)
    return found


def refuse_others(folder: Path, run: str) -> None:
    """Raises: ConfigError when the folder belongs to another run than `run`."""
    found = read_marker(folder)
    if found is not None:
        _refuse_other(found, folder, run)


def _refuse_other(found: Marker, folder: Path, run: str) -> None:
    if found.run != run:
        raise ConfigError(f"run.folder {folder} belongs to run {found.run!r}, not to {run!r}; choose another")


def _make_marker(folder: Path, run: str) -> Marker:
    unfinished = folder / f".{MARKER}.{uuid.uuid4().hex}"
    made = Marker(run, uuid.uuid4().hex, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        strange = sorted(path.name for path in folder.iterdir() if MARKER not in path.name)
        if strange and (found := read_marker(folder)) is not None:
            return found  # made by another process since we looked, and used already
        if strange:
            raise ConfigError(
                f"run.folder {folder} holds {', '.join(strange[:3])} and no {MARKER}: no run has made it; "
                "choose an empty folder"
            )
        try:
            unfinished.write_bytes(msgspec.json.encode(made))
            os.link(unfinished, folder / MARKER)  # unlike a rename, this replaces nothing
        except FileExistsError:
            return read_marker(folder) or made
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"run.folder {folder} cannot be written: {error.strerror}; choose another") from error
    return made


def read_marker(folder: Path) -> Marker | None:
    """None where there is no marker. Raises: ConfigError for one that cannot be read."""
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=Marker)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{folder / MARKER} cannot be read ({error}); is {folder} a run's folder?") from error


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep a marked folder for this process: no other may launch in it, move it or delete it meanwhile.

    Raises: RunInUse when another process holds it."""
    with _lock(folder / MARKER, fcntl.LOCK_EX, f"{folder} is in use: a launch or a demo runs in it; stop that first"):
        yield


@contextmanager
def hold_as_learner(folder: Path) -> Iterator[None]:
    """Keep a folder from being moved or deleted. Several learners may: the newest fences off the others by its epoch.

    Raises: RunInUse while it is being moved or deleted."""
    with _lock(folder / LEARNER, fcntl.LOCK_SH, f"{folder} is being moved or deleted; start again when that is done"):
        yield


@contextmanager
def hold_without_learner(folder: Path) -> Iterator[None]:
    """Keep learners out of a folder, whether its Redis can be asked for them or not.

    Raises: RunInUse while one runs in it."""
    with _lock(folder / LEARNER, fcntl.LOCK_EX, f"{folder} is in use: a learner runs in it; stop that first"):
        yield


@contextmanager
def _lock(path: Path, how: int, refusal: str) -> Iterator[None]:
    """A lock that ends with this process at the latest. Where the disk knows none, there is a warning and no lock."""
    with ExitStack() as held:
        try:
            file = held.enter_context(path.open("r+b" if path.name == MARKER else "a+b"))
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunInUse(refusal) from error
        except OSError as error:
            log.warning("%s cannot be locked (%s): start no second run in its folder", path, error.strerror)
        yield


def refuse_if_held(folder: Path) -> None:
    """Raises: RunInUse when another process holds the folder."""
    if read_marker(folder) is not None:
        with hold(folder):
            pass


def check_deletable(folder: Path, remedy: str = "nothing in it was deleted") -> None:
    """Raises: ConfigError for a folder without a marker, and for a home, root or repository folder."""
    real = folder.resolve()
    if real in (Path.home().resolve(), Path.cwd().resolve()) or real.parent == real or (real / ".git").exists():
        raise ConfigError(f"{folder} is a home, root, repository or the current folder; nothing in it was deleted")
    if read_marker(folder) is None:
        raise ConfigError(f"{folder} holds no {MARKER}, so it is no run's folder; {remedy}")


def forget(folder: Path, keep: Collection[str] = ()) -> None:
    """Delete what a run has written into its folder, and the folder if nothing else is in it; children in `keep` stay,
    and the marker with them.

    Raises: ConfigError for a folder without a marker, and for a home, root or repository folder."""
    if not folder.exists():
        return
    check_deletable(folder)
    for path in sorted(folder.iterdir()):
        if _is_ours(path.name) and path.name not in keep:
            _delete(path)
    if any((folder / name).exists() for name in keep):
        return
    (folder / MARKER).unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _is_ours(name: str) -> bool:
    """A child, or what a write of one has left unfinished."""
    unfinished = re.fullmatch(r"\.(.+)\.[0-9a-f]{32}", name)
    return unfinished[1] in (*CHILDREN, MARKER) if unfinished else name in CHILDREN


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def move_aside(folder: Path) -> Path | None:
    """Rename the folder of an earlier run to FOLDER-1, FOLDER-2, …; where it is now, or None when there was none.

    Raises: ConfigError for a folder that holds something and has no marker; RunInUse."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    check_deletable(folder, "choose another with --run.folder")
    number = 1
    while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    with hold(folder), hold_without_learner(folder):
        folder.rename(aside)
    return aside
