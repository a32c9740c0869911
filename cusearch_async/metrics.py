"""What a learner step says of its pool, its selection and its timing; names as they appear in metrics.jsonl."""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cusearch_async.algorithm.advantages import Advantages
from cusearch_async.algorithm.methods.sdga import count_depths
from cusearch_async.types import Pool, Trajectory

log = logging.getLogger(__name__)

Metrics = dict[str, float | list[int] | list[float | None]]
"""Lists have one entry per depth 0..S_max; None where a depth has nothing to speak of."""


def describe_step(
    pool: Pool, selected: Sequence[Trajectory], advantages: Advantages, budget: int, s_max: int
) -> Metrics:
    """Rewards, depths, staleness, group and selection figures of one step."""
    everyone = list(pool)
    staleness = np.array([max(0, pool.step - t.oldest_version) for t in everyone])
    depths = np.array([t.depth for t in everyone])
    retrieval = np.array([t.retrieval_tokens for t in everyone])
    best = np.sort(retrieval)[::-1][: len(selected)].sum()
    covered = sum(t.retrieval_tokens for t in selected)
    return {
        "reward/all": _mean(t.reward for t in everyone),
        "reward/trained": _mean(t.reward for t in selected),
        "reward/em": _mean(t.em for t in everyone),
        "reward/f1": _mean(t.f1 for t in everyone),
        "reward/format_valid": _mean(t.format_valid for t in everyone),
        "reward/answered": _mean(t.prediction is not None for t in everyone),
        "depth/mean": _mean(t.depth for t in everyone),
        "depth/mean_trained": _mean(t.depth for t in selected),
        "depth/generated": _histogram(everyone, s_max),
        "depth/selected": _histogram(selected, s_max),
        "sdga/budget_filled": len(selected) / budget,
        "sdga/coverage": float(covered),
        "sdga/coverage_of_best": float(covered / best) if best else 1.0,
        "groups/singleton_share": advantages.singleton_share,
        "groups/zero_variance_share": advantages.zero_variance_share,
        "staleness/min": float(staleness.min()) if everyone else 0.0,
        "staleness/mean": _mean(staleness),
        "staleness/max": float(staleness.max(initial=0)),
        "by_depth/staleness": [float(staleness[depths == s].mean()) if s in depths else None for s in range(s_max + 1)],
        "episode/turns": _mean(t.turns for t in everyone),
        "episode/sampled_tokens": _mean(len(t.logprobs) for t in everyone),
        "episode/seconds_mean": _mean(t.episode_s for t in everyone),
        "episode/seconds_p99": float(np.quantile([t.episode_s for t in everyone], 0.99)) if everyone else 0.0,
        "episode/search_seconds_mean": _mean(t.search_s for t in everyone),
    }


_TOTALS = ("sampled_tokens", "busy_s", "alive_s", "weight_load_s", "searches", "search_failures")


class WorkerRates:
    """Turns the running totals that workers report into rates over a learner step."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, float]] = {}

    def since_last(self, workers: dict[str, dict[str, str]]) -> Metrics:
        """Tokens per second of all workers, share of time their engines stood idle, seconds of weight loading; searches
        made and attempts failed, and the slowest worker's 99th percentile of a search's seconds."""
        now = {
            name: {key: float(facts.get(key, 0)) for key in _TOTALS}
            for name, facts in workers.items()
            if "alive_s" in facts
        }
        zero = dict.fromkeys(_TOTALS, 0.0)
        grown = [
            {key: value - self._last.get(name, zero)[key] for key, value in facts.items()}
            for name, facts in now.items()
        ]
        self._last = now
        grown = [g for g in grown if g["alive_s"] > 0]
        alive = sum(g["alive_s"] for g in grown)
        return {
            "rollout/workers": float(len(grown)),
            "rollout/tokens_per_s": sum(g["sampled_tokens"] / g["alive_s"] for g in grown),
            "rollout/idle_share": max(0.0, 1 - sum(g["busy_s"] for g in grown) / alive) if alive else 0.0,
            "rollout/weight_load_s": sum(g["weight_load_s"] for g in grown),
            "rollout/searches": sum(g["searches"] for g in grown),
            "rollout/search_failures": sum(g["search_failures"] for g in grown),
            "rollout/search_p99_s": max((float(f.get("search_p99_s", 0)) for f in workers.values()), default=0.0),
        }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl in order of step, one a step; none without the file.

    A learner that went back to a checkpoint writes its steps again, under a later epoch: from its first row on the
    rows of earlier epochs do not count, however late they were written. A last line without its end is still being
    written; any other line that is no row is skipped and named in the log."""
    kept: dict[int, dict[str, Any]] = {}
    for _, group in itertools.groupby(sorted(_rows(path), key=_epoch), key=_epoch):
        of_epoch = {row["step"]: row for row in group}
        kept = {step: row for step, row in kept.items() if step < min(of_epoch)} | of_epoch
    return [kept[step] for step in sorted(kept)]


def read_scores(path: Path, starts: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """The rows of an eval.jsonl in order of version, one a version; none without the file.

    `starts` holds (epoch, step) of each learner that took the run over: one that went back to `step` left the later
    versions of earlier epochs behind, and their scores are of weights that the run does not go on from. Rows without an
    epoch are from before they had one, and count."""
    kept: dict[int, dict[str, Any]] = {}
    for row in sorted(_rows(path), key=_epoch):
        if "epoch" not in row or all(epoch <= row["epoch"] or row["step"] <= step for epoch, step in starts):
            kept[row["step"]] = row
    return [kept[step] for step in sorted(kept)]


def _epoch(row: dict[str, Any]) -> int:
    return int(row.get("epoch", 0))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    complete, _, _ = path.read_bytes().rpartition(b"\n")
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("epoch", 0), int):
            yield row
        else:
            _name_skipped(path, number)


@functools.cache
def _name_skipped(path: Path, number: int) -> None:
    """Once, however often the file is read."""
    log.warning("%s, line %d is torn; it is skipped", path, number)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return float(np.mean(numbers)) if numbers else 0.0


def _histogram(trajectories: Sequence[Trajectory], s_max: int) -> list[int]:
    return count_depths(np.array([t.depth for t in trajectories], dtype=np.int64), s_max)
