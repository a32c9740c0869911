"""`cusearch demo`: train a search agent on the atlas world, with the real parts, and show what it learned."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cusearch_async.cli.fleet import Fleet
from cusearch_async.cli.plot import draw
from cusearch_async.cli.reset import forget_folder, forget_keys, refuse_if_alive
from cusearch_async.config import CONFIG_HELP, Config, load_config
from cusearch_async.metrics import read_metrics
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.contract import Ledger
from cusearch_async.transport.server import is_listening

log = logging.getLogger(__name__)

REFRESH_S = 0.5
BAR = " ▁▂▃▄▅▆▇█"


def add(commands: Any) -> None:
    parser = commands.add_parser("demo", help="train a small search agent on the embedded atlas world")
    parser.add_argument("config", type=Path, nargs="?", default=Path("atlas"), help=CONFIG_HELP)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, ["--run.folder", "runs/demo", *overrides])
    console = Console()
    started = time.monotonic()
    from cusearch_async.models import check_model  # noqa: PLC0415  (transformers only where it is needed)

    check_model(config.model.location, config.episode.max_tokens)
    if is_listening(config.redis.url):
        asyncio.run(refuse_if_alive(config))
    forget_folder(config.folder)
    with Fleet(config) as fleet:
        fleet.start_services()
        asyncio.run(forget_keys(config))
        console.print("scoring the starter policy on held-out cities …")
        before = evaluate(fleet, config, config.model.location, "before")
        fleet.start_run()
        watch(fleet, config, console)
        ledger = asyncio.run(read_ledger(config))
        fleet.stop(*(name for name in list(fleet.processes) if name.startswith(("rollout", "learner", "evaluator"))))
        console.print("scoring the trained policy on the same questions …")
        trained = config.folder / "checkpoints" / f"step{config.run.steps:06d}" / "model"
        after = evaluate(fleet, config, str(trained), "after")
    finish(config, before, after, ledger, time.monotonic() - started, console)


async def read_ledger(config: Config) -> Ledger:
    async with open_buffer(config) as buffer:
        return await buffer.ledger()


def evaluate(fleet: Fleet, config: Config, model: str, name: str) -> dict[str, dict[str, float]]:
    """Score a model in a process of its own."""
    output = config.folder / f"eval_{name}.json"
    fleet.start_command(f"eval_{name}", "eval", options=["--checkpoint", model, "--output", str(output)])
    fleet.wait(lambda: fleet.has_ended(f"eval_{name}"))
    fleet.stop(f"eval_{name}")
    scores: dict[str, dict[str, float]] = json.loads(output.read_text(encoding="utf-8"))
    return scores


def watch(fleet: Fleet, config: Config, console: Console) -> None:
    """Show the run until the learner is done."""
    progress = Progress(
        TextColumn("learner step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    task = progress.add_task("steps", total=config.run.steps)
    metrics = config.folder / "metrics.jsonl"
    printed = 0
    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def show() -> bool:
            nonlocal printed
            rows = read_metrics(metrics)
            progress.update(task, completed=len(rows))
            live.update(Group(progress, *([progress_table(rows)] if rows else ["waiting for the first pool …"])))
            if not console.is_terminal:
                for row in rows[printed:]:
                    print(one_line(row), file=sys.stderr)
            printed = len(rows)
            return fleet.is_run_over()

        fleet.wait(show, poll_s=REFRESH_S)
    console.print(progress_table(read_metrics(metrics)))


def one_line(row: dict[str, Any]) -> str:
    return (
        f"step {row['step']:3d}  reward {row['reward/all']:.3f}  em {row['reward/em']:.3f}  "
        f"depth {row['depth/mean']:.2f}  staleness {row['staleness/mean']:.1f}"
    )


def progress_table(rows: list[dict[str, Any]]) -> Table:
    """The last steps, one row each."""
    shown = Table(box=None)
    names = (
        "step",
        "reward",
        "EM",
        "depth",
        "pool by depth",
        "trained by depth",
        "phase",
        "staleness",
        "wait s",
        "update s",
    )
    for name in names:
        shown.add_column(name, justify="left" if "by depth" in name else "right")
    for row in rows[-12:]:
        shown.add_row(
            str(row["step"]),
            f"{row['reward/all']:.3f}",
            f"{row['reward/em']:.3f}",
            f"{row['depth/mean']:.2f}",
            bars(row["depth/generated"]),
            bars(row["depth/selected"]),
            f"{row.get('sdga/phase', 0):g}",
            f"{row['staleness/min']:g}-{row['staleness/max']:g}",
            f"{row['time/wait_s']:.1f}",
            f"{row['time/update_s']:.1f}",
        )
    return shown


def bars(counts: list[int]) -> str:
    """A small bar per depth: the tallest is full."""
    most = max([*counts, 1])
    return "".join(BAR[-(-count * (len(BAR) - 1) // most)] for count in counts)


def finish(
    config: Config,
    before: dict[str, dict[str, float]],
    after: dict[str, dict[str, float]],
    ledger: Ledger,
    wall_s: float,
    console: Console,
) -> None:
    """Write summary.json and the plot, print the table."""
    rows = read_metrics(config.folder / "metrics.jsonl")
    summary = {
        "em_before": before["all"]["em"],
        "em_after": after["all"]["em"],
        "depth_before": before["all"]["depth"],
        "depth_after": after["all"]["depth"],
        "by_category": {name: {"before": before[name], "after": after[name]} for name in before},
        "staleness_max": max(row["staleness/max"] for row in rows),
        "staleness_mean": sum(row["staleness/mean"] for row in rows) / len(rows),
        "staleness_bound": config.pool.max_staleness,
        "phase_after": rows[-1].get("sdga/phase"),
        "phase_trapped_steps": sum(row.get("sdga/phase_trapped", 0.0) > 0 for row in rows),
        "steps": len(rows),
        "wall_s": round(wall_s, 1),
        "trajectories_trained": ledger.trained,
        "ledger": {name: getattr(ledger, name) for name in Ledger.__dataclass_fields__} | {"closes": ledger.closes},
    }
    (config.folder / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    picture = config.folder / "plot.png"
    draw(rows, f"{config.method.name} on the atlas world, staleness ≤ {config.pool.max_staleness}", picture)
    console.print(comparison(before, after))
    console.print(
        f"{len(rows)} steps in {wall_s:.0f} s with start-up and scoring; {ledger.trained} trajectories trained, "
        f"staleness at most {summary['staleness_max']:g} (bound {config.pool.max_staleness}); "
        f"the ledger {'closes' if ledger.closes else 'DOES NOT CLOSE'}"
    )
    if summary["phase_trapped_steps"]:
        console.print(
            f"the phase was trapped in {summary['phase_trapped_steps']} of {len(rows)} steps: one depth alone filled "
            "the budget and nothing deeper was trained on; consider method.phase_reserve",
            style="yellow",
        )
    console.print(
        f"plot: {picture}   metrics: {config.folder / 'metrics.jsonl'}   summary: {config.folder / 'summary.json'}"
    )


def comparison(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> Table:
    shown = Table(title="held-out cities, greedy: before → after")
    shown.add_column("questions with")
    for name in ("n", "reward", "EM", "search depth"):
        shown.add_column(name, justify="right")
    for category, b in before.items():
        a = after[category]
        changes = (f"{b[key]:.2f} → {a[key]:.2f}" for key in ("reward", "em", "depth"))
        shown.add_row(category, str(int(b["count"])), *changes, style="bold" if category == "all" else None)
    return shown
