"""learner.checkpoint_objects: the run's checkpoints in an object store, too, for a learner on another machine.

    s3://bucket/prefix/checkpoints/step000010-e3/state.json     last, and removed first
    s3://bucket/prefix/run.json, metrics.jsonl, eval.jsonl, starts/0003.json, …     as in the run's folder

Names hold the learner's epoch, so a learner that has been replaced overwrites no checkpoint of a later one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path, PurePosixPath

from cusearch_async.config import Config
from cusearch_async.errors import ConfigError, ObjectsUnavailable, WriteFailed
from cusearch_async.files import put_in_place, remove_sealed, write_failed, write_file, writing
from cusearch_async.learner.interface import STATE_FILE, is_sealed
from cusearch_async.lifecycle.progress import log_waiting
from cusearch_async.objects import Objects
from cusearch_async.run import folder as run_folder
from cusearch_async.run.folder import MARKER, METRICS, SCORES, STARTS, TRACKED, TRACKED_AS, Marker
from cusearch_async.training.checkpoint import NAME, Checkpoints, checkpoints_of, damage_of

log = logging.getLogger(__name__)

KEY = "learner.checkpoint_objects"
CHECKPOINTS = "checkpoints"
RESTORE_S = 3600.0
"""For which another learner may be fetching into the same folder."""


class CheckpointObjects:
    """What a learner elsewhere needs of a run's folder."""

    def __init__(self, objects: Objects, folder: Path, run: str) -> None:
        self._objects = objects
        self._folder = folder
        self._run = run
        self._sent: dict[str, int] = {}
        """File of the history -> when it was changed, as it is in the store."""

    @classmethod
    def of(cls, config: Config) -> CheckpointObjects | None:
        """None without one. Raises: ConfigError; MissingExtra."""
        url = config.learner.checkpoint_objects
        return cls(Objects(url, KEY), config.folder, config.run.name) if url else None

    # --- to continue here -----------------------------------------------------------------------------

    async def restore(self) -> None:
        """Bring what the folder lacks: the marker, starts, later checkpoints, and the curves before them.

        Raises: ConfigError where the store has another run than the folder; ObjectsUnavailable; WriteFailed."""
        run_folder.mark(self._folder, self._run)
        with run_folder.hold_for_take_over(self._folder, RESTORE_S):
            paths = await asyncio.to_thread(self._objects.paths)
            if MARKER in paths:
                await self._adopt_marker()
                await self._restore_history(paths)
                await self._restore_checkpoints(paths)

    async def _adopt_marker(self) -> None:
        """A folder that no learner has used becomes the run's."""
        theirs = await asyncio.to_thread(self._marker)
        own = run_folder.read_marker(self._folder)
        is_new = not (self._folder / STARTS).exists()
        is_ours = own is not None and own.id == theirs.id
        if theirs.run != self._run or not (is_ours or is_new):
            raise self._refusal(theirs)
        if not is_ours:
            run_folder.adopt(self._folder, theirs)
            log.info("%s continues the run of %s", self._folder, self._objects.url)

    def _marker(self) -> Marker:
        return run_folder.marker_in(self._objects.read(MARKER), f"{KEY} {self._objects.url}")

    def _refusal(self, theirs: Marker) -> ConfigError:
        return ConfigError(
            f"{KEY} {self._objects.url} has the checkpoints of another run (run.name {theirs.run!r}, made "
            f"{theirs.created}) than {self._folder}; choose another prefix, or delete what is there"
        )

    async def _restore_history(self, paths: Sequence[str]) -> None:
        missing = {path for path in (*_starts_in(paths), *_tracked_in(paths)) if not (self._folder / path).exists()}
        counting = {path for path in missing & {*_starts_in(paths)} if path.endswith(".json")}
        (self._folder / STARTS).mkdir(exist_ok=True)
        (self._folder / TRACKED).mkdir(exist_ok=True)
        for path in sorted(missing - counting | {METRICS, SCORES} & set(paths)):
            await self._restore_file(path)
        for path in sorted(counting):  # a start counts when all of it and its curves are here
            await self._restore_file(path)

    async def _restore_checkpoints(self, paths: Sequence[str]) -> None:
        """What is here already is not fetched, the newest only if it is intact."""
        whole = {name: files for name, files in _checkpoints_in(paths).items() if STATE_FILE in files}
        newest = max(whole, key=_order_of, default="")
        for name, files in whole.items():
            target = self._folder / CHECKPOINTS / name
            if is_sealed(target) and (name != newest or not await asyncio.to_thread(damage_of, target)):
                continue
            try:
                with log_waiting(log, f"waiting for checkpoint {name} from {self._objects.url}"):
                    await self._restore_checkpoint(target, files)
            except ObjectsUnavailable:
                if await asyncio.to_thread(self.has, name):
                    raise
                log.info("checkpoint %s was removed meanwhile by a learner that still runs", name)

    async def _restore_checkpoint(self, target: Path, files: Sequence[str]) -> None:
        with writing(target) as unfinished:
            for file in files:
                into = unfinished / file
                into.parent.mkdir(parents=True, exist_ok=True)
                await self._fetch(f"{CHECKPOINTS}/{target.name}/{file}", into)
        remove_sealed(target, STATE_FILE)
        put_in_place(target)

    async def _restore_file(self, path: str) -> None:
        """Unless the file here begins with the one there: then this machine has written on."""
        target, theirs = self._folder / path, await asyncio.to_thread(self._objects.read, path)
        try:
            if not (target.exists() and target.read_bytes().startswith(theirs)):
                write_file(target, theirs)
        except OSError as error:
            raise write_failed(target, error) from error

    async def _fetch(self, path: str, target: Path) -> None:
        async with aclosing(self._objects.pieces(path)) as pieces:
            with target.open("wb") as into:
                async for piece in pieces:
                    await asyncio.to_thread(into.write, piece)

    # --- to be continued elsewhere --------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether all of a checkpoint is there. Raises: ObjectsUnavailable."""
        return STATE_FILE in _checkpoints_in(self._objects.paths()).get(name, ())

    def keep(self, checkpoint: Path) -> None:
        """Put a checkpoint there, and the curves up to it, without which it must not count. Raises: WriteFailed."""
        state = checkpoint / STATE_FILE
        for file in sorted(path for path in checkpoint.rglob("*") if path.is_file() and path != state):
            self._objects.put(f"{CHECKPOINTS}/{checkpoint.name}/{file.relative_to(checkpoint)}", file)
        self._keep_changed(METRICS, SCORES)
        self._objects.put(f"{CHECKPOINTS}/{checkpoint.name}/{STATE_FILE}", state)
        self._keep_changed(*self._small())

    def keep_history(self) -> None:
        """Put there what has changed of it. Raises: WriteFailed."""
        self._keep_changed(METRICS, SCORES, *self._small())

    def _small(self) -> list[str]:
        """The history without its curves, which may take hundreds of megabytes, and change at each step."""
        starts = (f"{STARTS}/{file.name}" for file in (self._folder / STARTS).glob("*.*"))
        tracked = (f"{TRACKED}/{file.name}" for file in (self._folder / TRACKED).glob("*.json"))
        return [MARKER, TRACKED_AS, *tracked, *starts]

    def keep_stop(self, epoch: int) -> None:
        """How the learner of `epoch` has ended, where its start is. The curves may be a later learner's by now. Raises:
        WriteFailed."""
        if f"{STARTS}/{epoch:04d}.json" in self._sent:
            self._keep_changed(f"{STARTS}/{epoch:04d}.stop")

    def _keep_changed(self, *names: str) -> None:
        for name in names:
            file = self._folder / name
            changed = file.stat().st_mtime_ns if file.exists() else None
            if changed is not None and self._sent.get(name) != changed:
                self._objects.put(name, file)
                self._sent[name] = changed

    def files(self) -> list[str]:
        """All that a run has there. Raises: ObjectsUnavailable; ConfigError where it is another run's."""
        paths = self._objects.paths()
        if MARKER in paths:
            theirs, own = self._marker(), run_folder.read_marker(self._folder)
            is_ours = theirs.run == self._run and (own is None or own.id == theirs.id)
            if not is_ours:
                raise self._refusal(theirs)
        checkpoints = [
            f"{CHECKPOINTS}/{name}/{file}" for name, files in _checkpoints_in(paths).items() for file in files
        ]
        return [*sorted({METRICS, SCORES, MARKER} & set(paths) | _tracked_in(paths)), *_starts_in(paths), *checkpoints]

    def forget(self) -> None:
        """Remove all of it, the marker last. Raises: ObjectsUnavailable; ConfigError; WriteFailed."""
        for path in sorted(self.files(), key=lambda path: path == MARKER):
            self._objects.remove(path)

    def remove_old(self, epoch: int) -> None:
        """Those of learners up to `epoch` that the folder has no more, their states first. Raises: ObjectsUnavailable;
        WriteFailed."""
        for name, files in _checkpoints_in(self._objects.paths()).items():
            if _order_of(name)[1] <= epoch and not (self._folder / CHECKPOINTS / name).exists():
                self._objects.remove_sealed(f"{CHECKPOINTS}/{name}", files, STATE_FILE)


