"""The figures of a study: held-out curves, each combination in a panel with the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cusearch_async.metrics.drawing import pyplot
from cusearch_async.study.statistics import by_version, estimate
from cusearch_async.study.tables import Tables
from cusearch_async.study.variants import Variant

_COLUMNS = 4
_BASELINE, _OTHER = "black", "#d1495b"


def draw_curves(variants: Sequence[Variant], tables: Tables, path: Path) -> None:
    """Held-out EM over learner steps: the mean over seeds, with its 95 % interval where there are two seeds or more."""
    shown = [variant for variant in variants if variant.done]
    baseline = next((variant for variant in shown if variant.is_baseline), None)
    panels = [variant for variant in shown if not variant.is_baseline] or shown
    plt = pyplot()
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(2.6 * columns, 2.2 * rows + 0.5), sharex=True, sharey=True, squeeze=False,
        constrained_layout=True,
    )  # fmt: skip
    for axes, variant in zip(grid.flat, panels, strict=False):
        if baseline is not None and baseline is not variant:
            _draw(axes, baseline, tables, _BASELINE)
        _draw(axes, variant, tables, _OTHER)
        axes.set_title(variant.name, fontsize=9, color=_OTHER, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    grid[0, 0].set_ylim(bottom=0)
    figure.supxlabel("learner step", fontsize=9)
    beside = f"; black: {baseline.name}" if baseline is not None else ""
    figure.supylabel(f"held-out EM, greedy{beside}", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw(axes: Any, variant: Variant, tables: Tables, color: str) -> None:
    curves = [by_version(tables.answers_of(run), "em") for run in variant.done]
    versions, em = curves[0][0], np.array([values for _, values in curves])  # em [seeds, versions, questions]
    found = [estimate(em[:, place]) for place in range(len(versions))]
    axes.plot(versions, [one.mean for one in found], color=color, linewidth=1.5)
    intervals = [one.interval for one in found if one.interval is not None]
    if intervals:
        low, high = np.clip(np.array(intervals).T, 0, 1)
        axes.fill_between(versions, low, high, color=color, alpha=0.15, linewidth=0)
