"""How long the parts of a run take: those that a simulation draws from."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cusearch_async.config import Config
from cusearch_async.errors import ConfigError, CorruptPayload
from cusearch_async.metrics.files import read_metrics
from cusearch_async.run.folder import METRICS, refuse_no_run
from cusearch_async.training.recorder import read_record, recorded
from cusearch_async.types import Trajectory

log = logging.getLogger(__name__)

RECORDS = 20
"""The last records of a run that episodes are taken from."""
_OF_THE_LEARNER = ("time/update_s", "time/publish_s", "time/checkpoint_s")
_P99 = 2.3263
"""Standard deviations from the median of a normal distribution to its 99th percentile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """In seconds. Episodes and updates are drawn, each with the same probability; the rest is constant."""

    episode_s: NDArray[np.float64]
    update_s: NDArray[np.float64]
    """The learner's work between two pools."""
    searches: float
    """Of an episode, on average."""
    publish_s: float
    """From a commit to the announcement."""
    load_s: float
    """From the announcement of a version until a worker has it."""
    stands_s: float
    """For so long its engine stands still then; 0 where `episode_s` has it already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Troubles:
    """What goes wrong; by default nothing."""

    hang: tuple[float, float] = (0.0, 0.0)
    """Probability that a search hangs, and the seconds that it then takes."""
    slow: tuple[float, float] = (0.0, 1.0)
    """Share of the workers that are slower, and how many times."""
    mtbf_s: float = 0.0
    """Mean time until a worker dies; 0: never."""
    restart_s: float = 60.0
    """From its death until it loads weights again."""


def typical(median_s: float, p99_s: float) -> NDArray[np.float64]:
    """Evenly spaced quantiles of the log-normal distribution with this median and 99th percentile."""
    from statistics import NormalDist  # noqa: PLC0415  (only here)

    normal = NormalDist(0, np.log(p99_s / median_s) / _P99 if p99_s > median_s else 1e-12)
    places = (np.arange(10_000) + 0.5) / 10_000
    return median_s * np.exp([normal.inv_cdf(place) for place in places])


def _recorded(folder: Path, step: int, max_tokens: int) -> Iterable[Trajectory]:
    try:
        return read_record(folder, step).trajectories(max_tokens)
    except (ConfigError, CorruptPayload) as error:  # half written, or removed by a learner
        log.warning("the record of step %d in %s is left out: %s", step, folder, error)
        return ()


def recorded_durations(folder: Path, config: Config) -> Durations:
    """Those of a run. Raises: ConfigError for a folder without steps or records."""
    refuse_no_run(folder)
    rows, steps = read_metrics(folder / METRICS), sorted(recorded(folder))[-RECORDS:]
    if not rows or not steps:
        raise ConfigError(f"{folder} has no {'steps' if not rows else 'records (run.records_mib)'} to take times from")
    found = [t for step in steps for t in _recorded(folder, step, config.episode.max_trajectory_tokens)]
    if not found:
        raise ConfigError(f"none of the records in {folder} can be read")
    loads = [row.get("rollout/weight_load_s", 0.0) / max(1.0, row.get("rollout/workers", 1.0)) for row in rows]
    loads = [load for load in loads if load > 0] or [0.0]  # not each step has one
    return Durations(
        episode_s=np.array([t.episode_s for t in found]),
        searches=float(np.mean([t.depth for t in found])),
        update_s=np.array([sum(row.get(name, 0.0) for name in _OF_THE_LEARNER) for row in rows]),
        publish_s=float(np.median([row.get("time/publishing_s", 0.0) for row in rows])),
        load_s=float(np.median(loads)),
        stands_s=0.0,
    )
