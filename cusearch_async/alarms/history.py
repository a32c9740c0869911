"""The steps of a run so far, as columns for the rules of alarms."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cusearch_async.algorithm.methods import METHODS, PlansRollouts

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

    groups: int
    """Of a step."""
    grad_clip: float
    buffer_bytes: float
    mismatch: float
    """Most nats between engine and learner on the policy's fresh tokens: rounding of the data type."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Limits:
        """Of a whole config, as TOML has it. Raises: KeyError, TypeError for another one."""
        mismatch = 1e-4 if settings["model"]["dtype"] == "float32" else 1e-3
        pool, learner, redis = settings["pool"], settings["learner"], settings["redis"]
        kind, groups = METHODS.get(settings["method"]["name"]), int(pool["questions"])
        if kind is not None and issubclass(kind, PlansRollouts):
            groups = kind(None, int(settings["method"]["budget"])).questions(groups, int(pool["rollouts"]))
        return cls(groups, float(learner["grad_clip"]), redis["max_mib"] * 2.0**20, mismatch)


class History:
    """The steps of a run so far, as columns. It is kept, and a step is read once."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._rows: list[Mapping[str, Any]] = []
        self._columns: dict[str, array[float]] = {}

    def follow(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The steps are now `rows`: the same objects as before, and others after them; else all are read again."""
        known = len(self._rows)
        if known and (known > len(rows) or rows[known - 1] is not self._rows[-1]):
            self._columns.clear()
        self._rows = list(rows)

    def of(self, name: str) -> Series:
        """[steps]; NaN where a step has none."""

        def value(row: Mapping[str, Any]) -> float:
            found = row.get(name)
            return float(found) if isinstance(found, int | float) else np.nan

        return self._column(name, value)

    def has(self, name: str) -> Fires:
        """[steps] Whether a step has the metric."""
        return self._column(f"has {name}", lambda row: float(name in row)) > 0

    def share_of_depth_0(self) -> Series:
        """[steps] of the pool's trajectories: those without a search."""

        def share(row: Mapping[str, Any]) -> float:
            counts = row.get("depth/generated")
            known = [one if isinstance(one, int | float) else 0 for one in counts] if isinstance(counts, list) else []
            return known[0] / max(1, sum(known)) if known else 0.0

        return self._column("share of depth 0", share)

    def scale_of_rewards(self) -> Series:
        """[steps] 1, or the largest mean reward so far where that is larger."""
        return np.fmax(1.0, best(np.abs(self.of("reward/all"))))

    def average(self, name: str) -> Series:
        """[steps] the exponential moving average; a step without a value leaves it as it is."""
        averages = self._columns.setdefault(f"average {name}", array("d"))
        for value in self.of(name)[len(averages) :].tolist():
            now = averages[-1] if averages else np.nan
            averages.append(now if np.isnan(value) else value if np.isnan(now) else MEMORY * value + (1 - MEMORY) * now)
        return np.array(averages)

    def _column(self, key: str, value: Callable[[Mapping[str, Any]], float]) -> Series:
        column = self._columns.setdefault(key, array("d"))
        column.extend(map(value, self._rows[len(column) :]))
        return np.array(column, dtype=np.float64)

    def compares_answers(self) -> Fires:
        """[steps] Whether there was any answer so far, and all can be compared with gold answers: an agent may give
        rewards in their place."""
        answers: Fires = (best(self.of("reward/answered")) > 0) | (best(self.of("reward/em")) > 0)
        has_gold: Fires = ~(self.of("reward/compared") < 1)
        return answers & has_gold

    def rose(self) -> Fires:
        """[steps] Whether exact match (the reward, of its size, where there are no answers) has, on average, risen by
        RISE over LOOK_BACK steps."""
        em, reward = (since(self.average(name), LOOK_BACK) for name in ("reward/em", "reward/all"))
        return np.where(self.compares_answers(), em >= RISE, reward >= RISE * self.scale_of_rewards())


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
