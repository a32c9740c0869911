"""The statistics of a study: means with intervals, tests, and detectable effects.

A measure is the mean of [seeds, questions] numbers. Its error is that of other seeds and of other questions, as all
seeds answer the same ones: of the crossed model x = m + a_s + b_q + e_sq,

    Var(mean) = V_s + V_q - V_e,    V_s = var of the seeds' means / S,   V_q = var of the questions' means / Q,
                                    V_e = var of the residuals / (S Q)

with Satterthwaite's degrees of freedom (1946): what a hierarchical bootstrap over seeds and questions estimates,
corrected for few seeds. By itself it is too sure far out in the tail, where Holm's correction looks: by chance few
seeds lie close together, and the questions decide. So of it and the t-test of the seeds' means alone the larger p-value
and the wider interval count. Differences are paired by seed and by question."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cusearch_async.algorithm.advantages import EQUAL
from cusearch_async.errors import packages_of
from cusearch_async.study.tables import area_weights

with packages_of("study"):
    import pandas as pd
    from scipy import optimize, stats

LEVEL = 0.95
POWER = 0.8

Matrix = NDArray[np.float64]
"""[seeds, questions] The contribution of each question to a measure in the run of each seed."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a t-statistic."""

    error: float
    """Standard error of the mean."""
    freedom: float
    """Its degrees of freedom."""

    @property
    def half(self) -> float:
        """Half of the interval of 95 %."""
        return float(stats.t.ppf((1 + LEVEL) / 2, self.freedom)) * self.error

    def p(self, mean: float) -> float:
        """Of the two-sided test that the mean is 0."""
        return float(2 * stats.t.sf(abs(mean) / self.error, self.freedom)) if self.error else 0.0

    def detectable(self, tests: int) -> float:
        bound = float(stats.t.isf((1 - LEVEL) / 2 / tests, self.freedom))

        def power(shift: float) -> float:
            return float(stats.nct.sf(bound, self.freedom, shift)) - POWER

        return self.error * float(optimize.brentq(power, 0.0, 4 * bound, xtol=1e-3))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of the mean of a Matrix."""

    mean: float
    """NaN without seeds."""
    seeds: int
    spreads: tuple[Spread, ...] = ()
    """Of the crossed design and of the seeds' means; empty with fewer than two seeds."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of 95 %; None with fewer than two seeds."""
        if not self.spreads:
            return None
        half = max(spread.half for spread in self.spreads)
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float | None:
        """Of the two-sided test that the mean is 0; None with fewer than two seeds, or when all numbers are equal."""
        return max(spread.p(self.mean) for spread in self.spreads) if self._varies else None

    def detectable(self, tests: int) -> float | None:
        """The true mean that would be told from 0 with a probability of about POWER, at the first step of Holm's
        correction for so many tests."""
        return max(spread.detectable(tests) for spread in self.spreads) if self._varies else None

    @property
    def _varies(self) -> bool:
        return any(spread.error for spread in self.spreads)


def contributions(answers: pd.DataFrame, measure: str) -> NDArray[np.float64]:
    """[questions] The contribution of each question to a measure of one run, from its rows of the answers.

    Raises: ValueError for a measure that is not of the answers."""
    column = "depth" if measure == "depth_growth" else "em"
    versions, values = by_version(answers, column)
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


def by_version(answers: pd.DataFrame, column: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Of one run: its scored versions [V], ascending, and the values of each question [V, questions]."""
    table = answers.sort_values(["version", "question"])
    versions = np.unique(table["version"].to_numpy(dtype=np.int64))
    return versions, table[column].to_numpy(dtype=np.float64).reshape(len(versions), -1)


def estimate(values: Matrix) -> Estimate:
    """The mean of a matrix with its error, over seeds and over questions."""
    seeds = len(values)
    if seeds < 2:
        return Estimate(float(values.mean()) if seeds else math.nan, seeds)
    questions = values.shape[1]
    mean, by_seed, by_question = values.mean(), values.mean(axis=1), values.mean(axis=0)
    residuals = values - by_seed[:, None] - by_question + mean
    free = np.array([seeds - 1, max(questions - 1, 1), (seeds - 1) * max(questions - 1, 1)])
    parts = np.array(
        [
            by_seed.var(ddof=1) / seeds,
            by_question.var(ddof=1) / questions if questions > 1 else 0.0,
            (residuals**2).sum() / free[2] / (seeds * questions),
        ]
    )
    variance = max(parts @ [1, 1, -1], *parts[:2])
    if math.sqrt(variance) < EQUAL:
        return Estimate(float(mean), seeds, (Spread(0.0, seeds - 1.0),))
    freedom = max(1.0, float(variance**2 / (parts**2 / free).sum()))  # less where questions are very few
    crossed = Spread(math.sqrt(variance), freedom)
    return Estimate(float(mean), seeds, (crossed, Spread(math.sqrt(parts[0]), seeds - 1.0)))


def holm(estimates: Sequence[Estimate]) -> list[float | None]:
    """Holm's p-values over all of them; one without a p-value has none, and counts as a test that found nothing.

    Source: Holm (1979): of n the smallest p times n, the next times n - 1, …, never falling and at most 1."""
    known = np.array([1.0 if one.p is None else one.p for one in estimates])
    order = np.argsort(known)
    adjusted = np.empty(len(known))
    adjusted[order] = np.minimum(np.maximum.accumulate(known[order] * np.arange(len(known), 0, -1)), 1.0)
    return [None if one.p is None else float(p) for one, p in zip(estimates, adjusted, strict=True)]
