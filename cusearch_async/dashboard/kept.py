"""A run as its folder keeps it, alive or not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cusearch_async.alarms.history import History, Limits
from cusearch_async.config import saved_in
from cusearch_async.config.toml import read_toml
from cusearch_async.metrics.files import MetricsFile, ScoresFile
from cusearch_async.run.folder import METRICS, SCORES, SUMMARY, refuse_no_run
from cusearch_async.run.history import Start, Stop, read_starts, read_stop

FAILED = "failed"


@dataclass(frozen=True, slots=True)
class KeptRun:
    folder: Path
    settings: dict[str, Any]
    starts: list[Start]
    metrics: MetricsFile
    rows: list[dict[str, Any]]
    scored: ScoresFile
    scores: list[dict[str, Any]]
    history: History | None
    """Of its rows, for alarms; None where its settings are not known."""

    @classmethod
    def read(cls, folder: Path, before: KeptRun | None = None) -> KeptRun:
        """`before`: the same run as it was read last, of which nothing is parsed again. Raises: ConfigError for a
        folder that is not a run's, or whose config cannot be read."""
        refuse_no_run(folder)
        path = next(iter(saved_in(folder)), None)
        settings = read_toml(path, "config") if path else {}
        starts = read_starts(folder)
        metrics = before.metrics if before else MetricsFile(folder / METRICS)
        scored = before.scored if before else ScoresFile(folder / SCORES)
        scores = scored.read([(start.epoch, start.step) for start in starts])
        history = history_of(settings, before)
        return cls(folder, settings, starts, metrics, metrics.read(), scored, scores, history)

    def setting(self, section: str, name: str) -> Any:
        found = self.settings.get(section)
        return found.get(name, "–") if isinstance(found, dict) else "–"

    @property
    def outcome(self) -> str:
        """In a few words; of a failed run, FAILED."""
        if not self.starts:
            return "warm start" if self.rows else "not started"  # it has no learner of a run
        if self.error is not None:
            return FAILED
        stop = self._stop()
        if stop is None:
            return "running or killed"
        # every selection is empty in a run whose episodes all fail
        selected = [row.get("depth/selected") for row in self.rows]
        has_trained = any(not isinstance(counts, list) or any(counts) for counts in selected)
        return stop.outcome if has_trained else f"{stop.outcome}, 0 trained"

    @property
    def error(self) -> str | None:
        """The error that ended the last learner; None when none did."""
        stop = self._stop()
        return stop.outcome if stop and stop.step is None else None

    def stop(self, number: int) -> Stop | None:
        """How the learner of a start has ended; None while it runs, and for one that was killed."""
        return read_stop(self.folder, self.starts[number].epoch)

    def _stop(self) -> Stop | None:
        return self.stop(-1) if self.starts else None

    @property
    def last_em(self) -> float | None:
        """Held-out, of the newest version that the evaluator or the demo has scored."""
        try:
            if self.scores:
                return float(self.scores[-1]["all"]["em"])
            return float(json.loads((self.folder / SUMMARY).read_bytes())["em_after"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def history_of(settings: Mapping[str, Any], before: KeptRun | None) -> History | None:
    """That of `before`, unless a limit has changed; None where they are not known."""
    try:
        limits = Limits.of(settings)
    except (KeyError, TypeError, ValueError):
        return None
    known = before.history if before else None
    return known if known is not None and known.limits == limits else History(limits)


def names_of(folders: list[Path]) -> list[str]:
    """The names of the folders, numbered where they are equal."""
    names: list[str] = []
    for folder in folders:
        name = folder.resolve().name
        numbered = (name, *(f"{name}-{number}" for number in range(2, len(folders) + 2)))
        names.append(next(one for one in numbered if one not in names))
    return names
