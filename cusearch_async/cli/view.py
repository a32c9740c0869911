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

SHADES = ("dim", "", "bold", "reverse")
"""From an empty cell to the fullest cell, on dark and on light terminals."""
BAR, EIGHTHS = 8, " ▏▎▍▌▋▊▉"
"""Width of the longest bar, in columns, and what its last column may be."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    at: float
    state: RunState
    ledger: Ledger
    pool: int
    """The pool that the learner takes next."""
    queues: Queues
    """With how much of that pool is ready."""
    depth_by_version: dict[tuple[int, int], int]
    workers: dict[str, WorkerStatus]


async def look(buffer: OperatorBuffer) -> Snapshot:
    state = await buffer.state()
    ledger, pool, queues = await buffer.ledger(), state.step, await buffer.queues(state.step)
    while queues.is_claimed:  # the learner trains on it, or has been restarted and will take it again
        pool += 1
        queues = await buffer.queues(pool)
    depth_by_version = await buffer.depth_by_version()
    return Snapshot(time.monotonic(), state, ledger, pool, queues, depth_by_version, await buffer.workers())


def view(now: Snapshot, before: Snapshot | None, config: Config) -> RenderableType:
    """On 80 columns and 24 lines all but the last workers is seen, with up to six depths and a staleness of two; the
    ledger always."""
    alive = sum(status.is_alive for status in now.workers.values())
    return Group(
        head(now.state, config),
        Panel(ledger(now.ledger), title="ledger", expand=False),
        Columns(
            [
                Panel(buckets(now, config), title="buffered: depth × staleness", expand=False),
                Panel(groups(now, before, config), title="groups", expand=False),
            ]
        ),
        Panel(workers(now.workers), title=f"workers: {alive} alive of {len(now.workers)}", expand=False),
        Text(f"inspect it with: {redis_cli_line(config)}", no_wrap=True, overflow="ignore"),
    )


def head(state: RunState, config: Config) -> Text:
    shown = Text.assemble("run ", (config.run.name, "bold"), f"   step {state.step} of {config.run.steps}")
    for name, value in state.fields.items():
        shown.append(f"   {name} {value:g}")
    shown.append(f"   weights {state.weights or 'none yet'}   epoch {state.epoch}   next ticket {state.next_ticket}")
    if state.paused:
        shown.append("   paused", "bold red")
    if state.is_finished:
        shown.append("   finished", "bold")
    return shown


def buckets(now: Snapshot, config: Config) -> Table:
    """One row per depth, one column per staleness; fuller cells stand out more."""
    ages = {cell: max(0, now.state.step - cell[1]) for cell in now.depth_by_version}
    oldest = max([*ages.values(), config.pool.max_staleness])
    counts = [[0] * (oldest + 1) for _ in range(config.episode.s_max + 1)]
    for cell, count in now.depth_by_version.items():
        counts[cell[0]][ages[cell]] += count
    most = max(max(row) for row in counts)
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("depth", justify="right")
    for age in range(oldest + 1):
        shown.add_column(str(age), justify="right")
    shown.add_column("all", justify="right")
    shown.add_column("")
    fullest = max(sum(row) for row in counts)
    for depth, row in enumerate(counts):
        cells = [Text(f" {count or '·'} ", style=_shade(count, most)) for count in row]
        shown.add_row(str(depth), *cells, str(sum(row)), _bar(sum(row), fullest))
    return shown


def _shade(count: int, most: int) -> str:
    return SHADES[-(-count * (len(SHADES) - 1) // most)] if most else SHADES[0]


def _bar(count: int, most: int) -> str:
    """An eighth of a column at least, for any count but 0."""
    full, rest = divmod(-(-8 * BAR * count // most), 8) if most else (0, 0)
    return "█" * full + EIGHTHS[rest].strip()


def groups(now: Snapshot, before: Snapshot | None, config: Config) -> Table:
    queues, needed = now.queues, config.questions_per_step
    shown = Table(box=None, show_header=False, pad_edge=False)
    if now.pool > now.state.step:
        shown.add_row("trains on", f"pool {now.state.step}")
    if now.pool < config.run.steps:
        shown.add_row(f"pool {now.pool}", f"{min(queues.ready_of_pool, needed)} of {needed} ready")
    shown.add_row("all ready", f"{queues.ready} groups")
    shown.add_row("leased", f"{queues.leased} tickets")
    shown.add_row("requeued", f"{queues.requeued} tickets")
    shown.add_row("incomplete", f"{now.ledger.incomplete_groups} groups")
    shown.add_row("buffered", f"{now.ledger.buffered} of {config.buffer_limit}")
    shown.add_row("", f"{now.ledger.bytes / 2**20:.1f} MiB")
    if before is not None:
        seconds = now.at - before.at
        shown.add_row("finished", f"{(now.ledger.finished - before.ledger.finished) / seconds:.1f} /s")
    return shown


def workers(found: dict[str, WorkerStatus]) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("worker", "heartbeat", "version", "in flight", "episodes", "tokens/s", "state"):
        is_text = name in ("worker", "state")
        shown.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for name, status in sorted(found.items()):
        speed = f"{status.sampled_tokens / status.busy_s:.0f}" if status.busy_s else "–"
        figures = [str(status.version), str(status.in_flight), str(status.episodes), speed]
        beat = Text(f"{max(0.0, status.heartbeat_age_s):.0f} s ago", style="green" if status.is_alive else "red")
        shown.add_row(plain(name), beat, *(["–"] * 4 if status.starting else figures), _does(status))
    if not found:
        shown.add_row(Text("none", style="red"))
    return shown


def _does(status: WorkerStatus) -> Text:
    if not status.is_alive:
        return Text("silent", style="red")
    if status.starting:
        return plain(f"{status.starting}, {status.alive_s:.0f} s")
    if status.retriever_down_s:
        return Text(f"retriever down {status.retriever_down_s:.0f} s", style="red")
    return Text("ok", style="green")


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
