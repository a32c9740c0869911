"""The buffer of a run, as `buckets`, `workers` and `ledger` show it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cusearch_async.cli.terminal import plain
from cusearch_async.config import Config
from cusearch_async.transport.interface import Ledger, OperatorBuffer, Queues, RunState, WorkerStatus
from cusearch_async.transport.server import redis_cli_line

SHADES = (
    "grey62 on grey15",
    "white on #16404d",
    "white on #1d5c6e",
    "white on #26798f",
    "white on #3097b0",
    "black on #55bcd2",
    "black on #a4e4f1",
)
"""From an empty cell to the fullest cell."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    at: float
    state: RunState
    ledger: Ledger
    queues: Queues
    depth_by_version: dict[tuple[int, int], int]
    workers: dict[str, WorkerStatus]


async def look(buffer: OperatorBuffer) -> Snapshot:
    state = await buffer.state()
    ledger, queues = await buffer.ledger(), await buffer.queues(state.step)
    return Snapshot(time.monotonic(), state, ledger, queues, await buffer.depth_by_version(), await buffer.workers())


def view(now: Snapshot, before: Snapshot | None, config: Config) -> RenderableType:
    state = now.state
    paused = "  [bold red]paused[/]" if state.paused else ""
    fields = "".join(f"{name} {value:g}   " for name, value in state.fields.items())
    head = (
        f"run [bold]{config.run.name}[/]   step {state.step} of {config.run.steps}   {fields}"
        f"weights {state.weights or 'none yet'}   next ticket {state.next_ticket}   learner epoch {state.epoch}{paused}"
    )
    return Group(
        Text.from_markup(head),
        Columns(
            [
                Panel(buckets(now, config), title="buffered: depth × staleness"),
                Panel(groups(now, before, config), title="groups"),
            ]
        ),
        Panel(workers(now.workers), title="workers"),
        Panel(ledger(now.ledger), title="ledger"),
        Text(f"inspect it with: {redis_cli_line(config)}", no_wrap=True, overflow="ignore"),
    )


def buckets(now: Snapshot, config: Config) -> Table:
    """One row per depth, one column per staleness; fuller cells are brighter."""
    ages = {cell: max(0, now.state.step - cell[1]) for cell in now.depth_by_version}
    oldest = max([*ages.values(), config.pool.max_staleness])
    counts = [[0] * (oldest + 1) for _ in range(config.episode.s_max + 1)]
    for cell, count in now.depth_by_version.items():
        counts[cell[0]][ages[cell]] += count
    most = max(max(row) for row in counts)
    shown = Table(box=None, pad_edge=False)
    shown.add_column("depth", justify="right")
    for age in range(oldest + 1):
        shown.add_column(str(age), justify="right")
    shown.add_column("all", justify="right")
    shown.add_column("")
    fullest = max(sum(row) for row in counts)
    for depth, row in enumerate(counts):
        cells = [Text(f" {count or '·'} ", style=_shade(count, most)) for count in row]
        bar = "█" * round(24 * sum(row) / fullest) if fullest else ""
        shown.add_row(str(depth), *cells, str(sum(row)), Text(bar, style="cyan"))
    return shown


def _shade(count: int, most: int) -> str:
    return SHADES[-(-count * (len(SHADES) - 1) // most)] if most else SHADES[0]


def groups(now: Snapshot, before: Snapshot | None, config: Config) -> Table:
    queues = now.queues
    shown = Table(box=None, show_header=False, pad_edge=False)
    shown.add_row("next pool", f"{queues.ready_of_pool} of {config.questions_per_step} groups ready")
    shown.add_row("ready", f"{queues.ready} groups")
    shown.add_row("leased", f"{queues.leased} tickets")
    shown.add_row("requeued", f"{queues.requeued} tickets")
    shown.add_row("incomplete", f"{now.ledger.incomplete_groups} groups, {now.ledger.failed_rollouts} rollouts")
    shown.add_row("buffered", f"{now.ledger.buffered} of {config.buffer_limit}, {now.ledger.bytes / 2**20:.1f} MiB")
    if before is not None:
        seconds = now.at - before.at
        shown.add_row("finished", f"{(now.ledger.finished - before.ledger.finished) / seconds:.1f} /s")
    return shown


def workers(found: dict[str, WorkerStatus]) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("worker", "heartbeat", "version", "in flight", "episodes", "tokens/s", "retriever"):
        shown.add_column(
            name, justify="left" if name == "worker" else "right", no_wrap=name != "worker", overflow="fold"
        )
    for name, status in sorted(found.items()):
        down = status.retriever_down_s
        shown.add_row(
            plain(name),
            Text(f"{max(0.0, status.heartbeat_age_s):.0f} s ago", style="green" if status.is_alive else "red"),
            str(status.version),
            str(status.in_flight),
            str(status.episodes),
            f"{status.sampled_tokens / status.busy_s:.0f}" if status.busy_s else "–",
            Text(f"down {down:.0f} s", style="red") if down else Text("ok", style="green"),
        )
    if not found:
        shown.add_row(Text("none", style="red"))
    return shown


def ledger(counts: Ledger) -> Text:
    """The ledger in two lines, and whether it closes."""
    closes = "[green]closes[/]" if counts.closes else "[bold red]DOES NOT CLOSE[/]"
    return Text.from_markup(
        f"finished {counts.finished} = buffered {counts.buffered} + claimed {counts.claimed} "
        f"+ trained {counts.trained} + unselected {counts.unselected} + quarantined {counts.quarantined} "
        f"+ lost {counts.lost}   {closes}\n"
        f"requeued {counts.requeued}   duplicates refused {counts.duplicates_refused}   "
        f"late refused {counts.late_refused}"
    )
