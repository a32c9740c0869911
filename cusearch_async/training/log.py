"""Where metrics go: one JSON line per step, and TensorBoard."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from cusearch_async.files import write_whole
from cusearch_async.metrics import Metrics, read_metrics

log = logging.getLogger(__name__)


class MetricsLog:
    """Appends to <folder>/metrics.jsonl; steps at or after `from_step` of an earlier life are cut off."""

    def __init__(self, folder: Path, from_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        kept = [row for row in read_metrics(self._path) if row["step"] < from_step]
        write_whole(self._path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=from_step)

    def write(self, step: int, metrics: Metrics) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        for name, value in metrics.items():
            if isinstance(value, list):
                for depth, of_depth in enumerate(value):
                    if of_depth is not None:
                        self._board.add_scalar(f"{name}/{depth}", of_depth, step)
            else:
                self._board.add_scalar(name, value, step)
        log.info(
            "step %d  reward %.3f  em %.3f  depth %.2f  phase %d  staleness %.1f",
            step,
            metrics["reward/all"],
            metrics["reward/em"],
            metrics["depth/mean"],
            metrics.get("sdga/phase", 0),
            metrics["staleness/mean"],
        )

    def close(self) -> None:
        self._board.close()
