"""How long the learner waits with 64, 256 and 1,000 workers, in ticket and in deferred order, on a virtual clock; and
with eight, on the virtual clock and in real time on two hosts (network namespaces, which need root).

    python -m tests.bench.bench_scale

Ten questions a worker, three rollouts of each, two steps of staleness. Episodes take 6 s, one in a hundred more than
15 s, an update takes 8 s. Figures go to runs/bench/scale.json."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cusearch_async.config import Config, load_config
from cusearch_async.simulation.durations import Durations, Troubles, typical
from cusearch_async.simulation.events import Outcome, Simulation
from cusearch_async.transport.server import find_redis_server
from tests.bench import figures
from tests.bench.scale_real import RealCase
from tests.conftest import free_port
from tests.system.hosts import PASSWORD, Hosts

FIGURES = Path("runs/bench/scale.json")
DURATIONS = Durations(
    episode_s=typical(6.0, 15.0), update_s=np.array([8.0]), searches=3.0, publish_s=1.0, load_s=0.5, stands_s=0.5
)
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
BEST = "deferred by 3, hedged"
ALL_ORDERS = ORDERS | {BEST: {"order": "deferred", "defer": 3, "hedge_after_s": 20}}
FEW = 8
"""Workers of the cases in real time."""
TROUBLES_OF_FEW = {
    "none": Troubles(),
    "1 search in 1,000 hangs for 30 s": Troubles(hang=(1e-3, 30.0)),
    "1 worker in 8 three times slower": Troubles(slow=(1 / FEW, 3.0)),
}
SEEDS = 10
STEPS = {64: 60, 256: 30, 1000: 20}
MOST = 256
"""More workers are only tried without trouble and with hanging searches: a case takes minutes."""


def config_of(pool: dict[str, Any], questions: int, **others: str) -> Config:
    sizes = {name.replace("__", "."): value for name, value in others.items()}
    sizes |= {"pool.questions": questions, "pool.rollouts": 3, "method.budget": questions, "loss.minibatch": questions}
    sizes |= {"rollout.max_episodes": 96, "redis.max_mib": 1_000_000} | {f"pool.{name}": v for name, v in pool.items()}
    return load_config(Path("atlas"), [text for name, value in sizes.items() for text in (f"--{name}", str(value))])


def simulated(workers: int, order: str, troubles: Troubles, steps: int) -> Outcome:
    return Simulation(config_of(ALL_ORDERS[order], 10 * workers), workers, DURATIONS, troubles, steps).result()


def many_workers_s(workers: int = 10_000) -> float:
    """Wall seconds for 30 steps of 512 questions, with far more workers than there is work for."""
    began = time.monotonic()
    config = config_of(ORDERS["deferred, hedged"], 512)
    Simulation(config, workers, DURATIONS, TROUBLES[HANGS], 30).result()
    return time.monotonic() - began


def case_of(order: str, trouble: str, url: str, steps: int) -> tuple[Config, int, Durations, Troubles, int]:
    name = re.sub(r"\W+", "-", f"{trouble} {order}")
    config = config_of(ORDERS[order], 10 * FEW, redis__url=url, run__name=name, run__steps=str(2 * steps))
    return config, FEW, DURATIONS, TROUBLES_OF_FEW[trouble], steps


async def take_part(host: str, url: str, steps: int) -> dict[str, tuple[float, float]]:
    """What one of the two hosts does: host a has the learner and half of the workers, host b the others. On host a the
    learner's idle share by case, and the seconds of its work. The orders of one trouble run at once."""
    found: dict[str, tuple[float, float]] = {}

    async def part_of(trouble: str, order: str) -> None:
        case = RealCase(*case_of(order, trouble, url, steps))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(case.work(range(FEW // 2) if host == "a" else range(FEW // 2, FEW)))
            if host == "a":
                found[f"{trouble}, {order}"] = await case.learn()

    for trouble in TROUBLES_OF_FEW:
        await asyncio.gather(*(part_of(trouble, order) for order in ORDERS))
    return found


def on_two_hosts(steps: int) -> dict[str, tuple[float, float]]:
    """Each case in real time, on two network namespaces with a Redis of their own."""
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(Path(folder), "ab")
        try:
            if problem := hosts.build():
                sys.exit(f"bench-scale needs two hosts: {problem}")
            address, port = hosts.address["a"], str(free_port())
            redis = [str(find_redis_server()), "--bind", address, "--port", port, "--requirepass", PASSWORD]
            hosts.start("a", "redis", *redis, "--dir", folder)
            part = [sys.executable, "-m", "tests.bench.bench_scale", "--real-steps", str(steps)]
            part += ["--part", f"redis://{address}:{port}/0"]
            processes = [hosts.start(host, f"part-{host}", *part, host) for host in hosts.address]
            statuses = [process.wait() for process in processes]
            if any(statuses):
                sys.exit(hosts.said())
            return json.loads(hosts.log("part-a").read_text().splitlines()[-1])
        finally:
            hosts.remove()


def compared(steps: int) -> dict[str, tuple[float, float]]:
    """Case -> the learner's idle share, simulated (the mean of some seeds, with its work in real time) and in real
    time."""
    real, found = on_two_hosts(steps), {}
    for trouble in TROUBLES_OF_FEW:
        for order in ORDERS:
            idle, work_s = real[f"{trouble}, {order}"]
            config, workers, durations, troubles, _ = case_of(order, trouble, "redis://127.0.0.1:1", steps)
            measured = replace(durations, update_s=np.array([work_s]))
            seeds = (Simulation(config, workers, measured, troubles, steps, seed) for seed in range(SEEDS))
            simulated_share = float(np.mean([one.result().learner_idle for one in seeds]))
            found[f"{trouble}, {order}"] = simulated_share, idle
            said = f"{simulated_share:.1%}, in real time {idle:.1%}; work {work_s:.1f} s a step"
            Console().print(f"{FEW} workers, {trouble}, {order}: {said}", soft_wrap=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--real-steps", type=int, default=60, help="of each case in real time")
    parser.add_argument("--only-real", action="store_true", help="leave the virtual clock out")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)  # URL HOST: what this starts on each host
    arguments = parser.parse_args()
    if arguments.part:
        url, host = arguments.part
        print(json.dumps(asyncio.run(take_part(host, url, arguments.real_steps))))
        return
    if not arguments.only_real:
        many_workers()
    found = compared(arguments.real_steps)  # which ends where two hosts cannot be made
    error = max(abs(one - other) for one, other in found.values())
    figures.add(FIGURES, {"real": found, "largest_error_of_idle_share": error})


def many_workers() -> None:
    shown, found = Table(box=None, pad_edge=False), {}
    for name in ("workers", "trouble", "order", "step s", "learner idle", "staleness (most)", "waste"):
        shown.add_column(name)
    for workers, steps in STEPS.items():
        for trouble, troubles in TROUBLES.items():
            if workers > MOST and trouble not in ("none", HANGS):
                continue
            for order in ALL_ORDERS:
                one = simulated(workers, order, troubles, steps)
                found[f"{workers}, {trouble}, {order}"] = asdict(one)
                row = f"{one.step_s:.1f}", f"{one.learner_idle:.0%}"
                row += f"{one.staleness_mean:.1f} ({one.staleness_max})", f"{one.wasted:.1%}"
                shown.add_row(str(workers), trouble, order, *row)
                Console().print(workers, trouble, order, *row)
    best = {workers: found[f"{workers}, {HANGS}, {BEST}"]["learner_idle"] for workers in STEPS}
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