class ObjectCheckpoints(Checkpoints):
    """Checkpoints in a folder, and in an object store."""

    def __init__(self, config: Config, objects: CheckpointObjects) -> None:
        super().__init__(config.folder, config.learner.keep_checkpoints)
        self._objects = objects

    def tell_start(self) -> None:
        resumed = self.by_step().get(self._starts[-1][1])
        if resumed is not None and not self._objects.has(resumed.path.name):
            self._objects.keep(resumed.path)  # first: a store with starts alone would begin the run anew
        self._objects.keep_history()  # from now on later checkpoints of earlier learners do not count

    def tell_stop(self) -> None:
        try:
            self._objects.keep_stop(self.epoch)
        except WriteFailed as error:
            log.warning("how this learner ended is not in the object store: %s", error)

    def finish(self, step: int) -> None:
        super().finish(step)
        self._objects.keep(self._path(step))

    def remove(self, superfluous: Sequence[Path]) -> None:
        super().remove(superfluous)
        try:
            self._objects.remove_old(self.epoch)
        except (ObjectsUnavailable, WriteFailed) as error:  # the new one is there
            log.warning("old checkpoints stay in the object store until the next one: %s", error)


def _checkpoints_in(paths: Sequence[str]) -> dict[str, list[str]]:
    """Name -> the files of each checkpoint, whole or not."""
    found = defaultdict(list)
    for path in paths:
        folder, *parts = PurePosixPath(path).parts
        if folder == CHECKPOINTS and len(parts) > 1 and NAME.fullmatch(parts[0]) and ".." not in parts:
            found[parts[0]].append("/".join(parts[1:]))
    return found


def _tracked_in(paths: Sequence[str]) -> set[str]:
    """How trackers name the run, and how far each is."""
    return {path for path in paths if PurePosixPath(path).parent == PurePosixPath(TRACKED)}


def _starts_in(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if PurePosixPath(path).parent == PurePosixPath(STARTS)]


def _order_of(name: str) -> tuple[int, int]:
    """Step and epoch."""
    match = NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1]), int(match[2])


def learner_checkpoints(config: Config) -> Checkpoints:
    """The checkpoints of a learner. Raises: ConfigError; MissingExtra."""
    objects = CheckpointObjects.of(config)
    return ObjectCheckpoints(config, objects) if objects is not None else checkpoints_of(config)
