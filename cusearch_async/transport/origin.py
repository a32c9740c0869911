"""Whose run Redis holds: several may have one name, each has a folder of its own with an id of its own."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from cusearch_async.errors import ConfigError
from cusearch_async.run_folder import read_marker


@dataclass(frozen=True, slots=True)
class Origin:
    run_id: str
    """From the marker of the run's folder: it goes with the folder, wherever that is moved."""
    host: str
    folder: str
    """Where the folder was when a learner last started in it."""


def origin_of(folder: Path) -> Origin | None:
    """None for a folder that no run has made yet. Raises: ConfigError for a marker that cannot be read."""
    marker = read_marker(folder)
    return Origin(marker.id, *_place(folder)) if marker else None


def refuse_another(run: str, known: Origin | None, folder: Path) -> None:
    """Raises: ConfigError when `known`, of which Redis' keys are, is not the run of `folder`."""
    own = origin_of(folder)
    if known is not None and (own is None or own.run_id != known.run_id):
        raise another_run(run, known)


def another_run(run: str, known: Origin) -> ConfigError:
    return ConfigError(
        f"Redis holds another run {run!r}, made in {known.folder} on {known.host}; choose another run.name, or delete "
        f"that run first: `cusearch reset CONFIG --run.folder {known.folder}`"
    )


def may_delete(known: Origin | None, folder: Path) -> bool:
    """Whether who says `folder` may delete the keys: they are its run's, or its run's folder has gone from there.

    A host may have a new name each time it starts, so where there is no folder at all its name is not asked for."""
    own, (host, path) = origin_of(folder), _place(folder)
    if known is None or (own is not None and own.run_id == known.run_id):
        return True
    return path == known.folder and (own is None or host == known.host)


def _place(folder: Path) -> tuple[str, str]:
    return socket.gethostname(), str(folder.resolve())
