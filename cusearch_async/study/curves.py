"""The figures of a study: curves, each combination in a panel with the baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cusearch_async.metrics.drawing import pyplot
from cusearch_async.study.plan import PlannedRun
from cusearch_async.study.statistics import Matrix, by_version, estimate
from cusearch_async.study.tables import Tables
from cusearch_async.study.variants import Variant

_COLUMNS = 4
_BASELINE, _OTHER = "black", "#d1495b"


Points = Callable[[PlannedRun, Tables], tuple[NDArray[np.float64], Matrix]]
"""Of a run that is done: the places of its points [P], and the values of each question there [P, questions]."""


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    across: str
    upwards: str
    top: float
    """Upper bound of the values."""
    points: Points


def held_out(run: PlannedRun, tables: Tables) -> tuple[NDArray[np.float64], Matrix]:
    versions, em = by_version(tables.answers_of(run), "em")
    return versions.astype(np.float64), em


def held_out_by_tokens(run: PlannedRun, tables: Tables) -> tuple[NDArray[np.float64], Matrix]:
    """Over the tokens trained on so far, in thousands."""
    versions, em = held_out(run, tables)
    trained = np.cumsum([0.0, *tables.steps_of(run).sort_values("step")["train/tokens"].fillna(0.0)]) / 1000
    return trained[versions.astype(int)], em


def training_depth(run: PlannedRun, tables: Tables) -> tuple[NDArray[np.float64], Matrix]:
    """Of all trajectories of a step's pool."""
    steps = tables.steps_of(run).sort_values("step")
    return steps["step"].to_numpy(np.float64), steps[["depth/mean"]].to_numpy(np.float64)


CURVES = (
    Curve("", "learner step", "held-out EM, greedy", 1.0, held_out),
    Curve("tokens", "thousand tokens trained on", "held-out EM, greedy", 1.0, held_out_by_tokens),
    Curve("depth", "learner step", "searches per trajectory", math.inf, training_depth),
)


def draw(curve: Curve, variants: Sequence[Variant], tables: Tables, path: Path) -> None:
    """The mean over seeds, with its 95 % interval where there are two seeds or more."""
    shown = [variant for variant in variants if variant.done]
    baseline = next((variant for variant in shown if variant.is_baseline), None)
    panels = [variant for variant in shown if not variant.is_baseline] or shown
    plt = pyplot()
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(max(2.6 * columns, 4.0), 2.2 * rows + 0.5), sharex=True, sharey=True, squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    for axes, variant in zip(grid.flat, panels, strict=False):
        if baseline is not None and baseline is not variant:
            _draw(curve, axes, baseline, tables, _BASELINE)
        _draw(curve, axes, variant, tables, _OTHER)
        axes.set_title(variant.name, fontsize=9, color=_OTHER, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    grid[0, 0].set_ylim(bottom=0)
    figure.supylabel(curve.upwards, fontsize=9)
    black = f"; black: {baseline.name}" if baseline is not None else ""
    figure.supxlabel(f"{curve.across}{black}", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw(curve: Curve, axes: Any, variant: Variant, tables: Tables, color: str) -> None:
    runs = [curve.points(run, tables) for run in variant.done]
    places, values = np.mean([one[0] for one in runs], axis=0), np.array([one[1] for one in runs])
    found = [estimate(values[:, place]) for place in range(len(places))]  # of values [seeds, places, questions]
    axes.plot(places, [one.mean for one in found], color=color, linewidth=1.5)
    intervals = [one.interval for one in found if one.interval is not None]
    if intervals:
        low, high = np.clip(np.array(intervals).T, 0, curve.top)
        axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)
