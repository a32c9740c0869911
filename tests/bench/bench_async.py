"""What asynchrony saves when searches take as long as on the web: the same config and number of steps, synchronously
(max_staleness = 0), with a max_staleness of 1, 2, 4 and 8, and with 2 and an evaluator beside, one after the other on
the same machine; 0 and 2 in ROUNDS rounds, the others in the first. How many times as fast is the median of the ratios
within a round.

    python -m tests.bench.bench_async [--section.key value]...

The clock runs from the learner's first wait to the end of its last step, workers being up and warm in all cases;
the process start-up is not counted. No overlap can make a run shorter than the busier of learner and engine was in it:
the learner when it did not wait for a pool, the engine when it had at least one request; nor shorter than all
processes together need of the cores, of which the machine's idle time after the first step tells. Figures also go to
runs/bench/async.json.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from cusearch_async.cli.parts.fleet import Fleet
from cusearch_async.config import Config, load_config
from cusearch_async.metrics.files import read_metrics
from cusearch_async.run import folder as run_folder
from tests.conftest import own_services

CONFIG = Path(__file__).parents[2] / "configs" / "atlas.toml"
FOLDER = Path("runs/bench")
STEPS = 12
ROUNDS = 3
SYNCHRONOUS, ASYNCHRONOUS, EVALUATED = "0", "2", "2, evaluated"
SIDES = {name: ["--pool.max_staleness", name] for name in ("0", "1", "2", "4", "8")}
SIDES |= {EVALUATED: [*SIDES[ASYNCHRONOUS], "--eval.every", str(STEPS // 3)]}
WEB_LATENCY = ["--retriever.latency_median_s", "0.3", "--retriever.latency_p99_s", "2.0"]


def measure(side: str, overrides: list[str]) -> dict[str, float]:
    """Run once; wall seconds and shares of the whole run."""
    folder = FOLDER / f"staleness-{side.replace(', ', '-')}"
    own = ["--run.folder", str(folder), "--learner.checkpoint_every", str(STEPS)]
    config = load_config(CONFIG, ["--steps", str(STEPS), *WEB_LATENCY, *own, *own_services(), *overrides])
    run_folder.forget(config.folder)
    with Fleet(config) as fleet:
        fleet.start_services()
        beside = {"rollout-0": "rollout"} | ({"evaluator": "evaluator"} if config.eval.every else {})
        for worker, module in beside.items():
            fleet.start_command(worker, "worker", module)
        logs = [config.folder / "logs" / f"{worker}.log" for worker in beside]
        fleet.wait(lambda: all("ready" in log.read_text(errors="replace") for log in logs))
        fleet.start_command("learner", "worker", "learner")
        fleet.wait((config.folder / "metrics.jsonl").exists)
        psutil.cpu_percent()  # the next call tells of the time since this one
        fleet.wait(lambda: fleet.has_ended("learner"))
        busy = psutil.cpu_percent() / 100
    return shares(config, read_metrics(config.folder / "metrics.jsonl")) | {"cores_busy": busy}


def shares(config: Config, rows: list[dict[str, Any]]) -> dict[str, float]:
    wall = sum(row["time/step_s"] for row in rows)
    waited = sum(row["time/wait_s"] for row in rows)
    engine_idle = sum(row.get("rollout/idle_share", 1) * row["time/step_s"] for row in rows)
    optimum = max(wall - waited, wall - engine_idle)
    return {
        "steps": len(rows),
        "max_staleness": config.pool.max_staleness,
        "wall_s": wall,
        "optimum_s": optimum,
        "optimum_over_wall": optimum / wall,
        "learner_idle": waited / wall,
        "rollout_idle": engine_idle / wall,
        "update_s": sum(row["time/update_s"] for row in rows) / len(rows),
        "staleness_mean": sum(row["staleness/mean"] for row in rows) / len(rows),
        "staleness_max": max(row["staleness/max"] for row in rows),
        "episode_s": sum(row["episode/seconds_mean"] for row in rows) / len(rows),
        "search_s": sum(row["episode/search_seconds_mean"] for row in rows) / len(rows),
    }


def over(rounds: Sequence[Mapping[str, Mapping[str, float]]], slower: str, faster: str) -> list[float]:
    """How many times as long the `slower` side takes, in each round that has both."""
    return [r[slower]["wall_s"] / r[faster]["wall_s"] for r in rounds if slower in r and faster in r]


def medians(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Of each side and figure, over the rounds."""
    of_sides = {side: [r[side] for r in rounds if side in r] for side in rounds[0]}
    return {side: {key: statistics.median(r[key] for r in of) for key in of[0]} for side, of in of_sides.items()}


def table(sides: Mapping[str, Mapping[str, float]]) -> Table:
    printed = Table(title=f"{STEPS} steps by max_staleness, search latency median 0.3 s, p99 2 s")
    printed.add_column("")
    for heading in sides:
        printed.add_column(heading, justify="right")
    rows = {"wall s": "wall_s", "busier of learner and engine, s": "optimum_s", "of wall": "optimum_over_wall"}
    rows |= {"learner idle": "learner_idle", "rollout idle": "rollout_idle", "update s / step": "update_s"}
    rows |= {"cores busy": "cores_busy", "staleness, mean": "staleness_mean", "at most": "staleness_max"}
    rows |= {"episode s, mean": "episode_s", "of it searching": "search_s"}
    for label, key in rows.items():
        printed.add_row(label, *(f"{of_side[key]:.2f}" for of_side in sides.values()))
    return printed


def main() -> None:
    rounds = []
    for number in range(ROUNDS):
        sides = SIDES if number == 0 else (SYNCHRONOUS, ASYNCHRONOUS)
        rounds.append({side: measure(side, [*sys.argv[1:], *SIDES[side]]) for side in sides})
    speedups = over(rounds, SYNCHRONOUS, ASYNCHRONOUS)
    speedup = statistics.median(speedups)
    [slowdown] = over(rounds, EVALUATED, ASYNCHRONOUS)
    figures = {"speedup": speedup, "speedup_of_rounds": speedups, "slowdown_by_evaluator": slowdown, "rounds": rounds}
    (FOLDER / "async.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    Console().print(table(medians(rounds)))
    Console().print(
        f"asynchronous is {speedup:.2f} ({min(speedups):.2f}-{max(speedups):.2f}) times as fast; with an evaluator it"
        f" takes {slowdown:.2f} times as long"
    )
    Console().print(f"figures in {FOLDER / 'async.json'}")


if __name__ == "__main__":
    main()
