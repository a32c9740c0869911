"""Reading metrics.jsonl and eval.jsonl, which several learners and evaluators in turn may have written."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cusearch_async.run.history import counts
from cusearch_async.run.identity import checksum

log = logging.getLogger(__name__)

PACED_BY = 10
"""Steps whose times give the time of one."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl in order of step, one a step; none without the file.

    A learner that went back to a checkpoint writes its steps again, under a later epoch: from its first row on the
    rows of earlier epochs do not count, however late they were written. A last line without its end is still being
    written; any other line that is no row is skipped and named in the log."""
    return list(MetricsFile(path).read())


class _RowsFile:
    """A file that is read again and again: only what was appended since is parsed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._place = self._lines = self._file = 0
        self._rows: list[dict[str, Any]] = []

    def _read(self) -> list[dict[str, Any]]:
        """All rows. A file that has become shorter, or was put in its place, is another one."""
        status = self._path.stat() if self._path.exists() else None
        size, file_id = (status.st_size, status.st_ino) if status else (0, 0)
        if size < self._place or file_id != self._file:
            self._forget()
            self._file = file_id
        if size > self._place:
            with self._path.open("rb") as file:
                file.seek(self._place)
                for line in file:  # one by one: a file of hundreds of megabytes is not held whole
                    if not line.endswith(b"\n"):
                        break
                    self._place += len(line)
                    self._lines += 1
                    row = _parsed(line)
                    if row is None:
                        _name_skipped(self._path, self._lines)
                    else:
                        self._rows.append(self._kept(row))
        return self._rows

    def _kept(self, row: dict[str, Any]) -> dict[str, Any]:
        return row


class MetricsFile(_RowsFile):
    """A metrics.jsonl."""

    def _forget(self) -> None:
        super()._forget()
        self._seen, self._latest = 0, list[dict[str, Any]]()

    def read(self) -> list[dict[str, Any]]:
        """As `read_metrics`; the same list, which nobody may change, until rows are appended."""
        rows = self._read()
        if len(rows) != self._seen:
            self._seen, self._latest = len(rows), _of_latest(rows)
        return self._latest


class ScoresFile(_RowsFile):
    """An eval.jsonl. Versions that were scored one after the other on the same questions share the list of their ids:
    thousands of texts each."""

    def _forget(self) -> None:
        super()._forget()
        self._ids: object = None

    def _kept(self, row: dict[str, Any]) -> dict[str, Any]:
        each = row.get("each")
        if isinstance(each, dict) and "question_id" in each:
            if each["question_id"] != self._ids:
                self._ids = each["question_id"]
            each["question_id"] = self._ids
        return row

    def read(self, starts: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """As `read_scores`."""
        kept: dict[int, dict[str, Any]] = {}
        for row in sorted(self._read(), key=_epoch):
            if counts(row["step"], row["epoch"], starts):
                kept[row["step"]] = row
        return [kept[step] for step in sorted(kept)]


class DigestedScores(ScoresFile):
    """An eval.jsonl with a checksum of its questions' ids in place of the figures of each."""

    def _kept(self, row: dict[str, Any]) -> dict[str, Any]:
        each = row.get("each")
        asked = each.get("question_id") if isinstance(each, dict) else None
        return row | {"each": checksum(asked)}


class Summaries(ScoresFile):
    """An eval.jsonl without the figures of single questions, which may take hundreds of megabytes."""

    def _kept(self, row: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name != "each"}


def _of_latest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a step, of the latest epoch that made it."""
    kept: dict[int, dict[str, Any]] = {}
    for _, group in itertools.groupby(sorted(rows, key=_epoch), key=_epoch):
        of_epoch = {row["step"]: row for row in group}
        first = min(of_epoch)
        kept = {step: row for step, row in kept.items() if step < first} | of_epoch
    return [kept[step] for step in sorted(kept)]


def steps_done(rows: Sequence[dict[str, Any]]) -> int:
    """Also those of the run that this one was forked from, which are not among its rows."""
    return int(rows[-1]["step"]) + 1 if rows else 0


def seconds_per_step(rows: Sequence[dict[str, Any]]) -> float | None:
    """The median of the newest start's last ten steps; None before its second one: the first waits for engines that
    start."""
    newest = [row for row in rows if row["epoch"] == rows[-1]["epoch"]][1:][-PACED_BY:]
    known = [row["time/step_s"] for row in newest if isinstance(row.get("time/step_s"), int | float)]
    return statistics.median(known) if known else None


def read_scores(path: Path, starts: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """The rows of an eval.jsonl in order of version, one a version; none without the file.

    `starts` holds (epoch, step) of each learner that took the run over: one that went back to `step` left later
    versions of earlier epochs, and their scores are of weights that the run does not continue from."""
    return ScoresFile(path).read(starts)


def _epoch(row: dict[str, Any]) -> int:
    return int(row["epoch"])


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The row in a line, if it is one; all rows share the texts of their names."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("epoch"), int):
        return {sys.intern(name): value for name, value in row.items()}
    return None


@functools.cache
def _name_skipped(path: Path, number: int) -> None:
    """Once, however often the file is read."""
    log.warning("%s, line %d is damaged; it is skipped", path, number)
