"""Checkpoints on disk: complete or absent, and never touched by a learner that has been replaced.

    <run folder>/checkpoints/step000010-e3/deepspeed/   optimizer and masters
    <run folder>/checkpoints/step000010-e3/model/       the policy as a Hugging Face folder
    <run folder>/checkpoints/step000010-e3/adapter/     the adapter alone, as peft writes it, if one is trained
    <run folder>/checkpoints/step000010-e3/state.json   step, the method's memory, size and checksum of every file

The name holds the learner's fencing epoch. A checkpoint is written as `.unfinished-step000010-e3`, synced to disk,
renamed, and read back. A damaged one, whose files do not match its state.json, is skipped. When a learner goes back to
step 8, later checkpoints of earlier learners do not count any more: they belong to another course of the run.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from cusearch_async.config import Config
from cusearch_async.errors import ConfigError, WriteFailed
from cusearch_async.files import entries, is_half_done, put_in_place, remove, remove_sealed, sync, write_failed, writing
from cusearch_async.learner.interface import STATE_FILE
from cusearch_async.metrics.files import DigestedScores
from cusearch_async.run.folder import METRICS, SCORES
from cusearch_async.run.history import WEIGHTS, counts, epochs_and_steps, loads_weights_again
from cusearch_async.run.identity import Difference, differences, fixed_terms, not_this_run
from cusearch_async.run.provenance import weights_of
from cusearch_async.training.selector import initial_method_state
from cusearch_async.transport.interface import MethodState, RunState

log = logging.getLogger(__name__)

NAME = re.compile(r"step(\d+)-e(\d+)")


class FileRecord(msgspec.Struct):
    """Size and checksum of a file when it was written."""

    bytes: int
    xxh3: str


class CheckpointState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The part of a checkpoint besides the weights."""

    step: int
    """Learner steps done; the next step to run."""
    method: MethodState
    """The selection method's memory; its group sizes are those of the tickets from `step` on."""
    ranks: int
    zero_stage: int
    """How the optimizer's state is divided."""
    fixed: dict[str, str]
    """`run.identity.fixed_terms`."""
    weights: str = ""
    """`run.provenance.weights_of` model.path; empty where that was not known."""


