"""What asynchrony saves when searches take as long as on the web: the same config and number of steps, synchronously
(max_staleness = 0), with a max_staleness of 1, 2, 4 and 8, and with 2 and an evaluator beside, one after the other on
the same machine.

    python -m tests.bench.bench_async [--section.key value]...

The clock runs from the learner's first wait to the end of its last step, workers being up and warm in all cases;
the process start-up is not counted. No overlap can make a run shorter than the busier of learner and engine was in it:
the learner when it did not wait for a pool, the engine when it had at least one request. Figures also go to
runs/bench/async.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cusearch_async import run_folder
from cusearch_async.cli.fleet import Fleet
from cusearch_async.config import Config, load_config
from cusearch_async.lifecycle.ports import free_port
from cusearch_async.metrics.files import read_metrics

CONFIG = Path(__file__).parents[2] / "configs" / "atlas.toml"
FOLDER = Path("runs/bench")
STEPS = 12
STALENESS = (0, 1, 2, 4, 8)
WEB_LATENCY = ["--retriever.latency_median_s", "0.3", "--retriever.latency_p99_s", "2.0"]


def measure(name: str, overrides: list[str]) -> dict[str, float]:
    """Run once; wall seconds and shares of the whole run."""
    ports = ["--redis.url", f"redis://127.0.0.1:{free_port()}/0"]
    ports += ["--retriever.url", f"http://127.0.0.1:{free_port()}"]
    folder = ["--run.folder", str(FOLDER / name), "--learner.checkpoint_every", str(STEPS)]
    config = load_config(CONFIG, ["--steps", str(STEPS), *WEB_LATENCY, *folder, *ports, *overrides])
    run_folder.forget(config.folder)
    with Fleet(config) as fleet:
        fleet.start_services()
        beside = {"rollout-0": "rollout"} | ({"evaluator": "evaluator"} if config.eval.every else {})
        for worker, module in beside.items():
            fleet.start_worker(worker, module)
        logs = [config.folder / "logs" / f"{worker}.log" for worker in beside]
        fleet.wait(lambda: all("ready" in log.read_text(errors="replace") for log in logs))
        fleet.start_worker("learner", "learner")
        fleet.wait(lambda: fleet.has_ended("learner"))
    return shares(config, read_metrics(config.folder / "metrics.jsonl"))


def shares(config: Config, rows: list[dict[str, Any]]) -> dict[str, float]:
    wall = sum(row["time/step_s"] for row in rows)
    waited = sum(row["time/wait_s"] for row in rows)
    engine_idle = sum(row["rollout/idle_share"] * row["time/step_s"] for row in rows)
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


def table(runs: Mapping[str, Mapping[str, float]]) -> Table:
    printed = Table(title=f"{STEPS} steps by max_staleness, search latency median 0.3 s, p99 2 s")
    printed.add_column("")
    for heading in runs:
        printed.add_column(heading.removeprefix("staleness "), justify="right")
    rows = {"wall s": "wall_s", "busier of learner and engine, s": "optimum_s", "of wall": "optimum_over_wall"}
    rows |= {"learner idle": "learner_idle", "rollout idle": "rollout_idle", "update s / step": "update_s"}
    rows |= {"staleness, mean": "staleness_mean", "at most": "staleness_max"}
    rows |= {"episode s, mean": "episode_s", "of it searching": "search_s"}
    for label, key in rows.items():
        printed.add_row(label, *(f"{of_run[key]:.2f}" for of_run in runs.values()))
    return printed


def main() -> None:
    overrides = sys.argv[1:]
    runs = {
        f"staleness {most}": measure(f"staleness-{most}", [*overrides, "--pool.max_staleness", str(most)])
        for most in STALENESS
    }
    sync, asynchronous = runs["staleness 0"], runs["staleness 2"]
    evaluated = measure("evaluated", [*overrides, "--eval.every", str(STEPS // 3)])
    speedup = sync["wall_s"] / asynchronous["wall_s"]
    slowdown = evaluated["wall_s"] / asynchronous["wall_s"]
    figures = {
        "speedup": speedup,
        "slowdown_by_evaluator": slowdown,
        "wall_sync_s": sync["wall_s"],
        "wall_async_s": asynchronous["wall_s"],
        "learner_idle_sync": sync["learner_idle"],
        "learner_idle_async": asynchronous["learner_idle"],
        "rollout_idle_sync": sync["rollout_idle"],
        "rollout_idle_async": asynchronous["rollout_idle"],
        "runs": runs | {"evaluated": evaluated},
    }
    (FOLDER / "async.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    Console().print(table(runs | {"2, evaluated": evaluated}))
    Console().print(
        f"asynchronous is {speedup:.2f} times as fast; with an evaluator it takes {slowdown:.2f} times as long"
    )
    Console().print(f"figures in {FOLDER / 'async.json'}")


if __name__ == "__main__":
    main()
