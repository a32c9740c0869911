"""What `demo` and `launch` show of a run: what its processes say, the last steps as a table, what it leaves behind."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cusearch_async.cli.figure import draw
from cusearch_async.cli.fleet import Fleet
from cusearch_async.config import Config
from cusearch_async.errors import ProcessDied
from cusearch_async.lifecycle.progress import LOG_EVERY_S, log_waiting
from cusearch_async.metrics.files import read_metrics
from cusearch_async.run_folder import METRICS
from cusearch_async.training.checkpoint import Checkpoint
from cusearch_async.training.starts import checkpoints_of
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import Audit, Ledger, RunState
from cusearch_async.transport.server import redis_cli_line

log = logging.getLogger(__name__)

REFRESH_S = 0.5
BAR = " ▁▂▃▄▅▆▇█"
_FAR = ("waiting for", "played ", "step ", "loaded weights", "version ")
"""How lines begin that say how far a process is: on a terminal the newest is shown in place."""


class Screen:
    """On a terminal one place that changes, with what is new above it; else a log, a line whenever something is new and
    one every LOG_EVERY_S when nothing is."""

    def __init__(self, fleet: Fleet, console: Console) -> None:
        self._fleet = fleet
        self._console = console
        self._newest: dict[str, str] = {}

    def wait(
        self, what: Callable[[], str], is_done: Callable[[], bool], body: Callable[[], Sequence[RenderableType]]
    ) -> None:
        """Until `is_done`, showing `what` is waited for and `body`. Raises: ProcessDied."""
        began = said = time.monotonic()
        self._newest.clear()
        with self._live() as live:

            def show() -> bool:
                nonlocal said
                now = time.monotonic()
                has_spoken = self._relay(live)
                if live is not None:
                    newest = [Text(f"{name}: {line}", style="dim") for name, line in self._newest.items()]
                    live.update(Group(*body(), Text(f"{what()}: {now - began:.0f} s"), *newest), refresh=True)
                elif not has_spoken and now - said > LOG_EVERY_S:
                    log.info("%s: %.0f s", what(), now - began)
                said = now if has_spoken or now - said > LOG_EVERY_S else said
                return is_done()

            self._fleet.wait(show, poll_s=REFRESH_S)
            self._relay(live)

    @contextlib.contextmanager
    def _live(self) -> Iterator[Live | None]:
        if not self._console.is_terminal:
            yield None
            return
        with Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop") as live:
            yield live

    def _relay(self, live: Live | None) -> bool:
        """Pass on what the processes have said since the last call; whether it was anything."""
        has_spoken = False
        for name, child in self._fleet.children.items():
            for line in child.new_lines():
                self._newest[name] = line
                if live is not None and not line.startswith(_FAR):
                    live.console.print(Text(f"{name}: {line}"))
                elif live is None and not line.startswith("loaded weights"):
                    log.info("%s: %s", name, line)
                    has_spoken = True
        return has_spoken


def print_inspection_commands(config: Config, console: Console) -> None:
    """Two lines to be pasted into another terminal while the run goes on."""
    console.print(f"look into the run with: cusearch buckets {config.folder / 'launch.toml'}", soft_wrap=True)
    console.print(f"or with redis-cli: {redis_cli_line(config)}", soft_wrap=True, markup=False)


def watch(fleet: Fleet, config: Config, console: Console) -> None:
    """Show the run until the learner and the evaluator are done.

    Raises: ProcessDied, also for a learner that was stopped alone: the evaluator would wait on for the last version."""
    progress = Progress(TextColumn("learner step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    task = progress.add_task("steps", total=config.run.steps)
    metrics = MetricsFile(config.folder / METRICS)

    def body() -> list[RenderableType]:
        rows = metrics.rows()
        progress.update(task, completed=len(rows))
        return [progress, *([progress_table(rows)] if rows else [])]

    def what() -> str:
        done = len(metrics.rows())
        return f"waiting for step {done}" if done < config.run.steps else "waiting for the learner and the evaluator"

    refuse_stopped = functools.cache(lambda: refuse_stopped_early(config))  # the checkpoints are read once

    def is_over() -> bool:
        if fleet.has_ended("learner"):
            refuse_stopped()
        return fleet.is_run_over()

    Screen(fleet, console).wait(what, is_over, body)


def refuse_stopped_early(config: Config) -> None:
    """Of a learner that has ended well. Raises: ProcessDied when it has left steps undone."""
    newest = newest_checkpoint(config)
    done = newest.state.step if newest else 0
    if done < config.run.steps:
        raise ProcessDied(
            f"the learner stopped at step {done} of {config.run.steps}; start launch again to go on "
            f"(cusearch launch {config.folder / 'launch.toml'})"
        )


class MetricsFile:
    """The rows of a metrics.jsonl, read again only when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._rows: list[dict[str, Any]] = []

    def rows(self) -> list[dict[str, Any]]:
        status = self._path.stat() if self._path.exists() else None
        seen = (status.st_size, status.st_mtime_ns) if status else None
        if seen != self._seen:
            self._seen, self._rows = seen, read_metrics(self._path)
        return self._rows