class _Saved(msgspec.Struct):
    """state.json: `xxh3` is of the other two as they stand there."""

    state: msgspec.Raw
    """CheckpointState"""
    files: msgspec.Raw
    """dict[str, FileRecord]"""
    xxh3: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that has a state; `damaged` checks its files."""

    path: Path
    epoch: int
    state: CheckpointState
    files: dict[str, FileRecord]

    def damaged(self) -> list[str]:
        """The files that are not as they were written; reads all of them."""
        return [name for name, record in self.files.items() if not _is_intact(self.path / name, record)]


class Checkpoints:
    """The checkpoints in a run's folder. The starts so far decide which of them count."""

    def __init__(self, run_folder: Path, keep: int) -> None:
        self.folder = run_folder / "checkpoints"
        self._keep = keep
        self._starts = epochs_and_steps(run_folder)
        self._scores = DigestedScores(run_folder / SCORES)

    # --- to resume ------------------------------------------------------------------------------------

    def newest(self, known: RunState) -> Checkpoint | None:
        """The newest intact checkpoint from which Redis can continue: its step is neither beyond the commits in Redis
        nor before the pools there; if there is none, the newest intact one. None when there are none of this course.

        Raises: ConfigError when there are some, and all are damaged: starting at step 0 would throw them away."""
        readable = self._readable()
        found = [checkpoint for checkpoint in readable if self._is_of_this_course(checkpoint)]
        fitting = [c for c in found if not known.exists or known.checkpoint <= c.state.step <= known.step]
        for checkpoint in (*reversed(fitting), *(c for c in reversed(found) if c not in fitting)):
            damaged = checkpoint.damaged()
            if not damaged:
                return checkpoint
            log.warning("checkpoint %s is damaged (%s); it is skipped", checkpoint.path, ", ".join(damaged[:3]))
        left = {checkpoint.path for checkpoint in readable if checkpoint not in found}
        if any(path not in left for path in self.folder.glob("step*")):
            raise ConfigError(
                f"all checkpoints in {self.folder} are damaged, or cannot be read by this version; continue with the "
                "version that wrote them, restore one, or `cusearch reset` the run"
            )
        return None

    def latest(self) -> Checkpoint | None:
        """The newest of this course, by its state alone: its files are not checked."""
        return max(self._of_this_course(), key=_order, default=None)

    def by_step(self) -> dict[int, Checkpoint]:
        """Those of this course, by their states alone, oldest first."""
        return {checkpoint.state.step: checkpoint for checkpoint in self._of_this_course()}

    def highest_epoch(self) -> int:
        """Of all learners that have started, or have left something here."""
        left = (int(name[2]) for _, name in entries(self.folder, NAME))
        return max((*left, *(epoch for epoch, _ in self._starts)), default=0)

    # --- to write -------------------------------------------------------------------------------------

    def begin(self, epoch: int, step: int) -> None:
        """Write as the learner of `epoch`, which continues from `step`; clear what earlier ones left half done."""
        self._starts.append((epoch, step))
        for path, name in entries(self.folder, NAME):
            if is_half_done(path, STATE_FILE) and int(name[2]) < epoch:
                log.info("%s was left unfinished by an earlier learner; it is deleted", path)
                remove(path)

    def tell_start(self) -> None:
        """Let learners elsewhere know that this one has begun, once its start is in the folder. Raises:
        ObjectsUnavailable or WriteFailed, of an object store."""

    def tell_stop(self) -> None:
        """Let them know how it has ended, if that can be done."""

    @property
    def epoch(self) -> int:
        return self._starts[-1][0]

    def begin_write(self, step: int) -> Path:
        """A new folder in which to write the checkpoint of `step`. Raises: WriteFailed."""
        with writing(self._path(step), durable=False) as folder:
            folder.mkdir()
        return folder

    @contextmanager
    def write(self, state: CheckpointState) -> Iterator[None]:
        """Fill the folder of `begin_write` inside. At the end it is sealed with checksums and safe on disk; `finish`
        then makes it count. Raises: WriteFailed, and leaves nothing of it."""
        with writing(self._path(state.step), begun=True) as folder:
            yield
            state_json, files_json = (msgspec.Raw(msgspec.json.encode(part)) for part in (state, _list_files(folder)))
            saved = _Saved(state_json, files_json, _checksum(state_json, files_json))
            (folder / STATE_FILE).write_bytes(msgspec.json.encode(saved))

    def finish(self, step: int) -> None:
        """Make the written checkpoint count. Raises: WriteFailed when it cannot be read back as it was written."""
        target, curves = self._path(step), self.folder.parent / METRICS
        try:
            if curves.exists():
                sync(curves)  # of the steps before this one, which are not made again after a crash
        except OSError as error:
            raise write_failed(curves, error) from error
        put_in_place(target)
        if damaged := damage_of(target):
            remove(target)
            raise WriteFailed(f"cannot write {target}: {', '.join(damaged[:3])} cannot be read back")

    def oldest_kept(self) -> int:
        """Pools before this step may be forgotten: there are `keep` checkpoints of it and later steps; else 0."""
        kept = self._kept()
        return kept[0].state.step if len(kept) == self._keep else 0

    def best(self) -> Checkpoint | None:
        """Of those whose version was scored, on the questions of the newest score: that with the highest exact match,
        then the highest reward, the first of several; None where there is none."""
        try:
            rows = self._scores.read(self._starts)
        except OSError as error:
            log.warning("%s cannot be read, so no checkpoint is known to be the best: %s", SCORES, error.strerror)
            rows = []
        rows = [row for row in rows if isinstance(row.get("all"), dict) and "em" in row["all"]]
        scored = {
            row["step"]: (row["all"]["em"], row["all"].get("reward", 0.0))  # without gold answers the first is 0
            for row in rows
            if row["each"] == rows[-1]["each"]
        }
        found = (checkpoint for step, checkpoint in self.by_step().items() if step in scored)
        return max(found, key=lambda checkpoint: scored[checkpoint.state.step], default=None)

    def superfluous(self) -> list[Path]:
        """Those older than the checkpoints to keep and not the best, or of another course; never a later learner's."""
        kept = [checkpoint.path for checkpoint in (*self._kept(), self.best()) if checkpoint is not None]
        return [c.path for c in self._readable() if c.epoch <= self.epoch and c.path not in kept]

    def remove(self, superfluous: Sequence[Path]) -> None:
        """Delete them; their states first."""
        for path in superfluous:
            remove_sealed(path, STATE_FILE)

    # ---------------------------------------------------------------------------------------------------

    def _path(self, step: int) -> Path:
        return self.folder / f"step{step:06d}-e{self.epoch}"

    def _kept(self) -> list[Checkpoint]:
        """The newest `keep`, one a step, oldest first."""
        return list(self.by_step().values())[-self._keep :]

    def _of_this_course(self) -> list[Checkpoint]:
        """Those from which the run may continue, oldest first: no later learner has gone back behind them."""
        return [checkpoint for checkpoint in self._readable() if self._is_of_this_course(checkpoint)]

    def _is_of_this_course(self, checkpoint: Checkpoint) -> bool:
        return counts(checkpoint.state.step, checkpoint.epoch, self._starts)

    def _readable(self) -> list[Checkpoint]:
        """Checkpoints that have a state, in order of step and epoch."""
        found = []
        for path in self.folder.glob("step*"):
            try:
                found.append(_read(path))
            except (OSError, ValueError) as error:
                log.warning("checkpoint %s has no state that can be read (%s); it is skipped", path, error)
        return sorted(found, key=_order)


