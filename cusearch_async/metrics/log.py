"""Writes metrics: one JSON line per step, and TensorBoard."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from cusearch_async.files import append_row, write_failed
from cusearch_async.metrics.table import Metrics, scalars
from cusearch_async.run.folder import CURVES, METRICS

log = logging.getLogger(__name__)


class MetricsLog:
    """Appends to <folder>/metrics.jsonl, never rewrites it: `metrics.read_metrics` tells which rows count."""

    def __init__(self, folder: Path, epoch: int, from_step: int) -> None:
        """Raises: WriteFailed."""
        self._path = folder / METRICS
        self._epoch = epoch
        self._curves = Curves(folder / CURVES, from_step)

    def write(self, step: int, metrics: Metrics) -> None:
        """Raises: WriteFailed."""
        append_row(self._path, {"step": step, "epoch": self._epoch, "time": round(time.time(), 3), **metrics})
        self._curves.write(step, scalars(metrics))
        phase = f"  phase {metrics['selection/phase']:g}" if "selection/phase" in metrics else ""
        figures = (metrics[name] for name in ("reward/all", "reward/em", "depth/mean"))
        text = "step %d  reward %.3f  em %.3f  depth %.2f%s  staleness %.1f"
        log.info(text, step, *figures, phase, metrics["staleness/mean"])

    def close(self) -> None:
        """Raises: WriteFailed."""
        self._curves.close()


class Curves:
    """TensorBoard's files in a folder. Points of earlier ones from `from_step` on no longer count."""

    def __init__(self, folder: Path, from_step: int) -> None:
        """Raises: WriteFailed."""
        self._folder = folder
        self._hook = threading.excepthook
        threading.excepthook = self._say_unless_tensorboards
        with self._drawing():
            self._board = SummaryWriter(str(folder), purge_step=from_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Raises: WriteFailed."""
        with self._drawing():
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Raises: WriteFailed."""
        threading.excepthook = self._hook
        with self._drawing():
            self._board.close()

    def _say_unless_tensorboards(self, failed: threading.ExceptHookArgs) -> None:
        """The traceback of a thread that has failed, except TensorBoard's: `_drawing` reports that in one line."""
        if not type(failed.thread).__module__.startswith("tensorboard."):
            self._hook(failed)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """TensorBoard writes in a thread, and raises what that failed with at a later call."""
        try:
            yield
        except OSError as error:
            raise write_failed(self._folder, error) from error
