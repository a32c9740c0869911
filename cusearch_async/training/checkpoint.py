"""Checkpoints on disk: complete or absent.

    <run folder>/checkpoints/step000010/deepspeed/   optimizer and masters
    <run folder>/checkpoints/step000010/model/       the policy as a Hugging Face folder
    <run folder>/checkpoints/step000010/state.json   step and what the method remembers

A checkpoint is written under a temporary name and renamed when it is whole.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from cusearch_async.algorithm.methods import State
from cusearch_async.errors import ConfigError

_STATE = "state.json"


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
        (written / _STATE).write_bytes(msgspec.json.encode(state))
        target = self.folder / f"step{state.step:06d}"
        shutil.rmtree(target, ignore_errors=True)
        written.rename(target)
        complete = self._complete()
        for path, _ in complete[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)
        return complete[-self._keep :][0][1].step

    def newest(self) -> tuple[Path, CheckpointState] | None:
        """The newest complete checkpoint; None when there is none at all.

        Raises: ConfigError when there are some, and none can be read: starting anew would throw them away."""
        complete = self._complete()
        if not complete and any(self.folder.glob("step*")):
            raise ConfigError(f"no checkpoint in {self.folder} can be read by this version; `cusearch reset` the run")
        return complete[-1] if complete else None

    def _complete(self) -> list[tuple[Path, CheckpointState]]:
        """Complete checkpoints, oldest first; what cannot be read does not count."""
        found = []
        for path in sorted(self.folder.glob("step*")):
            try:
                found.append((path, msgspec.json.decode((path / _STATE).read_bytes(), type=CheckpointState)))
            except (OSError, msgspec.MsgspecError):
                continue
        return found
