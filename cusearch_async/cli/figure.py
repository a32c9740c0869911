"""The plot of a run, from the rows of its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cusearch_async.errors import ConfigError
from cusearch_async.metrics.drawing import pyplot

INK = "#333333"
BLUE, ORANGE, GREEN = "#3b6ea5", "#d9822b", "#4c9a6a"


def refuse_format(path: Path, option: str) -> None:
    """Raises: ConfigError that names `option`, the option with the path, for a file that matplotlib cannot draw."""
    from matplotlib.backend_bases import FigureCanvasBase  # noqa: PLC0415  (takes a second to load)

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower()[1:] not in known:
        raise ConfigError(f"{option} {path} must end in one of {', '.join(f'.{name}' for name in sorted(known))}")


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Reward and EM, depth, depth distribution, phase, staleness, time; one panel each, over learner steps."""
    plt = pyplot()
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.2), constrained_layout=True)
    for panel, fill in zip(axes.flat, (_rewards, _depth, _depths, _phase, _staleness, _idle), strict=True):
        fill(panel, rows, np.array([row["step"] for row in rows]))
    figure.suptitle(title, color=INK)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_together(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """EM, reward, depth and staleness of several runs by name, over learner steps."""
    plt = pyplot()
    titles = {
        "reward/em": "Exact match (sampled)",
        "reward/all": "Reward, whole pool",
        "depth/mean": "Mean search depth",
        "staleness/mean": "Mean staleness",
    }
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.2), constrained_layout=True)
    for panel, (name, title) in zip(axes.flat, titles.items(), strict=True):
        for label, rows in runs.items():
            panel.plot([row["step"] for row in rows], _series(rows, name), label=label)
        _finish(panel, title, "", None)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _series(rows: list[dict[str, Any]], name: str) -> Any:
    """[steps] The metric `name`; NaN for a step without it."""
    return np.array([row.get(name, np.nan) for row in rows], dtype=float)


def _rewards(panel: Any, rows: list[dict[str, Any]], steps: Any) -> None:
    panel.plot(steps, _series(rows, "reward/all"), color=BLUE, label="reward, whole pool")
    panel.plot(steps, _series(rows, "reward/trained"), color=BLUE, linestyle=":", label="reward, trained on")
    panel.plot(steps, _series(rows, "reward/em"), color=ORANGE, label="exact match")
    _finish(panel, "Reward and exact match (sampled)", "", (0, 1.02))


def _depth(panel: Any, rows: list[dict[str, Any]], steps: Any) -> None:
    panel.plot(steps, _series(rows, "depth/mean"), color=BLUE, label="whole pool")
    panel.plot(steps, _series(rows, "depth/mean_trained"), color=ORANGE, label="trained on")
    _finish(panel, "Mean search depth", "searches", None)


def _depths(panel: Any, rows: list[dict[str, Any]], steps: Any) -> None:
    from matplotlib import colormaps  # noqa: PLC0415

    counts = np.array([row["depth/generated"] for row in rows], dtype=float)
    shares = (counts / counts.sum(axis=1, keepdims=True)).T
    colors = colormaps["viridis"](np.linspace(0.05, 0.95, len(shares)))
    panel.stackplot(steps, shares, colors=colors, labels=[f"{depth}" for depth in range(len(shares))])
    _finish(panel, "Search depth of the pool", "share", (0, 1))
    panel.legend(title="depth", frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)


def _phase(panel: Any, rows: list[dict[str, Any]], steps: Any) -> None:
    phase = _series(rows, "selection/phase")
    panel.step(steps, phase, where="mid", color=GREEN, label="phase k")
    _finish(panel, "SDGA phase", "", (-0.1, max(4.1, np.nanmax(phase, initial=0) + 0.5)))


def _staleness(panel: Any, rows: list[dict[str, Any]], steps: Any) -> None:
    least, most = _series(rows, "staleness/min"), _series(rows, "staleness/max")
    panel.fill_between(steps, least, most, color=BLUE, alpha=0.2, label="min to max", linewidth=0)
    panel.plot(steps, _series(rows, "staleness/mean"), color=BLUE, label="mean")
    _finish(panel, "Staleness of the pool", "versions", (-0.1, None))


def _idle(panel: Any, rows: list[dict[str, Any]], steps: Any) -> None:
    panel.plot(steps, _series(rows, "learner/idle_share"), color=ORANGE, label="learner")
    panel.plot(steps, _series(rows, "rollout/idle_share"), color=BLUE, label="rollout engines")
    _finish(panel, "Idle share of time", "", (0, 1.02))


def _finish(panel: Any, title: str, unit: str, limits: tuple[float, float | None] | None) -> None:
    panel.set_title(title, color=INK, loc="left")
    panel.set_xlabel("learner step")
    panel.set_ylabel(unit)
    panel.xaxis.get_major_locator().set_params(integer=True)
    if limits:
        panel.set_ylim(*limits)
    panel.legend(frameon=False, fontsize=8)
