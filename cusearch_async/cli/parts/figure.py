"""The plot of a run, from the rows of its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cusearch_async.errors import ConfigError, packages_of
from cusearch_async.metrics.drawing import pyplot

INK = "#333333"
DEPTHS = "depth/generated"
BLUE, ORANGE, GREEN = "#3b6ea5", "#d9822b", "#4c9a6a"
Lines = tuple[tuple[str, str, str, str], ...]
"""Metric, label, colour and style of each line of a panel."""
REWARDS: Lines = (
    ("reward/all", "reward, whole pool", BLUE, "-"),
    ("reward/trained", "reward, trained on", BLUE, ":"),
    ("reward/em", "exact match", ORANGE, "-"),
)
DEPTH: Lines = (("depth/mean", "whole pool", BLUE, "-"), ("depth/mean_trained", "trained on", ORANGE, "-"))
WITHOUT_PHASE: Lines = (
    ("episode/recall", "evidence that was shown", GREEN, "-"),
    ("groups/zero_variance_share", "in groups of equal rewards", ORANGE, "-"),
)
"""For methods other than SDGA-Phase."""
STALENESS: Lines = (("staleness/mean", "mean", BLUE, "-"),)
IDLE: Lines = (("learner/idle_share", "learner", ORANGE, "-"), ("rollout/idle_share", "rollout engines", BLUE, "-"))


def refuse_format(path: Path, option: str) -> None:
    """Raises: ConfigError that names `option`, the option with the path, for a file that matplotlib cannot draw."""
    with packages_of("study"):
        from matplotlib.backend_bases import FigureCanvasBase  # noqa: PLC0415  (takes a second to load)

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower()[1:] not in known:
        raise ConfigError(f"{option} {path} must end in one of {', '.join(f'.{name}' for name in sorted(known))}")


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Reward and EM, depth, depth distribution, phase (or without one, what cannot teach), staleness, time; one panel
    each, over learner steps. What is no number is a gap."""
    plt = pyplot()
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.2), constrained_layout=True)
    (rewards, depth, depths), (phase, staleness, idle) = axes
    steps = np.array([row["step"] for row in rows])
    phases = _series(rows, "selection/phase")
    has_phase = bool(np.isfinite(phases).any())
    others: Lines = () if has_phase else WITHOUT_PHASE
    for panel, lines in ((phase, others), (rewards, REWARDS), (depth, DEPTH), (staleness, STALENESS), (idle, IDLE)):
        for name, label, color, style in lines:
            panel.plot(steps, _series(rows, name), color=color, linestyle=style, label=label)
    least, most = _series(rows, "staleness/min"), _series(rows, "staleness/max")
    staleness.fill_between(steps, least, most, color=BLUE, alpha=0.2, label="min to max", linewidth=0)
    _draw_depths(depths, rows, steps)
    known = np.concatenate([_series(rows, name) for name, *_ in REWARDS])
    is_share = not np.any((known < 0) | (known > 1))  # own rewards need not be
    _finish(rewards, "Reward and exact match (sampled)", "", (0, 1.02) if is_share else None)
    _finish(depth, "Mean search depth", "searches", None)
    if has_phase:
        phase.step(steps, phases, where="mid", color=GREEN, label="phase k")
        _finish(phase, "SDGA phase", "", (-0.1, max(4.1, np.nanmax(phases) + 0.5)))
    else:
        _finish(phase, "Evidence, and groups that teach nothing", "share", (0, 1.02))
    _finish(staleness, "Staleness of the pool", "versions", (-0.1, None))
    _finish(idle, "Idle share of time", "", (0, 1.02))
    figure.suptitle(title, color=INK)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_together(
    runs: dict[str, list[dict[str, Any]]], held_out: dict[str, list[tuple[int, float]]], path: Path
) -> None:
    """EM, reward, depth and staleness of several runs by name, over learner steps. `held_out`: version and EM of what
    was scored, as points next to the EM that was sampled."""
    plt = pyplot()
    titles = {
        "reward/em": "Exact match (sampled; points: held-out)",
        "reward/all": "Reward, whole pool",
        "depth/mean": "Mean search depth",
        "staleness/mean": "Mean staleness",
    }
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.2), constrained_layout=True)
    for panel, (name, title) in zip(axes.flat, titles.items(), strict=True):
        for label, rows in runs.items():
            (line,) = panel.plot([row["step"] for row in rows], _series(rows, name), label=label)
            if name == "reward/em" and held_out[label]:
                panel.plot(*zip(*held_out[label], strict=True), "D", markersize=4, color=line.get_color())
        _finish(panel, title, "", None)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _series(rows: list[dict[str, Any]], name: str) -> Any:
    """[steps] The metric `name`; NaN for a step without a finite number."""
    values = [row.get(name) for row in rows]
    return np.array([x if isinstance(x, float | int) and np.isfinite(x) else np.nan for x in values], dtype=float)


def _draw_depths(panel: Any, rows: list[dict[str, Any]], steps: Any) -> None:
    with packages_of("study"):
        from matplotlib import colormaps  # noqa: PLC0415

    by_step = [row.get(DEPTHS) or [] for row in rows]
    counts = np.zeros((len(rows), max([1, *map(len, by_step)])))
    for of_step, found in zip(counts, by_step, strict=True):
        of_step[: len(found)] = found
    shares = (counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)).T
    colors = colormaps["viridis"](np.linspace(0.05, 0.95, len(shares)))
    panel.stackplot(steps, shares, colors=colors, labels=[f"{depth}" for depth in range(len(shares))])
    _finish(panel, "Search depth of the pool", "share", (0, 1))
    panel.legend(title="depth", frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)


def _finish(panel: Any, title: str, unit: str, limits: tuple[float, float | None] | None) -> None:
    panel.set_title(title, color=INK, loc="left")
    panel.set_xlabel("learner step")
    panel.set_ylabel(unit)
    panel.xaxis.get_major_locator().set_params(integer=True)
    if limits:
        panel.set_ylim(*limits)
    panel.legend(frameon=False, fontsize=8)
