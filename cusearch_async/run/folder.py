"""The folder of a run: which run it belongs to, and what may be deleted.

    <folder>/run.json      the marker: the run of this folder, and its creation time; launch and demo lock it
    <folder>/learner.lock  every learner locks it while it runs, so that the folder is not deleted meanwhile
    <folder>/takeover.lock a learner locks it while it takes the run over
    <folder>/gpus.lock     locked by the process that uses the GPUs, where learner and engines share them
    <folder>/...           the children named in CHILDREN; we write nothing else

We delete only what we made: a folder without a marker is not touched, and in a folder with a marker only known children
are deleted.
"""

from __future__ import annotations

import datetime
import fcntl
import logging
import shutil
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from cusearch_async.errors import ConfigError, RunInUse
from cusearch_async.files import final_name, try_lock, write_failed, write_file

log = logging.getLogger(__name__)

MARKER = "run.json"
STARTS = "starts"
LEARNER = "learner.lock"
TAKE_OVER = "takeover.lock"
GPUS = "gpus.lock"
METRICS = "metrics.jsonl"
SCORES = "eval.jsonl"
CURVES = "tensorboard"
SUMMARY = "summary.json"
TRACES = "traces"
PAGE = "page.html"
TRACKED = "tracked"
TRACKED_AS = f"{TRACKED}/id"
MODEL = "model"
"""A warm start's."""
ACTIONS = "actions.jsonl"
CHILDREN = (
    "config.toml",
    "launch.toml",
    LEARNER,
    TAKE_OVER,
    GPUS,
    STARTS,
    "records",
    TRACES,
    "checkpoints",
    "weights",
    "weights-token",
    "downloaded",
    "relayed",
    METRICS,
    SCORES,
    *(f"eval_{when}.{kind}" for when in ("baseline", "before", "after") for kind in ("json", "html")),
    CURVES,
    "logs",
    "redis",
    SUMMARY,
    "plot.png",
    PAGE,
    TRACKED,
    MODEL,
    ACTIONS,
    "page-token",
)
"""Everything that a run writes into its folder, except the marker."""
LEFT_BY_OTHERS = {"downloaded", "relayed", "weights-token", SCORES, CURVES, LEARNER, TAKE_OVER}
"""What workers, relays and evaluators of a learner elsewhere leave in a folder without a marker, and what a learner
leaves that came while it was deleted."""
_POLL_S = 0.05


class Marker(msgspec.Struct, frozen=True):
    run: str
    """run.name of the config that made the folder."""
    id: str
    """A random id; two runs with one name have different ids."""
    created: str
    """ISO 8601, UTC."""
    is_adopted: bool = False
    """Of a folder in which a learner continues a run from an object store, beside that in which it began."""


def mark(folder: Path, run: str, key: str = "run.folder") -> Marker:
    """Make `folder`, which `key` names, the folder of run `run`, if it is not yet. Several processes may do this at
    once.

    Raises: ConfigError when it belongs to another run, holds foreign files, or cannot be written."""
    return refuse_others(folder, run, key) or _make_marker(folder, run, key)


def refuse_others(folder: Path, run: str, key: str = "run.folder") -> Marker | None:
    """Its marker, if it has one. Raises: ConfigError when the folder belongs to another run than `run`."""
    found = read_marker(folder)
    if found is not None and found.run != run:
        raise ConfigError(f"{key} {folder} belongs to run {found.run!r}, not to {run!r}; choose another")
    return found


def now() -> str:
    """In UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _make_marker(folder: Path, run: str, key: str) -> Marker:
    made = Marker(run, uuid.uuid4().hex, now())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = {path.name for path in folder.iterdir() if MARKER not in path.name}
        strange = sorted(there) if there - LEFT_BY_OTHERS else []
        if strange and (found := refuse_others(folder, run, key)) is not None:
            return found  # another process has made it in the meantime, and uses it already
        if strange:
            raise ConfigError(
                f"{key} {folder} holds {', '.join(strange[:3])} and no {MARKER}, so it was not made by a run; "
                "choose an empty folder"
            )
        try:
            write_file(folder / MARKER, msgspec.json.encode(made), replace=False)
        except FileExistsError:
            return refuse_others(folder, run, key) or made
    except OSError as error:
        raise ConfigError(f"{key} {folder} cannot be written: {error.strerror}; choose another") from error
    return made


def adopt(folder: Path, marker: Marker) -> None:
    """Give a marked folder the marker of another, of the same run.name. Raises: WriteFailed."""
    try:  # in place, as launch holds the file, and empty at no moment
        with (folder / MARKER).open("r+b") as file:
            file.write(msgspec.json.encode(msgspec.structs.replace(marker, is_adopted=True)))
            file.truncate()
    except OSError as error:
        raise write_failed(folder / MARKER, error) from error


def read_marker(folder: Path) -> Marker | None:
    """The marker; None without one. Raises: ConfigError when it cannot be read."""
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=Marker)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{folder / MARKER} cannot be read ({error}); is {folder} the folder of a run?") from error


def marker_in(data: bytes, place: str) -> Marker:
    """The marker that another `place` than a folder has. Raises: ConfigError that names it."""
    try:
        return msgspec.json.decode(data, type=Marker)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{place}: {MARKER} cannot be read ({error})") from error


def refuse_no_run(folder: Path) -> None:
    """Raises: ConfigError for a folder that is not a run's."""
    if read_marker(folder) is None:
        raise ConfigError(f"{folder} is not the folder of a run; give one like runs/demo")


