"""A tracker of a user, for tests: one line of JSON for each call."""

from __future__ import annotations

import json
from collections.abc import Mapping

from cusearch_async.metrics.trackers import TrackedRun, Tracker


class Lines(Tracker):
    """Writes beside the run's folder; fails while there is a file `down`."""

    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.folder.parents[1]
        self._write("opened", run.id, run.name)

    def _write(self, *what: object) -> None:
        if (self._folder / "down").exists():
            raise ConnectionError("the tracker is down")
        with (self._folder / "tracked.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._write(step, dict(values))

    def close(self) -> None:
        self._write("closed")


def not_a_tracker(run: TrackedRun) -> None:
    """A function, where a class is meant."""
