"""The steps of a run so far, as columns for the rules of alarms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]
Fires = NDArray[np.bool_]
MEMORY = 0.3
"""Weight of the newest step in a moving average."""
FIRST = 5
"""Steps at the start that later ones are compared with."""
LOOK_BACK = 8
"""Steps over which exact match must have risen, for a policy that changes much to be called healthy."""
RISE = 0.02


@dataclass(frozen=True, slots=True)
class Limits:
    """What rules need of a run's settings."""

    questions: int
    grad_clip: float
    buffer_bytes: float
    mismatch: float
    """Most nats between engine and learner on the policy's fresh tokens: rounding of the data type."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Limits:
        """Of a whole config, as TOML has it. Raises: KeyError, TypeError for another one."""
        mismatch = 1e-4 if settings["model"]["dtype"] == "float32" else 1e-3
        pool, learner, redis = settings["pool"], settings["learner"], settings["redis"]
        return cls(int(pool["questions"]), float(learner["grad_clip"]), redis["max_mib"] * 2.0**20, mismatch)


class History:
    """The steps of a run so far, as columns."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], limits: Limits) -> None:
        self._rows = rows
        self.limits = limits

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, name: str) -> Series:
        """[steps]; NaN where a step has none."""
        values = (row.get(name) for row in self._rows)
        return np.array([value if isinstance(value, int | float) else np.nan for value in values], dtype=np.float64)

    def has(self, name: str) -> Fires:
        """[steps] Whether a step has the metric."""
        return np.array([name in row for row in self._rows], dtype=np.bool_)

    def share_of_depth_0(self) -> Series:
        """[steps] of the pool's trajectories: those without a search."""
        found = (row.get("depth/generated") for row in self._rows)
        counts = [of_step if isinstance(of_step, list) and of_step else [0] for of_step in found]
        return np.array([of_step[0] / max(1, sum(of_step)) for of_step in counts])

    def average(self, name: str) -> Series:
        """[steps] the exponential moving average; a step without a value leaves it as it is."""
        averages, now = [], np.nan
        for value in self.of(name).tolist():
            now = now if np.isnan(value) else value if np.isnan(now) else MEMORY * value + (1 - MEMORY) * now
            averages.append(now)
        return np.array(averages)

    def rose(self, name: str = "reward/em") -> Fires:
        """[steps] Whether its average has risen by RISE over LOOK_BACK steps."""
        return since(self.average(name), LOOK_BACK) >= RISE


def in_a_row(fires: Fires, count: int) -> Fires:
    """[steps] Whether it holds in this step and the `count` - 1 before."""
    together = fires.copy()
    for back in range(1, count):
        together[back:] &= fires[:-back]
    together[: count - 1] = False
    return together


def since(values: Series, back: int) -> Series:
    """[steps] The difference from `back` steps before, or from the first step; 0 in that."""
    earlier = np.concatenate([np.full(min(back, len(values)), values[0] if len(values) else 0.0), values[:-back]])
    return np.array(values - earlier[: len(values)])


def best(values: Series) -> Series:
    """[steps] The largest so far; NaN before the first value."""
    return np.array(np.fmax.accumulate(values))


def first_steps(values: Series) -> float:
    """The mean of the first steps; NaN while there are not more than those."""
    return float(np.nanmean(values[:FIRST])) if len(values) > FIRST and not np.isnan(values[:FIRST]).all() else np.nan
