"""Checkpoints on disk: complete or absent.

    <run folder>/checkpoints/step000010/deepspeed/   optimizer and masters
    <run folder>/checkpoints/step000010/model/       the policy as a Hugging Face folder
    <run folder>/checkpoints/step000010/state.json   step, what the method remembers, size and checksum of every file

A checkpoint is written under a temporary name, flushed to disk and renamed when it is whole. One whose files do not
match its state.json is torn; it is named in the log and skipped.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import msgspec
import xxhash

from cusearch_async.algorithm.methods import State
from cusearch_async.errors import ConfigError

log = logging.getLogger(__name__)

_STATE = "state.json"
_CHUNK = 2**22


class CheckpointState(msgspec.Struct, kw_only=True):
    """What besides the weights a run continues from."""

    step: int
    """Learner steps done; the next step to run."""
    method: State
    """What the selection method remembers."""
    sizes: dict[int, int]
    """Planned rollouts of the tickets from `step` on (AR3PO)."""
    ranks: int
    zero_stage: int
    """How the optimizer's state is divided; it can only be loaded so."""
    questions: int
    rollouts: int
    """N (or K/G) and G: which tickets make a pool."""


class _File(msgspec.Struct):
    bytes: int
    xxh3: str


class _Saved(msgspec.Struct):
    state: CheckpointState
    files: dict[str, _File]


class Checkpoints:
    def __init__(self, run_folder: Path, keep: int) -> None:
        self.folder = run_folder / "checkpoints"
        self._keep = keep

    def unfinished(self, step: int) -> Path:
        """Where to write the checkpoint of `step` before `finish` makes it count."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f".unfinished-step{step:06d}"

    def finish(self, state: CheckpointState) -> int:
        """Make the written checkpoint count, forget the oldest; returns the oldest kept step."""
        written = self.unfinished(state.step)
        files = {str(path.relative_to(written)): _facts(path) for path in _files(written)}
        (written / _STATE).write_bytes(msgspec.json.encode(_Saved(state, files)))
        _flush(written)
        target = self.folder / f"step{state.step:06d}"
        shutil.rmtree(target, ignore_errors=True)
        written.rename(target)
        complete = self._complete()
        for path, _ in complete[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)
        return complete[-self._keep :][0][1].state.step

    def newest(self) -> tuple[Path, CheckpointState] | None:
        """The newest checkpoint whose files are whole; None when there is none at all.

        Raises: ConfigError when there are some, and none is whole: starting anew would throw them away."""
        for path, saved in reversed(self._complete()):
            torn = [name for name, facts in saved.files.items() if not _is_whole(path / name, facts)]
            if not torn:
                return path, saved.state
            log.warning("checkpoint %s is torn (%s); it is skipped", path, ", ".join(torn[:3]))
        if any(self.folder.glob("step*")):
            raise ConfigError(
                f"no checkpoint in {self.folder} is whole and readable by this version; `cusearch reset` the run"
            )
        return None

    def _complete(self) -> list[tuple[Path, _Saved]]:
        """Checkpoints that have a state, oldest first; what cannot be read does not count."""
        found = []
        for path in sorted(self.folder.glob("step*")):
            try:
                found.append((path, msgspec.json.decode((path / _STATE).read_bytes(), type=_Saved)))
            except (OSError, msgspec.MsgspecError) as error:
                log.warning("checkpoint %s has no state that can be read (%s); it is skipped", path, error)
        return found


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _facts(path: Path) -> _File:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return _File(path.stat().st_size, digest.hexdigest())


def _is_whole(path: Path, facts: _File) -> bool:
    return path.is_file() and path.stat().st_size == facts.bytes and _facts(path) == facts


def _flush(folder: Path) -> None:
    for path in (*_files(folder), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
