"""What can be said of the runs of a study: means with intervals, differences to a baseline, what could have been seen.

A measure is linear in what every held-out question got: [seeds, questions] numbers whose mean it is. Intervals are by
hierarchical bootstrap: seeds are drawn with replacement, and, as all seeds answer the same questions, questions too.
Differences are paired by seed and by question. The p-value is that of a paired t-test over seeds, Holm's over the
methods that are compared with one baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

from cusearch_async.algorithm.advantages import EQUAL
from cusearch_async.streams import Stream, stream
from cusearch_async.study.tables import area_weights

RESAMPLES = 4000
LEVEL = 0.95
POWER = 0.8

Matrix = NDArray[np.float64]
"""[seeds, questions] What each question contributes to a measure in the run of each seed."""


@dataclass(frozen=True, slots=True)
class Estimate:
    mean: float
    interval: tuple[float, float] | None
    """95 %; None with fewer than two seeds."""
    seeds: int


@dataclass(frozen=True, slots=True)
class Difference:
    estimate: Estimate
    p: float | None
    """Of the paired t-test over seeds; None with fewer than two seeds, or when all differences are equal."""
    p_holm: float | None = None
    detectable: float | None = None
    """The true difference that a study of so many seeds would have seen with probability POWER."""


def contributions(answers: pd.DataFrame, measure: str) -> NDArray[np.float64]:
    """[questions] What each question contributes to a measure of one run, from its rows of the answers.

    Raises: ValueError for a measure that is not of the answers."""
    column = "depth" if measure == "depth_growth" else "em"
    table = answers.pivot_table(index="version", columns="question", values=column, sort=True)
    versions, values = table.index.to_numpy(dtype=np.int64), table.to_numpy(dtype=np.float64)
    last = np.where(versions == versions.max(), 1.0, 0.0)
    if measure == "em_last":
        weights = last
    elif measure == "em_area":
        weights = area_weights(versions)
    elif measure == "depth_growth":
        weights = last - np.where(versions == versions.min(), 1.0, 0.0)
    else:
        raise ValueError(f"measure must be em_last, em_area or depth_growth, got {measure!r}")
    found: NDArray[np.float64] = weights @ values
    return found


def estimate(values: Matrix) -> Estimate:
    """The mean of a matrix with its interval."""
    seeds = len(values)
    if seeds < 2:
        return Estimate(float(values.mean()) if seeds else math.nan, None, seeds)
    rng = stream(Stream.RESAMPLING, 1)
    rows = rng.integers(seeds, size=(RESAMPLES, seeds))
    columns = rng.multinomial(values.shape[1], np.full(values.shape[1], 1 / values.shape[1]), size=RESAMPLES)
    by_question = np.stack([values[row].mean(axis=0) for row in rows])
    means = (by_question * columns).sum(axis=1) / values.shape[1]
    low, high = np.quantile(means, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Estimate(float(values.mean()), (float(low), float(high)), seeds)


def difference(values: Matrix, baseline: Matrix) -> Difference:
    """`values` less `baseline`, of the same seeds and questions.

    Raises: ValueError for matrices of other shapes."""
    if values.shape != baseline.shape:
        raise ValueError(f"paired matrices must have one shape, got {values.shape} and {baseline.shape}")
    return against_zero(values - baseline)


def against_zero(values: Matrix) -> Difference:
    """The mean of a matrix of differences, tested over its seeds."""
    found = estimate(values)
    by_seed = values.mean(axis=1)
    spread = float(by_seed.std(ddof=1)) if found.seeds > 1 else 0.0
    if spread < EQUAL:
        return Difference(found, None)
    effect = TTestPower().solve_power(nobs=found.seeds, alpha=1 - LEVEL, power=POWER, alternative="two-sided")
    return Difference(found, float(stats.ttest_1samp(by_seed, 0.0).pvalue), None, float(effect) * spread)


def corrected(differences: Sequence[Difference]) -> list[Difference]:
    """With Holm's p-values over all that have one."""
    known = [number for number, one in enumerate(differences) if one.p is not None]
    adjusted = multipletests([differences[i].p for i in known], method="holm")[1] if known else []
    by_place = dict(zip(known, map(float, adjusted), strict=True))
    return [
        Difference(one.estimate, one.p, by_place.get(number), one.detectable) for number, one in enumerate(differences)
    ]
