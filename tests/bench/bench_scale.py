"""How long the learner waits with 64, 256 and 1,000 workers, in ticket and in deferred order, on a virtual clock; and
with eight, on the virtual clock and in real time.

    python -m tests.bench.bench_scale

Ten questions a worker, three rollouts of each, two steps of staleness. Episodes take 6 s, one in a hundred more than
15 s, an update takes 8 s. Figures go to runs/bench/scale.json."""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cusearch_async.config import Config, load_config
from cusearch_async.simulation.durations import Durations, Troubles, typical
from cusearch_async.simulation.events import Outcome, Simulation
from cusearch_async.transport.server import server_command
from tests.bench import figures
from tests.bench.scale_real import RealCase
from tests.conftest import free_port, serving

FIGURES = Path("runs/bench/scale.json")
DURATIONS = Durations(episode_s=typical(6.0, 15.0), update_s=np.array([8.0]), searches=3.0, publish_s=1.0, load_s=0.5)
TROUBLES = {
    "none": Troubles(),
    "1 search in 10,000 hangs for 60 s": Troubles(hang=(1e-4, 60.0)),
    "1 search in 10,000 hangs for 300 s": Troubles(hang=(1e-4, 300.0)),
    "1 worker in 64 five times slower": Troubles(slow=(1 / 64, 5.0)),
    "a worker dies every 6 h": Troubles(mtbf_s=6 * 3600.0),
}
HANGS = "1 search in 10,000 hangs for 60 s"
ORDERS: dict[str, dict[str, Any]] = {
    "ticket": {},
    "deferred": {"order": "deferred", "defer": 2},
    "deferred, hedged": {"order": "deferred", "defer": 2, "hedge_after_s": 20},
}
FEW = 8
"""Workers of the cases in real time."""
TROUBLES_OF_FEW = {
    "none": Troubles(),
    "1 search in 1,000 hangs for 30 s": Troubles(hang=(1e-3, 30.0)),
    "1 worker in 8 three times slower": Troubles(slow=(1 / FEW, 3.0)),
}
SEEDS = 10
STEPS = {64: 60, 256: 40, 1000: 20}
MOST = 256
"""More workers are only tried without trouble and with hanging searches: a case takes minutes."""


def config_of(pool: dict[str, Any], questions: int, **others: str) -> Config:
    sizes = {name.replace("__", "."): value for name, value in others.items()}
    sizes |= {"pool.questions": questions, "pool.rollouts": 3, "method.budget": questions, "loss.minibatch": questions}
    sizes |= {"rollout.max_episodes": 96, "redis.max_mib": 1_000_000} | {f"pool.{name}": v for name, v in pool.items()}
    return load_config(Path("atlas"), [text for name, value in sizes.items() for text in (f"--{name}", str(value))])


def simulated(workers: int, order: str, troubles: Troubles, steps: int) -> Outcome:
    return Simulation(config_of(ORDERS[order], 10 * workers), workers, DURATIONS, troubles, steps).result()


def many_workers_s(workers: int = 10_000) -> float:
    """Wall seconds for 30 steps of 512 questions, with far more workers than there is work for."""
    began = time.monotonic()
    config = config_of(ORDERS["deferred, hedged"], 512)
    Simulation(config, workers, DURATIONS, TROUBLES[HANGS], 30).result()
    return time.monotonic() - began


def case_of(order: str, trouble: str, url: str, steps: int) -> tuple[Config, int, Durations, Troubles, int]:
    name = re.sub(r"\W+", "-", f"{trouble} {order}")
    config = config_of(ORDERS[order], 10 * FEW, redis__url=url, run__name=name, run__steps=str(steps))
    return config, FEW, DURATIONS, TROUBLES_OF_FEW[trouble], steps


async def in_turn(cases: Mapping[tuple[str, str], tuple[Any, ...]]) -> dict[tuple[str, str], tuple[float, float]]:
    """The learner's idle share, and the seconds of its work, in real time; the orders of one trouble at once."""
    found = {}
    for trouble in TROUBLES_OF_FEW:
        shares = await asyncio.gather(*(RealCase(*cases[trouble, order]).idle_and_work() for order in ORDERS))
        found |= {(trouble, order): share for order, share in zip(ORDERS, shares, strict=True)}
    return found


def compared(url: str, steps: int) -> dict[str, tuple[float, float]]:
    """Case -> the learner's idle share, simulated (the mean of some seeds, with its work in real time) and in real
    time."""
    cases = {(trouble, order): case_of(order, trouble, url, steps) for trouble in TROUBLES_OF_FEW for order in ORDERS}
    real, found = asyncio.run(in_turn(cases)), {}
    for place, (config, workers, durations, troubles, _) in cases.items():
        idle, work_s = real[place]
        measured = replace(durations, update_s=np.array([work_s]))
        seeds = (Simulation(config, workers, measured, troubles, steps, seed) for seed in range(SEEDS))
        simulated_share = float(np.mean([one.result().learner_idle for one in seeds]))
        found[", ".join(place)] = simulated_share, idle
        said = f"{simulated_share:.1%}, in real time {idle:.1%}; work {work_s:.1f} s a step"
        Console().print(f"{FEW} workers, {', '.join(place)}: {said}", soft_wrap=True)
    return found


def in_real_time(steps: int) -> dict[str, Any]:
    """On a Redis of its own."""
    url = f"redis://127.0.0.1:{free_port()}/0"
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(server_command(url, Path(folder), None), url, Path(folder) / "redis.log"),
    ):
        found = compared(url, steps)
    return {"real": found, "largest_error_of_idle_share": max(abs(one - other) for one, other in found.values())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--real-steps", type=int, default=60, help="of each case in real time")
    parser.add_argument("--only-real", action="store_true", help="leave the virtual clock out")
    arguments = parser.parse_args()
    figures.add(FIGURES, in_real_time(arguments.real_steps))
    if not arguments.only_real:
        many_workers()


def many_workers() -> None:
    shown, found = Table(box=None, pad_edge=False), {}
    for name in ("workers", "trouble", "order", "step s", "learner idle", "staleness (most)", "waste"):
        shown.add_column(name)
    for workers, steps in STEPS.items():
        for trouble, troubles in TROUBLES.items():
            if workers > MOST and trouble not in ("none", HANGS):
                continue
            for order in ORDERS:
                one = simulated(workers, order, troubles, steps)
                found[f"{workers}, {trouble}, {order}"] = asdict(one)
                row = f"{one.step_s:.1f}", f"{one.learner_idle:.0%}"
                row += f"{one.staleness_mean:.1f} ({one.staleness_max})", f"{one.wasted:.1%}"
                shown.add_row(str(workers), trouble, order, *row)
                Console().print(workers, trouble, order, *row)
    best = {workers: found[f"{workers}, {HANGS}, deferred, hedged"]["learner_idle"] for workers in STEPS}
    figures.add(
        FIGURES,
        {
            "cases": found,
            **{f"idle_learner_{workers}": idle for workers, idle in best.items()},
            "workers_10000_s": many_workers_s(),
        },
    )
    Console().print(shown)


if __name__ == "__main__":
    main()
