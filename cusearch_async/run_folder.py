"""The folder of a run: whose it is, and what of it may be deleted.

    <folder>/run.json      the marker: which run this folder belongs to, and since when
    <folder>/...           the children named in CHILDREN, and nothing else of ours

We delete only what we made: a folder without a marker is left alone, and in one with a marker only known children go.
"""

from __future__ import annotations

import datetime
import shutil
import uuid
from pathlib import Path

import msgspec

from cusearch_async.errors import ConfigError
from cusearch_async.files import write_whole

MARKER = "run.json"
CHILDREN = (
    "config.toml",
    "starts",
    "checkpoints",
    "weights",
    "metrics.jsonl",
    "eval.jsonl",
    "eval_before.json",
    "eval_after.json",
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
    """Make `folder` the folder of run `run`, or find that it is.

    Raises: ConfigError when it belongs to another run, holds what is not ours, or cannot be written."""
    found = read_marker(folder)
    if found is not None:
        if found.run != run:
            raise ConfigError(f"run.folder {folder} belongs to run {found.run!r}, not to {run!r}; choose another")
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        strange = sorted(path.name for path in folder.iterdir() if path.name not in CHILDREN)
        if strange or (folder / ".git").exists():
            raise ConfigError(
                f"run.folder {folder} holds {', '.join(strange[:3])}, which no run has made; choose an empty folder"
            )
        made = Marker(run, uuid.uuid4().hex, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
        write_whole(folder / MARKER, msgspec.json.encode(made))
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


def forget(folder: Path) -> None:
    """Delete what a run has written into its folder, and the folder if nothing else is in it.

    Raises: ConfigError for a folder without a marker, and for a home, root or repository folder."""
    if not folder.exists():
        return
    refuse_protected(folder)
    if read_marker(folder) is None:
        raise ConfigError(f"{folder} holds no {MARKER}, so it is no run's folder; nothing in it was deleted")
    for name in CHILDREN:
        child = folder / name
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink(missing_ok=True)
    (folder / MARKER).unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def refuse_protected(folder: Path) -> None:
    """Raises: ConfigError for a folder that holds more than a run whatever is in it."""
    real = folder.resolve()
    if real in (Path.home().resolve(), Path.cwd().resolve()) or real.parent == real or (real / ".git").exists():
        raise ConfigError(f"{folder} is a home, root, repository or the current folder; nothing in it was deleted")


def move_aside(folder: Path) -> Path | None:
    """Rename the folder of an earlier run to FOLDER-1, FOLDER-2, …; where it is now, or None when there was none.

    Raises: ConfigError for a folder that holds something and has no marker."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    refuse_protected(folder)
    if read_marker(folder) is None:
        raise ConfigError(f"{folder} holds no {MARKER}, so it is no run's folder; choose another with --run.folder")
    number = 1
    while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside
