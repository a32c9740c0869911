"""The folder that a run in Redis belongs to: several runs may have one name, but each has its own folder and id."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from cusearch_async.errors import ConfigError
from cusearch_async.run.folder import read_marker


@dataclass(frozen=True, slots=True)
class Origin:
    run_id: str
    """From the marker in the run's folder, so it stays the same when the folder is moved."""
    host: str
    folder: str
    """Where the folder was when a learner last started in it."""


def origin_of(folder: Path) -> Origin | None:
    """The origin of a folder; None without a marker. Raises: ConfigError for a marker that cannot be read."""
    marker = read_marker(folder)
    return Origin(marker.id, *_place(folder)) if marker else None


def refuse_another(run: str, known: Origin | None, folder: Path) -> None:
    """Raises: ConfigError when `known`, the origin of the keys in Redis, is not the run of `folder`."""
    own = origin_of(folder)
    if known is not None and (own is None or own.run_id != known.run_id):
        raise another_run(run, known)


def another_run(run: str, known: Origin) -> ConfigError:
    return ConfigError(
        f"Redis holds another run {run!r}, made in {known.folder} on {known.host}; choose another run.name, or delete "
        f"that run first: `cusearch reset CONFIG --run.folder {known.folder}`"
    )


def may_delete(known: Origin | None, folder: Path) -> bool:
    """Whether a command with `folder` may delete the keys: they belong to its run, or their folder was deleted there.

    If there is no folder at all, the host name is not compared, because some hosts get a new name at each start."""
    own, (host, path) = origin_of(folder), _place(folder)
    if known is None or (own is not None and own.run_id == known.run_id):
        return True
    return path == known.folder and (own is None or host == known.host)


def _place(folder: Path) -> tuple[str, str]:
    return socket.gethostname(), str(folder.resolve())
