"""eval.jsonl: the scores of an evaluator, also as curves, and the versions that are still to be scored."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from cusearch_async.evaluation.scoring import Scores
from cusearch_async.files import append_row, write_failed, write_file
from cusearch_async.metrics.files import Summaries
from cusearch_async.metrics.log import Curves
from cusearch_async.metrics.table import scores_of
from cusearch_async.run.folder import CURVES, SCORES
from cusearch_async.run.history import epochs_and_steps
from cusearch_async.transport.interface import RunState
from cusearch_async.types import Trajectory
from cusearch_async.weights.folder import epoch_of

log = logging.getLogger(__name__)


OF_RUN = "scored-run"
"""In CURVES of an evaluator's folder: the id of the run whose scores are there."""


def set_others_aside(folder: Path, run_id: str) -> None:
    """In a folder of an evaluator's alone, scores of an earlier run would count as this run's. Raises: WriteFailed."""
    of, scores = folder / CURVES / OF_RUN, folder / SCORES
    try:
        of.parent.mkdir(parents=True, exist_ok=True)
        before = of.read_text(encoding="utf-8") if of.exists() else run_id
        if before != run_id and scores.exists():
            aside = of.with_name(f"{SCORES}.{before}")
            scores.rename(aside)
            log.info("the scores of an earlier run are in %s now", aside)
        write_file(of, run_id.encode())
    except OSError as error:
        raise write_failed(of, error) from error


class Done:
    """The newest version that needs no scoring again: in the rows of eval.jsonl that count, or seen by this process."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self._scored = Summaries(run_folder / SCORES)
        self._epoch = -1
        self._seen: list[tuple[int, int]] = []
        """Epoch and first step of each learner that it has followed; a folder of its own has no starts."""
        self.version = -1

    def follow(self, state: RunState) -> None:
        """After a learner that went back to a checkpoint, versions come again."""
        epoch = epoch_of(state.weights)
        if epoch != self._epoch:
            self._epoch = epoch
            began = state.resumed if state.epoch == epoch else state.published
            self._seen.append((epoch, began))
            rows = self._scored.read([*epochs_and_steps(self._folder), *self._seen])
            self.version = rows[-1]["step"] if rows else -1


def record(
    run_folder: Path, version: int, weights: str, seconds: float, scores: Scores, episodes: Sequence[Trajectory] = ()
) -> None:
    """Add a row to eval.jsonl, and points eval/CATEGORY/em, … to TensorBoard. The figures of single questions are under
    `each`, in order. Raises: WriteFailed."""
    row = {"step": version, "epoch": epoch_of(weights), "seconds": round(seconds, 1)}
    each = {
        "question_id": [t.question_id for t in episodes],
        "em": [int(t.em) for t in episodes],
        "depth": [t.depth for t in episodes],
    }
    append_row(run_folder / SCORES, row | scores | {"each": each})
    with closing(Curves(run_folder / CURVES / "scores", from_step=version)) as curves:
        curves.write(version, scores_of(scores))
