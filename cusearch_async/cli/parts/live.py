"""The display of `demo` and `launch`: the logs of the processes, the last steps as a table, and the results."""

from __future__ import annotations

import contextlib
import functools
import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from cusearch_async.alarms.firing import firing_of
from cusearch_async.alarms.history import History, Limits
from cusearch_async.cli.parts.figure import draw
from cusearch_async.cli.parts.fleet import Fleet
from cusearch_async.cli.parts.opening import is_closed
from cusearch_async.cli.parts.terminal import duration
from cusearch_async.config import Config, is_loopback
from cusearch_async.dashboard.page import write_page
from cusearch_async.data.questions import has_held_out
from cusearch_async.errors import MissingExtra, ProcessDied, first_line
from cusearch_async.lifecycle.progress import log_waiting, next_line_s
from cusearch_async.metrics.files import MetricsFile, seconds_per_step, steps_done
from cusearch_async.run.folder import CURVES, METRICS, PAGE
from cusearch_async.run.history import read_starts
from cusearch_async.run.trust import code_in
from cusearch_async.training.alarms import text_of
from cusearch_async.training.checkpoint import Checkpoint, checkpoints_of
from cusearch_async.transport.interface import Audit, Ledger, RunState
from cusearch_async.transport.server import is_listening, redis_cli_line

log = logging.getLogger(__name__)

REFRESH_S = 0.5
QUIET_S = 10.0
"""After news of a process, a line about the wait comes only when twice as long has passed without any other."""
BAR = " ▁▂▃▄▅▆▇█"
_PROGRESS = ("waiting for", "finished ", "step ", "loaded weights", "version ")
"""Beginnings of progress lines: on a terminal only the newest one of each process is shown, in place."""


class Screen:
    """On a terminal: a display that is updated in place, with new lines above it. Otherwise: a log, with a line for
    everything new, and less and less often one when there is nothing new."""

    def __init__(self, fleet: Fleet, console: Console) -> None:
        self._fleet = fleet
        self._console = console
        self._newest: dict[str, str] = {}

    def wait(
        self,
        what: Callable[[], str],
        is_done: Callable[[], bool],
        body: Callable[[], Sequence[RenderableType]],
        pace: Callable[[], str] = lambda: "",
    ) -> None:
        """Wait until `is_done`; show `what` is waited for, the seconds, the `pace` and `body`. Raises: ProcessDied."""
        began = logged = time.monotonic()
        waited_for, quiet_s = "", 0.0
        self._newest.clear()
        on_terminal = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
        with on_terminal if self._console.is_terminal else contextlib.nullcontext() as live:

            def show() -> bool:
                nonlocal logged, quiet_s, began, waited_for
                now = time.monotonic()
                has_news, is_new = self._relay(live), waited_for != what()
                if is_new:
                    began, waited_for = now, what()
                if live is not None:
                    newest = [Text(f"{name}: {line}", style="dim") for name, line in self._newest.items()]
                    live.update(Group(*body(), Text(f"{waited_for}: {now - began:.0f} s"), *newest), refresh=True)
                if has_news or is_new:
                    logged, quiet_s = now, 0.0 if is_new else QUIET_S
                elif live is None and now - logged > next_line_s(quiet_s):
                    quiet_s = now - logged
                    log.info("%s: %.0f s%s", waited_for, now - began, f"; {pace()}" if pace() else "")
                return is_done()

            self._fleet.wait(show, poll_s=REFRESH_S)
            self._relay(live)

    def _relay(self, live: Live | None) -> bool:
        """Show the log lines of the processes since the last call. Whether any went to our log."""
        has_logged = False
        for name, child in self._fleet.children.items():
            for line in child.new_lines():
                self._newest[name] = line
                if live is not None and not line.startswith(_PROGRESS):
                    live.console.print(Text(f"{name}: {line}"))
                elif live is None and not line.startswith("loaded weights"):
                    log.info("%s: %s", name, line)
                    has_logged = True
        return has_logged


def show_ways_to_look(fleet: Fleet, config: Config, console: Console) -> None:
    """Start the run's page and print its address, and two commands to paste into another terminal during the run."""
    console.print(f"the page of the run: {fleet.start_page()}", soft_wrap=True)
    trust = ["--trust"] if any(code_in(config.model_dump(mode="json"))) else []
    command = shlex.join(["cusearch", "buckets", str(config.folder / "launch.toml"), *trust])
    console.print(f"watch the run with: {command}", soft_wrap=True, markup=False)
    if config.redis.transport == "redis":
        console.print(f"or with redis-cli: {redis_cli_line(config.redis, config.folder)}", soft_wrap=True, markup=False)


