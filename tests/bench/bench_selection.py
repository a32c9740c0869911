"""How long it takes to select from a million trajectories, and how much a loop over trajectories would take.

    python -m tests.bench.bench_selection

Best of five for each method, one core; the loop is the paper's algorithm with buckets as Python lists, once.
Figures also go to runs/bench/selection.json.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cusearch_async.algorithm.methods import METHODS, Candidates, Method, sdga

TRAJECTORIES, S_MAX, GROUP = 1_000_000, 5, 5
OUTPUT = Path("runs/bench/selection.json")


def make_pool() -> Candidates:
    rng = np.random.default_rng(0)
    tickets = np.arange(TRAJECTORIES) // GROUP
    return Candidates(
        depths=np.minimum(rng.geometric(0.4, TRAJECTORIES) - 1, S_MAX),
        rewards=rng.choice([0.0, 0.2, 0.5, 1.0], TRAJECTORIES),
        passed=rng.random(TRAJECTORIES) < 0.5,
        tickets=tickets,
        rollouts=np.arange(TRAJECTORIES) % GROUP,
        tokens=rng.integers(20, 300, TRAJECTORIES),
        questions=[f"q{ticket}" for ticket in tickets],
        s_max=S_MAX,
    )


def loop_over_trajectories(depths: list[int], budget: int) -> list[int]:
    """SDGA-Phase at phase 0 as it is written down: a list per bucket, a sample from each."""
    buckets: list[list[int]] = [[] for _ in range(S_MAX + 1)]
    for i, depth in enumerate(depths):
        buckets[depth].append(i)
    capacities = [len(bucket) for bucket in buckets]
    plan = sdga.phase_plan(capacities, budget, 0)
    allocation = sdga.allocate(capacities, plan.targets, plan.priorities)
    rng = random.Random(0)
    return sorted(i for bucket, count in zip(buckets, allocation, strict=True) for i in rng.sample(bucket, count))


def select(method: Method[Any], pool: Candidates) -> object:
    return method.select(pool, method.decode("", 5), np.random.default_rng(0))


def milliseconds(work: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return 1000 * min(taken)


def main() -> None:
    pool, budget = make_pool(), TRAJECTORIES // 2
    methods = {name: method(method.Settings(), budget) for name, method in METHODS.items()}
    figures = {name: milliseconds(lambda m=method: select(m, pool), times=5) for name, method in methods.items()}
    depths = pool.depths.tolist()
    loop = milliseconds(lambda: loop_over_trajectories(depths, budget), times=1)
    shown = Table(title=f"select {budget:,} of {TRAJECTORIES:,} trajectories")
    for column in ("method", "ms", "loop / this"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    for name, taken in figures.items():
        shown.add_row(name, f"{taken:.1f}", f"{loop / taken:.0f}" if name == "sdga_phase" else "")
    shown.add_row("sdga_phase as a loop", f"{loop:.0f}", "1")
    Console().print(shown)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps({"trajectories": TRAJECTORIES, "loop_ms": loop, "ms": figures}, indent=1))


if __name__ == "__main__":
    main()
