"""Sends a run's figures and scores to its trackers, from the files that the run writes. So the learner never waits for
a tracker, and a run can be tracked later."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shlex
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cusearch_async.errors import TrackerFailed, first_line
from cusearch_async.files import write_file
from cusearch_async.lifecycle.signals import stop_signals
from cusearch_async.metrics.files import MetricsFile, Summaries
from cusearch_async.metrics.table import PLACE, scalars, scores_of
from cusearch_async.metrics.trackers import TrackedRun, Tracker, tracker_class
from cusearch_async.run.folder import METRICS, SCORES, TRACKED, TRACKED_AS, locked
from cusearch_async.run.history import epochs_and_steps, read_starts, read_stop

log = logging.getLogger(__name__)

Figures = Callable[[Mapping[str, Any]], dict[str, float]]

POLL_S = 2.0
RETRY_AT_LEAST_EVERY_S = 60.0
TRIES = 3
"""After so many failures of a row, the next one is tried. If that succeeds and this one fails again, the tracker
refuses it; otherwise an outage has ended between the two."""
KEPT_EVERY = 50
"""Rows that are sent twice at most, when this process is killed."""
END_S = 50.0
"""Longest wait for trackers that are busy, after a signal."""


def track(folder: Path, settings: Mapping[str, Any], names: Sequence[str], follow: bool) -> None:
    """Send what the trackers `names` do not have of the run in `folder`. With `follow`, until the run is finished and
    all is sent, or a signal arrives; what has failed is tried again. `settings`: the run's, as TOML has them.

    Raises: ConfigError as `tracker_class`; RunInUse when another process sends this run; TrackerFailed when something
    could not be sent."""
    kinds = {name: tracker_class(name) for name in names}
    (folder / TRACKED).mkdir(exist_ok=True)
    refusal = f"another process tracks the run in {folder}; stop that first"
    with locked(folder / TRACKED / "lock", fcntl.LOCK_EX, refusal):
        stop = threading.Event()
        for number in stop_signals():
            signal.signal(number, lambda received, _: os._exit(128 + received) if stop.is_set() else stop.set())
        sent = {section: values for section, values in settings.items() if section != "alarms"}  # hooks may hold keys
        run = TrackedRun(_id_of(folder), settings["run"]["name"], folder / TRACKED, sent)
        last = settings["run"]["steps"] if settings["eval"]["every"] else None
        senders = [Sender(folder, name, kind, run, last, follow, stop) for name, kind in kinds.items()]
        for sender in senders:
            sender.start()
        _wait(senders, stop)
        lacking = [sender.name for sender in senders if sender.lacks or sender.is_alive()]
        if lacking:
            options = [word for name in lacking for word in ("--tracker", name)]
            command = shlex.join(["cusearch", "runs", "track", str(folder), *options])
            raise TrackerFailed(f"{', '.join(lacking)} did not get everything; `{command}` sends it")


def _id_of(folder: Path) -> str:
    """The same whenever the run is continued; another after a reset."""
    file = folder / TRACKED_AS
    if not file.exists():
        write_file(file, secrets.token_hex(8).encode())
    return file.read_text(encoding="utf-8")


def _wait(senders: Sequence[Sender], stop: threading.Event) -> None:
    """Until all have ended; after a signal not for ever."""
    deadline = None
    while any(sender.is_alive() for sender in senders):
        time.sleep(0.05)
        if stop.is_set():
            deadline = deadline or time.monotonic() + END_S
            if time.monotonic() > deadline:
                return


class Sender(threading.Thread):
    """Sends the rows of a run that a tracker does not have. Which it has is kept in the run's folder.

    A thread that ends with the process: a library that blocks cannot hold it."""

    def __init__(
        self,
        folder: Path,
        name: str,
        kind: type[Tracker],
        run: TrackedRun,
        last_scored: int | None,
        follows: bool,
        stop: threading.Event,
    ) -> None:
        """`last_scored`: the version that an evaluator scores last; None without an evaluator."""
        super().__init__(name=name, daemon=True)
        self._folder, self._kind, self._run = folder, kind, run
        self._last_scored, self._follows, self._stop_asked = last_scored, follows, stop
        self._tracker: Tracker | None = None
        self._metrics, self._scores = MetricsFile(folder / METRICS), Summaries(folder / SCORES)
        self._sent = {METRICS: (0, -1), SCORES: (0, -1)}
        """The epoch and step of the newest row that was sent, by file."""
        self._kept = folder / TRACKED / f"{name.replace(':', '-')}.json"
        if self._kept.exists():
            self._sent |= {file: (epoch, step) for file, (epoch, step) in json.loads(self._kept.read_bytes()).items()}
        self._failures = 0
        self._saw_end = False
        self.lacks = True
        """Whether it does not have all that was there at the last look."""

    def run(self) -> None:
        is_over, count = False, 0
        while not is_over:
            is_asked = self._stop_asked.is_set()
            count += self._send_new()
            is_over = is_asked or not self._follows or (self._saw_end and not self.lacks)
            if not is_over:
                self._stop_asked.wait(min(POLL_S * 2 ** min(self._failures, 10), RETRY_AT_LEAST_EVERY_S))
        log.info("%s: %d steps and scores sent; %s has what was sent before", self.name, count, self._kept)
        if self._tracker is not None:
            try:
                self._tracker.close(self._saw_end)
            except Exception as error:  # any error of a library that is not ours
                log.warning("%s cannot end: %s: %s", self.name, type(error).__name__, first_line(error))

    def _is_finished(self, scores: Sequence[dict[str, Any]]) -> bool:
        """Whether the newest learner has done all steps, and the evaluator has scored the last version."""
        starts = read_starts(self._folder)
        stop = read_stop(self._folder, starts[-1].epoch) if starts else None
        is_scored = self._last_scored is None or (bool(scores) and scores[-1]["step"] >= self._last_scored)
        return stop is not None and stop.outcome == "finished" and is_scored

    def _send_new(self) -> int:
        """How many rows were sent. What has failed is logged, and left for the next look."""
        self.lacks = True  # until all is sent: a tracker may hang
        count, errors = 0, []
        try:
            scores = self._scores.read(epochs_and_steps(self._folder))
            self._saw_end = self._is_finished(scores)  # before the steps are read: what was written until then is sent
            if self._tracker is None:
                self._tracker = self._kind(self._run)
            for file, rows, figures in ((METRICS, self._metrics.read(), scalars), (SCORES, scores, scores_of)):
                sent, error = self._send(self._tracker, file, rows, figures)
                count += sent
                errors += [error] if error else []
        except Exception as error:  # as in `run`
            errors.append(error)
        self._failures = self._failures + 1 if errors else 0
        self.lacks = bool(errors)
        if errors:
            log.warning("%s failed: %s: %s", self.name, type(errors[0]).__name__, first_line(errors[0]))
        return count

    def _send(
        self, tracker: Tracker, file: str, rows: Sequence[dict[str, Any]], figures: Figures
    ) -> tuple[int, Exception | None]:
        """In order, up to the first that fails; how many, and its error."""
        new = [row for row in sorted(rows, key=_place) if _place(row) > self._sent[file]]
        held: tuple[dict[str, Any], Exception] | None = None
        for count, row in enumerate(new):
            error = _error_of(tracker, row, figures)
            if error is not None:
                if held is None and self._failures >= TRIES:
                    held = row, error
                    continue
                self._keep()
                return count, error
            if held is not None:
                if refusal := _error_of(tracker, held[0], figures):
                    log.warning("%s refuses step %s of %s: %s", self.name, held[0]["step"], file, first_line(refusal))
                held = None
            self._sent[file] = _place(row)
            if count % KEPT_EVERY == KEPT_EVERY - 1:
                self._keep()
        if new:
            self._keep()
        return len(new), held[1] if held is not None else None

    def _keep(self) -> None:
        write_file(self._kept, json.dumps(self._sent).encode())


def _error_of(tracker: Tracker, row: Mapping[str, Any], figures: Figures) -> Exception | None:
    """None when the tracker has taken the row."""
    try:
        tracker.log(row["step"], figures({key: row[key] for key in row if key not in PLACE}))
    except Exception as error:  # as in `Sender.run`
        return error
    return None


def _place(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["epoch"], row["step"]