def progress_table(rows: list[dict[str, Any]]) -> Table:
    """The last steps, one row each; 80 columns wide at most while there are no more than eight depths."""
    depths = "".join(str(depth % 10) for depth in range(len(rows[-1]["depth/generated"])))
    shown = Table(box=None, pad_edge=False)
    names = ("step", "reward", "EM", "depth", f"pool\n{depths}", f"trained\n{depths}", "phase", "stale-\nness")
    for name in (*names, "wait\ns", "update\ns"):
        shown.add_column(name, justify="left" if depths in name else "right", no_wrap=True, vertical="bottom")
    for row in rows[-12:]:
        shown.add_row(
            str(row["step"]),
            f"{row['reward/all']:.3f}",
            f"{row['reward/em']:.3f}",
            f"{row['depth/mean']:.2f}",
            bars(row["depth/generated"]),
            bars(row["depth/selected"]),
            f"{row.get('selection/phase', 0):g}",
            f"{row['staleness/min']:g}-{row['staleness/max']:g}",
            f"{row['time/wait_s']:.1f}",
            f"{row['time/update_s']:.1f}",
        )
    return shown


def bars(counts: list[int]) -> str:
    """A small bar per depth: the tallest is full."""
    most = max([*counts, 1])
    return "".join(BAR[-(-count * (len(BAR) - 1) // most)] for count in counts)


async def read_ledger(config: Config) -> tuple[Ledger, Audit]:
    """The counters, and what counting the keys has found."""
    async with open_buffer(config) as buffer:
        return await buffer.ledger(), await buffer.audit()


def conclude(config: Config, ledger: Ledger, counted: Audit, wall_s: float, console: Console) -> dict[str, Any]:
    """Print the table and what became of the trajectories, draw plot.png; returns the run's part of summary.json."""
    closes = ledger.closes and counted.closes
    rows = read_metrics(config.folder / METRICS)
    summary = {
        "staleness_bound": config.pool.max_staleness,
        "steps": len(rows),
        "wall_s": round(wall_s, 1),
        "trajectories_trained": ledger.trained,
        "ledger": {name: getattr(ledger, name) for name in Ledger.__dataclass_fields__} | {"closes": closes},
    }
    if not rows:  # there is nothing to draw of
        console.print(f"no step was done in {wall_s:.0f} s with start-up")
        return summary
    title = f"{config.run.name}: {config.method.name}, staleness ≤ {config.pool.max_staleness}"
    draw(rows, title, config.folder / "plot.png")
    staleness_max = max(row["staleness/max"] for row in rows)
    trapped = sum(row.get("selection/phase_trapped", 0.0) > 0 for row in rows)
    console.print(progress_table(rows))
    console.print(
        f"{len(rows)} steps in {wall_s:.0f} s with start-up; {ledger.trained} trajectories trained, staleness at most "
        f"{staleness_max:g} (bound {config.pool.max_staleness}); "
        f"the ledger {'closes' if closes else 'DOES NOT CLOSE'}"
    )
    for finding in counted.findings:
        console.print(Text(finding, style="red"), soft_wrap=True)
    if trapped:
        console.print(
            f"the phase was trapped in {trapped} of {len(rows)} steps: one depth alone filled the budget and nothing "
            "deeper was trained on; consider method.phase_reserve",
            style="yellow",
        )
    return summary | {
        "staleness_max": staleness_max,
        "staleness_mean": sum(row["staleness/mean"] for row in rows) / len(rows),
        "phase_after": rows[-1].get("selection/phase"),
        "phase_trapped_steps": trapped,
    }


def newest_checkpoint(config: Config) -> Checkpoint | None:
    """Of the course that the run is on; whether it is whole is not looked at."""
    return checkpoints_of(config).latest()


def whole_checkpoint(config: Config) -> Checkpoint | None:
    """The newest one whose files are as they were written; newer ones that are torn are named in the log. None when
    there are none at all. Raises: ConfigError when none is whole."""
    with log_waiting(log, "waiting for the newest checkpoint to be verified"):
        return checkpoints_of(config).newest(RunState())


def print_results(config: Config, newest: Checkpoint | None, console: Console) -> None:
    """Where the results are, and what to do with them; each path whole on a line of its own. `newest` is the whole
    checkpoint whose model is recommended."""
    settings = config.folder / "config.toml"
    lines = [
        ("plot", config.folder / "plot.png"),
        ("metrics", config.folder / METRICS),
        ("curves", f"tensorboard --logdir {config.folder / 'tensorboard'}"),
    ]
    if newest is not None:
        model = newest.path / "model"
        lines += [
            ("model", model),
            ("next", f"cusearch eval {settings} --checkpoint {model}"),
            ("", f"(it needs the retriever: python -m cusearch_async.processes.start retriever {settings})"),
        ]
    for name, text in lines:
        console.print(Text(f"{name:<8} {text}"), soft_wrap=True)