def damage_of(path: Path) -> list[str]:
    """What of a checkpoint is not as it was written, in words; reads all of it."""
    try:
        return _read(path).damaged()
    except (OSError, ValueError) as error:
        return [str(error)]


def _order(checkpoint: Checkpoint) -> tuple[int, int]:
    return checkpoint.state.step, checkpoint.epoch


def _read(path: Path) -> Checkpoint:
    """Raises: OSError, or ValueError with the fault of its state."""
    name = NAME.fullmatch(path.name)
    if name is None:
        raise ValueError("its name is not stepSTEP-eEPOCH")
    saved = msgspec.json.decode((path / STATE_FILE).read_bytes(), type=_Saved)
    state = msgspec.json.decode(saved.state, type=CheckpointState)
    if saved.xxh3 != _checksum(saved.state, saved.files) or state.step != int(name[1]):
        raise ValueError(f"{STATE_FILE} was changed after it was written")
    return Checkpoint(path, int(name[2]), state, msgspec.json.decode(saved.files, type=dict[str, FileRecord]))


def _checksum(*parts: msgspec.Raw) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(bytes(part) for part in parts))


def _list_files(folder: Path) -> dict[str, FileRecord]:
    """Of every file below `folder`, by its relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _record_of(path) for path in paths}


def _is_intact(path: Path, record: FileRecord) -> bool:
    return path.is_file() and path.stat().st_size == record.bytes and _record_of(path) == record


def _record_of(path: Path) -> FileRecord:
    with path.open("rb") as file:
        return FileRecord(path.stat().st_size, hashlib.file_digest(file, xxhash.xxh3_64).hexdigest())


def checkpoints_of(config: Config) -> Checkpoints:
    return Checkpoints(config.folder, config.learner.keep_checkpoints)


def state_at(step: int, method: MethodState, config: Config) -> CheckpointState:
    """The state of a checkpoint after `step` steps."""
    learner = config.learner
    return CheckpointState(
        step=step, method=method, ranks=learner.ranks, zero_stage=learner.zero_stage, fixed=fixed_terms(config)
    )


def _memory(config: Config, saved: CheckpointState) -> MethodState:
    """The method's memory at the checkpoint; as at the beginning, where another method left one of another kind.

    Raises: ConfigError where the run cannot continue from it."""
    try:
        config.method.make().decode(saved.method.memory, config.episode.s_max)
    except ValueError:
        log.info("the checkpoint holds the memory of another method than %s, which begins without", config.method.name)
        return initial_method_state(config.method, config.episode.s_max)
    return saved.method


def check_same_run(folder: Path, saved: CheckpointState, config: Config, accepts_changes: bool = False) -> MethodState:
    """The method's memory to continue with. A fork's folder has no start, with which model.path could be compared.

    Raises: ContractMismatch when this run cannot load the checkpoint; ConfigError when it must not continue."""
    found = differences(fixed_terms(config), saved.fixed)
    if found:
        raise not_this_run(config.run.name, found, f"{folder} was saved with these: `cusearch reset` to change them")
    if saved.weights and loads_weights_again(config) and not accepts_changes:
        own = weights_of(config.model.location)
        if own and own != saved.weights:
            raise not_this_run(config.run.name, [Difference(WEIGHTS, own, saved.weights)])
    now = config.learner.ranks, config.learner.zero_stage
    if (saved.ranks, saved.zero_stage) != now:
        log.info(
            "%s was saved by %d ranks, ZeRO-%d; resharding the optimizer state to %d ranks, ZeRO-%d",
            *(folder, saved.ranks, saved.zero_stage, *now),
        )
    memory = _memory(config, saved)
    if config.run.steps < saved.step:
        raise ConfigError(
            f"run.steps = {config.run.steps}, but {saved.step} steps are done ({folder}); set it to at least that"
        )
    return memory
