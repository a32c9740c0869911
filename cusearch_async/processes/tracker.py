"""The tracker process: sends a run's figures and scores to run.trackers, from the files that the run writes. So the
learner never waits for a tracker, and a run can be tracked later."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cusearch_async.config import Config
from cusearch_async.errors import first_line
from cusearch_async.files import write_file
from cusearch_async.lifecycle.signals import stop_on_signals
from cusearch_async.metrics.files import MetricsFile, read_scores
from cusearch_async.metrics.trackers import TrackedRun, Tracker, open_tracker, scalars, tracker_class
from cusearch_async.run import folder as run_folder
from cusearch_async.run.folder import METRICS, SCORES
from cusearch_async.run.history import epochs_and_steps, read_starts, read_stop

log = logging.getLogger(__name__)

Figures = Callable[[Mapping[str, Any]], dict[str, float]]

POLL_S = 2.0
RETRY_AT_LEAST_EVERY_S = 60.0


async def run(config: Config) -> None:
    """Until the run is finished and all is sent, or a signal arrives. Raises: ConfigError; TrackerFailed."""
    stop = stop_on_signals()
    for name in config.run.trackers:
        tracker_class(name)
    marker = run_folder.mark(config.folder, config.run.name)
    kept = config.folder / run_folder.TRACKED
    kept.mkdir(exist_ok=True)
    tracked = TrackedRun(marker.id, config.run.name, kept, config.model_dump(mode="json"))
    opened = [Sender(config.folder, name, open_tracker(name, tracked)) for name in config.run.trackers]
    log.info("sending to %s", ", ".join(config.run.trackers))
    is_over = False
    while not is_over:
        is_over = stop.is_set() or _is_finished(config)  # first: what is written until then is sent
        await asyncio.gather(*(asyncio.to_thread(sender.send_new, is_last=is_over) for sender in opened))
        if not is_over:
            try:
                await asyncio.wait_for(stop.wait(), POLL_S)
            except TimeoutError:
                continue
    await asyncio.gather(*(asyncio.to_thread(sender.close) for sender in opened))


def _is_finished(config: Config) -> bool:
    """Whether the newest learner has done all steps, and the evaluator has scored the last version."""
    starts = read_starts(config.folder)
    stop = read_stop(config.folder, starts[-1].epoch) if starts else None
    if stop is None or stop.outcome != "finished" or not config.eval.every:
        return stop is not None and stop.outcome == "finished"
    scores = read_scores(config.folder / SCORES, epochs_and_steps(config.folder))
    return bool(scores) and scores[-1]["step"] >= config.run.steps


class Sender:
    """Sends the rows of a run that a tracker does not have. What it has is kept in the run's folder."""

    def __init__(self, folder: Path, name: str, tracker: Tracker) -> None:
        self._folder, self._name, self._tracker = folder, name, tracker
        self._metrics = MetricsFile(folder / METRICS)
        self._sent = {METRICS: (0, -1), SCORES: (0, -1)}
        """The epoch and step of the newest row that was sent, by file."""
        self._kept = folder / run_folder.TRACKED / f"{name.replace(':', '-')}.json"
        if self._kept.exists():
            self._sent |= {file: (epoch, step) for file, (epoch, step) in json.loads(self._kept.read_bytes()).items()}
        self._wait_s = 0.0
        self._try_at = 0.0

    def send_new(self, is_last: bool = False) -> None:
        """What has failed is tried again after a while, or now if this `is_last`."""
        if time.monotonic() < self._try_at and not is_last:
            return
        scores = read_scores(self._folder / SCORES, epochs_and_steps(self._folder))
        before = dict(self._sent)
        try:
            self._send(METRICS, self._metrics.read(), scalars)
            self._send(SCORES, scores, _scores)
            self._wait_s = 0.0
        except Exception as error:  # any error of a library that is not ours
            self._wait_s = min(2 * self._wait_s or POLL_S, RETRY_AT_LEAST_EVERY_S)
            self._try_at = time.monotonic() + self._wait_s
            later = "at the next start of `cusearch worker tracker`" if is_last else f"in {self._wait_s:.0f} s"
            reason = f"{type(error).__name__}: {first_line(error)}"
            log.warning("%s failed, and gets what it lacks %s: %s", self._name, later, reason)
        if self._sent != before:
            write_file(self._kept, json.dumps(self._sent).encode())

    def _send(self, file: str, rows: list[dict[str, Any]], figures: Figures) -> None:
        for row in sorted(rows, key=_place):
            if _place(row) > self._sent[file]:
                self._tracker.log(row["step"], figures(_without_place(row)))
                self._sent[file] = _place(row)

    def close(self) -> None:
        try:
            self._tracker.close()
        except Exception as error:  # as above
            log.warning("%s cannot end: %s: %s", self._name, type(error).__name__, first_line(error))


def _place(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["epoch"], row["step"]


def _without_place(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("epoch", "step", "time")}


def _scores(row: Mapping[str, Any]) -> dict[str, float]:
    """eval/em, … of all questions, and eval/{category}/em, …"""
    found: dict[str, float] = {}
    for category, scores in row.items():
        if isinstance(scores, dict) and category != "each":
            prefix = "eval" if category == "all" else f"eval/{category}"
            found |= {f"{prefix}/{name}": value for name, value in scalars(scores).items()}
    return found
