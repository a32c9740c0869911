"""The pictures of alarms in docs/operating.md: a trouble that is planted into a healthy run of the study."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cusearch_async.alarms.firing import alarms_of
from cusearch_async.alarms.history import History
from cusearch_async.alarms.rules import Rule
from tests.planted_troubles import FAULTS, LIMITS, Row, healthy_runs

RUN = "sdga_phase-s0-76164a05"
NOT_RECORDED = {
    "buffer/bytes": 127_031.0,
    "buffer/incomplete_groups": 0.0,
    "buffer/lost": 0.0,
    "buffer/quarantined": 0.0,
    "episode/cut_turns": 0.0,
    "episode/recall_of_searched": 0.68,
    "machine/disk_free_gib": 56.3,
    "machine/memory_used_share": 0.39,
    "reward/right_minus_wrong": 0.806,
    "rollout/search_failures": 0.0,
    "rollout/searches": 68.5,
    "rollout/workers": 1.0,
    "selection/phase_trapped": 0.0,
    "time/lent_s": 0.0,
    "time/publish_s": 0.007,
    "train/loss": 0.011,
}
"""What the study has not: medians of a run of `make demo-lm`, and of the demo those of reward, selection and lent_s."""
WIDTH, HEIGHT = 210, 62
TOP = 14
"""Below the name of the metric."""
HEALTHY, TROUBLED, FIRING = "#8a949e", "#2f6fb0", "#c2513f"

Point = tuple[int, float]


def alarm(rule: Rule) -> str:
    """Its metric, and the steps at which it fires, as SVG."""
    healthy = [NOT_RECORDED | row for row in healthy_runs()[RUN]]
    troubled = FAULTS[rule.name](healthy)
    lines = [_points(rows, rule.metric) for rows in (healthy, troubled)]
    values = [value for line in lines for _, value in line]
    low, high = min(values), max(values)
    found = next(one for one in alarms_of(troubled, History(LIMITS)) if one.rule == rule)
    first, last = (_x(step, len(healthy)) for step in (found.first - 0.5, found.last + 0.5))
    area = f'x="{first:.1f}" y="{TOP}" width="{last - first:.1f}" height="{HEIGHT - TOP}"'
    style = 'font-size="10" font-family="sans-serif" fill="#7a8694"'
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f'<rect {area} fill="{FIRING}" fill-opacity="0.25"/>',
    ]
    for line, colour in ((line, colour) for line, colour in zip(lines, (HEALTHY, TROUBLED), strict=True) if line):
        places = " ".join(f"{_x(step, len(healthy)):.1f},{_y(value, low, high):.1f}" for step, value in line)
        drawn.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')
    drawn.append(f'<text x="0" y="10" {style}>{rule.metric} {low:.2g} to {high:.2g}</text>')
    return "\n".join([*drawn, "</svg>", ""])


def _points(rows: Sequence[Row], metric: str) -> list[Point]:
    values = ((row["step"], row.get(metric)) for row in rows)
    return [(step, value) for step, value in values if isinstance(value, int | float) and math.isfinite(value)]


def _x(step: float, steps: int) -> float:
    return min(max(step / (steps - 1), 0), 1) * WIDTH


def _y(value: float, low: float, high: float) -> float:
    share = (value - low) / (high - low) if high > low else 0.5
    return TOP + (1 - share) * (HEIGHT - TOP - 2)
