"""A tracker of a user, for tests: one line of JSON for each call."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping

from cusearch_async.metrics.trackers import TrackedRun, Tracker


class Lines(Tracker):
    """Writes into the folder above the run's. A file `down` there, or one that names the step, `refused`, `killed` or
    `hangs`, makes it fail."""

    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.folder.parents[1]
        self._write("opened", run.id, run.name)

    def _write(self, *what: object) -> None:
        if (self._folder / "down").exists():
            raise ConnectionError("the tracker is down")
        with (self._folder / "tracked.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._is("refused", step):
            raise ValueError(f"step {step} is refused")
        if self._is("killed", step):
            os._exit(9)
        if self._is("hangs", step):
            threading.Event().wait()
        self._write(step, dict(values))

    def _is(self, file: str, step: int) -> bool:
        return (self._folder / file).exists() and (self._folder / file).read_text() == str(step)

    def close(self, is_finished: bool) -> None:
        self._write("closed")


def not_a_tracker(run: TrackedRun) -> None:
    """A function, where a class is meant."""
