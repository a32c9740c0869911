"""The record of every step: its pool, the selection, and the advantages.

    <run folder>/records/000012-e1.zz   a `Record` of step 12 by epoch 1: msgpack, compressed with zlib

`cusearch replay` recomputes a step from it, `cusearch trace` shows it. Records are written asynchronously; training
continues without one that cannot be written; the oldest are deleted once they take more than run.records_mib. When
a learner goes back to step 8, the records of later steps by earlier learners do not count any more.
"""

from __future__ import annotations

import asyncio
import logging
import re
import zlib
from pathlib import Path

import msgspec

from cusearch_async.errors import ConfigError, WriteFailed
from cusearch_async.files import entries, put_in_place, remove, writing
from cusearch_async.run.history import counts, epochs_and_steps
from cusearch_async.training.background import Background
from cusearch_async.training.selector import Chosen
from cusearch_async.transport import codec
from cusearch_async.types import Pool

log = logging.getLogger(__name__)

FOLDER = "records"
MIB = 2**20
SCHEMA = 1
_NAME = re.compile(r"(\d{6,})-e(\d+)\.zz")
MOST_BYTES = 512 * MIB
"""Of a record before it is compressed: about 8,000 trajectories of 5,000 tokens. A larger one is neither written nor
read: a small file could otherwise fill the memory."""
_FAST = 1
"""zlib's level; higher ones take several times as long for a few percent."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    step: int
    epoch: int
    """Fencing epoch of the learner, whose settings are starts/EPOCH.toml."""
    memory: str
    """The method's memory before the step, such as the phase of SDGA-Phase."""
    pool: list[bytes]
    """Trajectories as `transport.codec` writes them, in order of (ticket, rollout)."""
    selected: list[int]
    """[K_eff] Places in the pool of what was trained on."""
    advantages: list[float]
    """[K_eff]"""
    metrics: dict[str, float]
    """The method's metrics of the selection."""

    def trajectories(self, max_tokens: int) -> Pool:
        """Raises: CorruptPayload."""
        return Pool(self.step, tuple(codec.decode(payload, max_tokens) for payload in self.pool))


class Recorder(Background):
    """Writes the record of a step during the next one."""

    def __init__(self, run_folder: Path, max_mib: int, epoch: int) -> None:
        super().__init__()
        self._folder = run_folder / FOLDER
        self._most_bytes = max_mib * MIB
        self._epoch = epoch

    def write(self, chosen: Chosen) -> None:
        """Begin to write the record of a step. One that cannot be written, or that comes while the previous one is
        still being written, is left out with a warning."""
        if not self._most_bytes:
            return
        if self.is_busy:
            log.warning("step %d is not recorded: the previous record is still being written", chosen.pool.step)
            return
        self.start(asyncio.to_thread(self._write_or_warn, chosen))

    def _write_or_warn(self, chosen: Chosen) -> None:
        try:
            self._write(chosen)
        except (OSError, WriteFailed) as error:
            log.warning("step %d is not recorded: %s: %s", chosen.pool.step, type(error).__name__, error)

    def _write(self, chosen: Chosen) -> None:
        if self._is_too_large(chosen, sum(one.token_ids.nbytes + one.logprobs.nbytes for one in chosen.pool)):
            return  # that much at least: nothing is encoded in vain
        record = Record(
            step=chosen.pool.step,
            epoch=self._epoch,
            memory=chosen.memory,
            pool=[codec.encode(trajectory) for trajectory in chosen.pool],
            selected=chosen.indices.tolist(),
            advantages=chosen.advantages.values.tolist(),
            metrics=dict(chosen.metrics),
        )
        packed = msgspec.msgpack.encode(record)
        if self._is_too_large(chosen, len(packed)):
            return
        target = self._folder / f"{record.step:06d}-e{self._epoch}.zz"
        with writing(target, durable=False) as unfinished:
            unfinished.write_bytes(zlib.compress(packed, _FAST))
        put_in_place(target, durable=False)
        self._remove_old(target)

    def _is_too_large(self, chosen: Chosen, size: int) -> bool:
        if size > MOST_BYTES:
            sizes = -(-size // MIB), MOST_BYTES // MIB
            log.warning("step %d is not recorded: its pool takes %d MiB, more than %d", chosen.pool.step, *sizes)
        return size > MOST_BYTES

    def _remove_old(self, newest: Path) -> None:
        """Oldest first, and those of earlier learners before all others; the newest stays, however large."""
        found = [(int(name[2]), int(name[1]), path) for path, name in entries(self._folder, _NAME)]
        kept = [path for *_, path in sorted(found) if path != newest]
        total = _size(newest) + sum(map(_size, kept))
        for path in kept:
            if total <= self._most_bytes:
                break
            total -= _size(path)
            remove(path)


def _size(path: Path) -> int:
    """0 of a file that another learner has deleted."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def recorded(run_folder: Path) -> dict[int, Path]:
    """Step -> its record by the latest learner, in order of step, of the steps behind which no later learner went
    back."""
    found = entries(run_folder / FOLDER, _NAME)
    whole = [(int(name[1]), int(name[2]), path) for path, name in found if path.name == name[0]]
    starts = epochs_and_steps(run_folder)
    return {step: path for step, epoch, path in sorted(whole) if counts(step + 1, epoch, starts)}


def read_record(run_folder: Path, step: int) -> Record:
    """Raises: ConfigError when the step is not recorded, with those that are, or when its record is damaged."""
    there = recorded(run_folder)
    if step not in there:
        known = f"it has steps {min(there)} to {max(there)}" if there else "it has none"
        raise ConfigError(f"{run_folder} has no record of step {step}; {known}")
    path = there[step]
    try:
        record = msgspec.msgpack.decode(unpacked(path), type=Record)
    except (OSError, ValueError, zlib.error, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if record.schema != SCHEMA:
        raise ConfigError(f"{path} has schema {record.schema}, this version reads {SCHEMA}")
    fault = _fault(record, step)
    if fault:
        raise ConfigError(f"{path} is damaged, or of another run: {fault}")
    return record


def unpacked(path: Path) -> bytes:
    """At most MOST_BYTES are unpacked. Raises: OSError; zlib.error or ValueError for another file."""
    unpacker = zlib.decompressobj()
    with path.open("rb") as file:
        content = unpacker.decompress(file.read(MOST_BYTES), MOST_BYTES)
    if unpacker.unconsumed_tail:
        raise ValueError(f"it holds more than {MOST_BYTES // MIB} MiB")
    if not unpacker.eof:
        raise ValueError("it is incomplete")
    return content


def _fault(record: Record, step: int) -> str | None:
    """Why no learner wrote this record of the step; None if one could."""
    if record.step != step:
        return f"it is of step {record.step}"
    if len(record.selected) != len(record.advantages):
        return f"{len(record.selected)} are selected, with {len(record.advantages)} advantages"
    outside = next((place for place in record.selected if not 0 <= place < len(record.pool)), None)
    return None if outside is None else f"selected holds {outside}, and the pool has {len(record.pool)} trajectories"
