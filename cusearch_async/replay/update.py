"""The update of a recorded step replayed, and compared bit for bit with the run's metrics and weights."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cusearch_async.errors import ConfigError
from cusearch_async.learner.interface import Learner
from cusearch_async.metrics.files import read_metrics
from cusearch_async.replay.selection import RecordedStep
from cusearch_async.run.folder import METRICS
from cusearch_async.weights.folder import WeightStore, epoch_of, newest_of
from cusearch_async.weights.tensor_file import records_of, write_tensors


@dataclass(frozen=True, slots=True)
class ReplayedUpdate:
    metrics: dict[str, tuple[Any, Any]]
    """Name -> as recorded in metrics.jsonl, and as computed again."""
    differing_tensors: list[str] | None
    """Parameters that differ from the version published after the step; None when that is not kept any more."""

    @property
    def is_same(self) -> bool:
        """Bit for bit."""
        return all(was == now for was, now in self.metrics.values()) and not self.differing_tensors


def replay_update(step: RecordedStep, run_folder: Path, checkpoint: Path | None, learner: Learner) -> ReplayedUpdate:
    """Replay the update of a recorded step with a new `learner`.

    Raises: ConfigError when the run keeps nothing to compare it with."""
    if checkpoint is not None:
        learner.load(checkpoint)
    record = step.record
    computed = learner.update(step.selected(), step.recorded.advantages, record.step)
    rows = {row["step"]: row for row in read_metrics(run_folder / METRICS) if row["epoch"] == record.epoch}
    row = rows.get(record.step, {})
    metrics = {name: (row[name], value) for name, value in computed.items() if name in row}
    store = WeightStore((step.config.weights.folder or run_folder) / "weights")
    differing = _differing(store, record.step + 1, record.epoch, learner)
    if not metrics and differing is None:
        raise ConfigError(
            f"the update of step {record.step} cannot be verified: no metrics row from epoch {record.epoch} in "
            f"{run_folder / METRICS}, and version {record.step + 1} is not kept in {store.folder}; choose another step"
        )
    return ReplayedUpdate(metrics, differing)


def _differing(store: WeightStore, version: int, epoch: int, learner: Learner) -> list[str] | None:
    """Parameters of `learner` that differ from a version that `epoch`, or a later one that continues it, published;
    None when there is none."""
    newest = newest_of(version, store.names())
    if newest is None or epoch_of(newest) < epoch:
        return None
    lent = learner.lend()
    try:
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "computed"
            write_tensors(written, lent.tensors)
            computed = records_of(written)
    finally:
        lent.release()
    published = store.verify(newest).tensors
    return sorted(name for name in computed.keys() | published.keys() if computed.get(name) != published.get(name))
