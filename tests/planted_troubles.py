"""The trouble that each alarm is for, planted into the steps of a healthy run: for tests, and the pictures of docs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from pyarrow import parquet

from cusearch_async.alarms.history import Limits

STUDY = Path(__file__).parents[1] / "docs" / "replication" / "steps.parquet"
LIMITS = Limits(groups=64, grad_clip=1.0, buffer_bytes=1e9, mismatch=1e-4)
TROUBLE_AT = 12
Row = dict[str, Any]


@cache
def healthy_runs() -> dict[str, list[Row]]:
    """The steps of the study's 214 runs."""
    found: dict[str, list[Row]] = {}
    for row in parquet.read_table(STUDY).to_pylist():
        lists = {name: json.loads(row[name]) for name in ("depth/generated", "depth/selected")}
        found.setdefault(row["run"], []).append(row | lists)
    return {name: sorted(rows, key=lambda row: row["step"]) for name, rows in found.items()}


def plant(change: Callable[[Row, int], Row]) -> Callable[[list[Row]], list[Row]]:
    """A run with `change(row, n)` applied n = 1, 2, … steps after the trouble begins."""
    return lambda rows: [
        row if row["step"] < TROUBLE_AT else row | change(row, row["step"] - TROUBLE_AT + 1) for row in rows
    ]


FAULTS: dict[str, Callable[[list[Row]], list[Row]]] = {
    "stops_searching": plant(lambda row, n: {"depth/mean": row["depth/mean"] * 0.8**n}),
    "searches_more_and_more": plant(
        lambda row, n: {"depth/mean": row["depth/mean"] * 1.15**n, "reward/em": row["reward/em"] - 0.02 * n}
    ),
    "entropy_falls": plant(
        lambda row, n: {"train/entropy": row["train/entropy"] * 0.8**n, "reward/em": row["reward/em"] - 0.02 * n}
    ),
    "entropy_rises": plant(lambda row, n: {"train/entropy": row["train/entropy"] * 1.25**n}),
    "phase_trapped": plant(lambda row, n: {"selection/phase_trapped": 1.0}),
    "off_policy": plant(lambda row, n: {"off_policy/ess": row["off_policy/ess"] - 0.02 * n}),
    "engine_differs": plant(lambda row, n: {"off_policy/mismatch_kl": 1e-2, "staleness/max": 0.0}),
    "reward_without_answers": lambda rows: [
        row | {"reward/all": rows[0]["reward/all"] + 0.03 * row["step"], "reward/em": rows[0]["reward/em"]}
        for row in rows
    ],
    "reward_ignores_answers": plant(lambda row, n: {"reward/right_minus_wrong": 0.05}),
    "nothing_to_learn": plant(lambda row, n: {"groups/zero_variance_share": 0.95}),
    "reward_falls": plant(lambda row, n: {"reward/all": row["reward/all"] - 0.05 * n}),
    "large_gradient": plant(lambda row, n: {"train/grad_norm": row["train/grad_norm"] * 2.0**n}),
    "drifts": plant(lambda row, n: {"train/kl_reference": 0.1 * n}),
    "searches_fail": plant(lambda row, n: {"rollout/search_failures": 20.0 * n, "rollout/searches": 60.0}),
    "episodes_fail": plant(lambda row, n: {"buffer/incomplete_groups": 40.0 * n}),
    "wasted_turns": plant(
        lambda row, n: {"episode/turns": row["depth/mean"] + 1.5, "reward/answered": 1 - 0.1 * min(n, 9)}
    ),
    "turns_are_cut": plant(lambda row, n: {"episode/cut_turns": 0.2}),
    "workers_gone": lambda rows: [row | {"rollout/workers": 4.0 if row["step"] < TROUBLE_AT else 1.0} for row in rows],
    "slow_publishing": plant(lambda row, n: {"time/lent_s": 4.0, "time/step_s": 9.5}),
    "slow_worker": plant(lambda row, n: {"rollout/slowest_share": 0.05}),
    "buffer_full": plant(lambda row, n: {"buffer/bytes": 0.95e9}),
    "redis_full": plant(lambda row, n: {"buffer/server_share": 0.95}),
    "machine_full": plant(lambda row, n: {"machine/disk_free_gib": 1.0}),
    "finds_nothing": plant(lambda row, n: {"episode/recall_of_searched": 0.0}),
    "trajectories_lost": plant(lambda row, n: {"buffer/lost": 1.0 * n, "buffer/quarantined": 0.0}),
}