def watch(fleet: Fleet, config: Config, console: Console) -> None:
    """Show the run until the learner and the evaluator are done.

    Raises: ProcessDied, also when only the learner was stopped: the evaluator would wait forever for the last version.
    """
    columns = (TextColumn("learner step"), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[pace]}"))
    progress = Progress(*columns)
    task = progress.add_task("steps", total=config.run.steps, pace="")
    before = rows_of(config.folder)
    earlier = before[-1]["epoch"] if before else None
    history = History(Limits.of(config.model_dump(mode="json")))

    @functools.lru_cache(maxsize=1)
    def alarms_after(_done: int) -> list[Text]:
        return alarm_lines(rows_of(config.folder), history, config.folder)

    def of_this_start() -> str:
        rows = rows_of(config.folder)
        is_new = bool(rows) and rows[-1]["epoch"] != earlier
        return pace(rows, config.run.steps) if is_new else ""

    def body() -> list[RenderableType]:
        rows = rows_of(config.folder)
        progress.update(task, completed=steps_done(rows), pace=of_this_start())
        return [progress, *([progress_table(rows)] if rows else []), *alarms_after(len(rows))]

    def what() -> str:
        done, steps = steps_done(rows_of(config.folder)), config.run.steps
        return f"waiting for step {done} of {steps}" if done < steps else "waiting for the learner and the evaluator"

    refuse_stopped = functools.cache(lambda: refuse_stopped_early(config))  # the checkpoints are read once

    def is_over() -> bool:
        if fleet.has_ended("learner"):
            refuse_stopped()
        return fleet.is_run_over()

    Screen(fleet, console).wait(what, is_over, body, of_this_start)


def pace(rows: list[dict[str, Any]], steps: int) -> str:
    """The time of a step and of the `steps` that are left; empty while it is not known."""
    step_s, left = seconds_per_step(rows), steps - steps_done(rows)
    if step_s is None:
        return ""
    return f"{step_s:.1f} s a step" + (f", about {duration(left * step_s)} left" if left else "")