def hold(folder: Path) -> AbstractContextManager[None]:
    """Lock a folder with a marker: meanwhile no other process can launch in it, move it or delete it.

    Raises: RunInUse when another process holds it."""
    return locked(
        folder / MARKER,
        fcntl.LOCK_EX,
        f"{folder} is in use: a launch, a demo or a warm start runs in it; stop that first",
    )


@contextmanager
def hold_as_learner(folder: Path) -> Iterator[None]:
    """Lock a folder with a marker against moving and deleting. Several learners may hold this lock: the newest one
    fences the others.

    Raises: RunInUse while it is being moved or deleted, and when that has happened."""
    refusal = f"{folder} is being moved or deleted; start again when that is done"
    with locked(folder / LEARNER, fcntl.LOCK_SH, refusal):
        if read_marker(folder) is None:
            raise RunInUse(refusal)
        yield


def hold_without_learner(folder: Path) -> AbstractContextManager[None]:
    """Lock a folder against learners, also when its Redis cannot be reached.

    Raises: RunInUse while a learner runs in it."""
    return locked(folder / LEARNER, fcntl.LOCK_EX, f"{folder} is in use: a learner runs in it; stop that first")


def hold_for_take_over(folder: Path, wait_s: float) -> AbstractContextManager[None]:
    """Lock out other learners that would take over the run of this folder, also with another Redis.

    Raises: RunInUse when one has held it for `wait_s`."""
    refusal = f"another learner has been taking over the run in {folder} for {wait_s:g} s; stop it, and start again"
    return locked(folder / TAKE_OVER, fcntl.LOCK_EX, refusal, wait_s)


@contextmanager
def locked(path: Path, how: int, refusal: str, wait_s: float = 0.0) -> Iterator[None]:
    """A file lock that ends with this process at the latest. If the file system has no locks, it only logs a
    warning. Raises: RunInUse with `refusal` when another process has held it for `wait_s`."""
    deadline = time.monotonic() + wait_s
    with ExitStack() as held:
        try:
            file = held.enter_context(path.open("r+b" if path.name == MARKER else "a+b"))
            while not try_lock(file, how):
                if time.monotonic() >= deadline:
                    raise RunInUse(refusal)
                time.sleep(_POLL_S)
        except OSError as error:
            log.warning("%s cannot be locked (%s): let no second run use its folder", path, error.strerror)
        yield


def refuse_if_held(folder: Path) -> None:
    """Raises: RunInUse when another process holds the folder."""
    if read_marker(folder) is not None:
        with hold(folder):
            pass


def check_deletable(folder: Path, remedy: str = "nothing in it was deleted") -> None:
    """Raises: ConfigError for a folder without a marker, and for a home, root or repository folder."""
    real, homes = folder.resolve(), [Path.cwd().resolve()]
    with suppress(RuntimeError):  # a user without a home
        homes.append(Path.home().resolve())
    if real in homes or real.parent == real or (real / ".git").exists():
        raise ConfigError(f"{folder} is a home, root, repository or current folder; nothing in it was deleted")
    if read_marker(folder) is None:
        raise ConfigError(f"{folder} holds no {MARKER}, so it is not the folder of a run; {remedy}")


def forget(folder: Path, keep: Collection[str] = ()) -> None:
    """Delete what a run has written into its folder, and the folder if it is then empty. Children in `keep` stay, and
    with them the marker. The marker and what learners lock go last: one that starts meanwhile is refused.

    Raises: ConfigError for a folder without a marker, and for a home, root or repository folder."""
    if not folder.exists():
        return
    check_deletable(folder)
    last = (MARKER, LEARNER, TAKE_OVER)
    for path in sorted(folder.iterdir()):
        if path.name in (*last, *keep) or final_name(path.name) not in (MARKER, *CHILDREN):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    is_kept = any((folder / name).exists() for name in keep)
    for name in last[is_kept:]:
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.unlink() if folder.is_symlink() else folder.rmdir()


def move_aside(folder: Path) -> Path | None:
    """Rename the folder of an earlier run to FOLDER-1, FOLDER-2, …; returns the new path, or None without a folder.

    Raises: ConfigError for a folder that is not empty and has no marker; RunInUse."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    check_deletable(folder, "choose another with --run.folder")
    number = 1
    while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    with hold(folder), hold_without_learner(folder):
        folder.rename(aside)
    return aside