def refuse_stopped_early(config: Config) -> None:
    """For a learner that has ended with status 0. Raises: ProcessDied when some steps are not done."""
    newest = checkpoints_of(config).latest()
    done = newest.state.step if newest else 0
    if done < config.run.steps:
        raise ProcessDied(
            f"the learner stopped at step {done} of {config.run.steps}; start launch again to continue "
            f"({shlex.join(['cusearch', 'launch', str(config.folder / 'launch.toml')])})"
        )


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; only what was appended is read again."""
    return _metrics_file(folder / METRICS).read()


@functools.lru_cache(maxsize=1)
def _metrics_file(path: Path) -> MetricsFile:
    return MetricsFile(path)


def _phase(row: Mapping[str, Any]) -> str:
    return f"{row['selection/phase']:g}" if "selection/phase" in row else "–"


def progress_table(rows: list[dict[str, Any]]) -> Table:
    """The last steps, one row each. At most 80 columns wide with up to eight depths."""
    depths = "".join(str(depth % 10) for depth in range(len(rows[-1]["depth/generated"])))
    shown = Table(box=None, pad_edge=False)
    names = ("step", "reward", "EM", "depth", f"pool\n{depths}", f"trained\n{depths}", "phase", "stale-\nness")
    for name in (*names, "wait\ns", "update\ns"):
        shown.add_column(name, justify="left" if depths in name else "right", no_wrap=True, vertical="bottom")
    for row in rows[-12:]:
        figures = (f"{row['reward/all']:.3f}", f"{row['reward/em']:.3f}", f"{row['depth/mean']:.2f}")
        pools = (bars(row["depth/generated"]), bars(row["depth/selected"]), _phase(row))
        times = (f"{row['time/wait_s']:.1f}", f"{row['time/update_s']:.1f}")
        staleness = f"{row['staleness/min']:g}-{row['staleness/max']:g}"
        shown.add_row(str(row["step"]), *figures, *pools, staleness, *times)
    return shown


def alarm_lines(rows: list[dict[str, Any]], history: History, folder: Path) -> list[Text]:
    """The alarms that fire now."""
    return [Text(f"alarm {text_of(alarm, folder)}", style="red") for alarm in firing_of(rows, history)]


def bars(counts: list[int]) -> str:
    """One small bar per depth; the largest count has a full bar."""
    most = max([*counts, 1])
    return "".join(BAR[-(-count * (len(BAR) - 1) // most)] for count in counts)


def conclude(config: Config, ledger: Ledger, counted: Audit | None, wall_s: float, console: Console) -> dict[str, Any]:
    """Print the table and the ledger, draw plot.png and write page.html. Returns the run's part of summary.json."""
    closes = is_closed(ledger, counted)
    rows = rows_of(config.folder)
    starts = read_starts(config.folder)
    earlier = starts[-1].step if starts else 0
    summary = {
        "staleness_bound": config.pool.staleness_bound,
        "steps": len(rows),
        "wall_s": round(wall_s, 1),
        "trajectories_trained": ledger.trained,
        "ledger": asdict(ledger) | {"closes": closes},
    }
    if not rows:  # nothing to draw
        console.print(f"no step was done in {wall_s:.0f} s, start-up included")
        return summary
    title = f"{config.run.name}: {config.method.name}, staleness ≤ {config.pool.staleness_bound}"
    try:
        draw(rows, title, config.folder / "plot.png")
    except MissingExtra as error:
        console.print(f"plot.png was not drawn: {error}", style="yellow", soft_wrap=True, markup=False)
    try:
        write_page(config.folder, config.folder / PAGE)
    except Exception as error:
        console.print(f"{PAGE} was not written: {first_line(error)}", style="yellow", soft_wrap=True, markup=False)
    staleness_max = max(row["staleness/max"] for row in rows)
    trapped = sum(row.get("selection/phase_trapped", 0.0) > 0 for row in rows)
    console.print(progress_table(rows))
    steps = steps_done(rows)
    done = f"{steps} steps, {max(0, steps - earlier)} of them" if earlier else f"{steps} steps"
    console.print(
        f"{done} in {wall_s:.0f} s, start-up included; {ledger.trained} trajectories trained, max staleness "
        f"{staleness_max:g} (bound {config.pool.staleness_bound}); the ledger "
        + ("closes" if closes else "DOES NOT CLOSE")
    )
    for finding in counted.findings if counted else ():
        console.print(Text(finding, style="red"), soft_wrap=True)
    if trapped:
        console.print(
            f"the phase was trapped in {trapped} of {len(rows)} steps: one depth alone filled the budget, and no "
            "deeper trajectory was trained on; consider method.phase_reserve",
            style="yellow",
        )
    return summary | {
        "staleness_max": staleness_max,
        "staleness_mean": sum(row["staleness/mean"] for row in rows) / len(rows),
        "phase_after": rows[-1].get("selection/phase"),
        "phase_trapped_steps": trapped,
    }


def whole_checkpoint(config: Config) -> Checkpoint | None:
    """The newest checkpoint whose files match their checksums. Newer damaged ones are logged. None without any
    checkpoint. Raises: ConfigError when all are damaged."""
    with log_waiting(log, "waiting for the newest checkpoint to be verified"):
        return checkpoints_of(config).newest(RunState())


def print_results(config: Config, newest: Checkpoint | None, console: Console) -> None:
    """Print where the results are and how to use them. `newest` is the verified checkpoint to use."""
    settings, plot = config.folder / "config.toml", config.folder / "plot.png"
    page = config.folder / PAGE
    lines: dict[str, object] = {"page": page} if page.exists() else {}
    lines |= {"plot": plot} if plot.exists() else {}
    lines |= {
        "metrics": config.folder / METRICS,
        "curves": shlex.join(["tensorboard", "--logdir", str(config.folder / CURVES)]),
    }
    if newest is not None:
        model, suite = newest.path / "model", [] if has_held_out(config) else ["--suite", "nq"]
        command = ["cusearch", "eval", str(settings), "--checkpoint", str(model), *suite]
        lines |= {"model": model, "next": shlex.join(command)}
        if config.searching and not is_loopback(config.retriever.url):
            lines[""] = f"(it needs the retriever at {config.retriever.url})"
        elif config.searching and not is_listening(config.retriever.url):
            lines[""] = f"(it needs the retriever: {shlex.join(['cusearch', 'worker', 'retriever', str(settings)])})"
    best = checkpoints_of(config).best()
    if best is not None and newest is not None and best.path != newest.path:
        lines["best"] = f"{best.path / 'model'} (held-out questions, eval.every)"
    for name, text in lines.items():
        console.print(Text(f"{name:<8} {text}"), soft_wrap=True)
