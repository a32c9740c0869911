"""`cusearch buckets CONFIG`: shows the buffer of a live run, refreshed until ctrl-C.

With --ledger it shows where every finished trajectory is, from the counters, compares them with the keys in Redis, and
exits with status 1 when they do not agree."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from dataclasses import asdict

import msgspec
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cusearch_async.cli.parts.arguments import add_config
from cusearch_async.cli.parts.opening import is_closed, open_run, read_ledger
from cusearch_async.cli.parts.terminal import plain
from cusearch_async.config import Config, load_config
from cusearch_async.dashboard.snapshot import Snapshot, look
from cusearch_async.errors import ConfigError
from cusearch_async.run.identity import Identity
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import Audit, Ledger, RunState, WorkerStatus
from cusearch_async.transport.server import redis_cli_line

REFRESH_S = 1.0
SHADES = ("dim", "", "bold", "reverse")
"""From an empty cell to the fullest cell, on dark and on light terminals."""
BAR, EIGHTHS = 8, " ▏▎▍▌▋▊▉"
"""Width of the longest bar, in columns, and what its last column may be."""


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--once", action="store_true", help="print one view and exit")
    shown.add_argument("--ledger", action="store_true", help="print the ledger, and check it against the keys in Redis")
    shown.add_argument("--workers", action="store_true", help="list the rollout workers")
    shown.add_argument("--contract", action="store_true", help="show the run contract, which every process must match")
    text = "--ledger: read counters only; do not scan the keys (this blocks Redis)"
    parser.add_argument("--quick", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="--once and --ledger: print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    if arguments.quick and not arguments.ledger:
        raise ConfigError("--quick is an option of --ledger; add it")
    if arguments.json and not (arguments.ledger or arguments.once):
        raise ConfigError("--json is an option of --once and of --ledger; add one of them")
    config = load_config(arguments.config, overrides)
    if arguments.ledger:
        found, counted = asyncio.run(read_ledger(config, arguments.quick))
        sys.exit(0 if show_ledger(found, counted, arguments.json) else 1)
    if arguments.workers or arguments.contract:
        asyncio.run(show_workers(config, arguments.contract))
    else:
        asyncio.run(show(config, arguments.once, arguments.json))


async def show(config: Config, once: bool, as_json: bool = False) -> None:
    async with open_buffer(config) as buffer:
        await buffer.state()  # fails at once when Redis is not running; a later outage is waited out below
    async with open_buffer(config, config.redis.outage_s) as buffer:
        before = await look(buffer)
        if as_json:
            print(in_json(before, config))
            return
        console = Console()
        if once or not console.is_terminal:  # a view that changes cannot be shown in a pipe or a file
            console.print(view(before, None, config), soft_wrap=True)  # the command at its end is to be pasted
            return
        with Live(view(before, None, config), console=console, refresh_per_second=4, screen=True) as live:
            while True:
                await asyncio.sleep(REFRESH_S)
                now = await look(buffer)
                live.update(view(now, before, config))
                before = now


def show_ledger(found: Ledger, counted: Audit | None, as_json: bool) -> bool:
    """Print it, and a line for each number that does not agree with the keys. Whether it closes."""
    closes = is_closed(found, counted)
    if as_json:
        shown = asdict(found) | {"closes": closes} | ({"audit": asdict(counted)} if counted else {})
        print(msgspec.json.encode(shown).decode())
        return closes
    Console().print(ledger(found))
    if counted:
        kept = f"{counted.kept} trajectories in Redis, with those of trained pools that a checkpoint may need"
        agrees = f"{kept}: counted by keys, this agrees with the ledger"
        text = agrees if counted.closes else "\n".join(counted.findings)
        Console().print(Text(text, style="green" if counted.closes else "red"))
    return closes


async def show_workers(config: Config, with_contract: bool) -> None:
    async with open_run(config) as buffer:
        if with_contract:
            shown = contract(await buffer.identity())
        else:
            shown = workers(await buffer.workers(), config.redis.lease_s)
    Console().print(shown)


def contract(agreed: Identity) -> Table:
    """The keys and values of the run contract."""
    shown = Table("contract", "", box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=True)
    for key, text in sorted(agreed.terms.items()):
        shown.add_row(plain(key), plain(text))
    return shown


def view(now: Snapshot, before: Snapshot | None, config: Config) -> RenderableType:
    """On 80 columns and 24 lines all but the last workers is seen, with up to six depths and a staleness of two; the
    ledger always."""
    alive = sum(status.is_alive for status in now.workers.values())
    listed = workers(now.workers, config.redis.lease_s)
    buffered = Panel(buckets(now, config), title="buffered: depth × staleness", expand=False)
    return Group(
        head(now.state, config),
        Panel(ledger(now.ledger), title="ledger", expand=False),
        Columns([buffered, Panel(groups(now, before, config), title="groups", expand=False)]),
        Panel(listed, title=f"workers: {alive} alive of {len(now.workers)}", expand=False),
        *_way_to_look(config),
    )


def _way_to_look(config: Config) -> Iterator[Text]:
    if config.redis.transport == "redis":
        line = redis_cli_line(config.redis, config.folder)
        yield Text(f"inspect it with: {line}", no_wrap=True, overflow="ignore")


def in_json(now: Snapshot, config: Config) -> str:
    shown = {name: getattr(now, name) for name in ("state", "ledger", "pool", "queues", "workers")}
    shown["depth_by_staleness"] = now.cells(config.episode.s_max, config.pool.staleness_bound)
    return msgspec.json.encode(shown).decode()


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
    counts = now.cells(config.episode.s_max, config.pool.staleness_bound)
    most, fullest = max(map(max, counts)), max(map(sum, counts))
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("depth", *map(str, range(len(counts[0]))), "all"):
        shown.add_column(name, justify="right")
    shown.add_column("")
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
        shown.add_row(f"pool {now.pool}", f"{queues.ready_of_pool} of {needed} ready")
    shown.add_row("all ready", f"{queues.ready} groups")
    shown.add_row("leased", f"{queues.leased} tickets")
    shown.add_row("requeued", f"{queues.requeued} tickets")
    shown.add_row("incomplete", f"{queues.incomplete} groups")
    shown.add_row("buffered", f"{now.ledger.buffered} of {config.buffer_limit}")
    shown.add_row("", f"{now.ledger.bytes / 2**20:.1f} MiB")
    if before is not None:
        seconds = now.at - before.at
        shown.add_row("finished", f"{(now.ledger.finished - before.ledger.finished) / seconds:.1f} /s")
    return shown


def workers(found: dict[str, WorkerStatus], lease_s: float) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("worker", "heartbeat", "version", "in flight", "episodes", "tokens/s", "state"):
        is_text = name in ("worker", "state")
        shown.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for name, status in sorted(found.items()):
        speed = f"{status.sampled_tokens / status.busy_s:.0f}" if status.busy_s else "–"
        figures = [str(status.version), str(status.in_flight), str(status.episodes), speed]
        beat = Text(f"{max(0.0, status.heartbeat_age_s):.0f} s ago", style="green" if status.is_alive else "red")
        shown.add_row(plain(name), beat, *(["–"] * 4 if status.starting else figures), _does(status, lease_s))
    if not found:
        shown.add_row(Text("none", style="red"))
    return shown


def _does(status: WorkerStatus, lease_s: float) -> Text:
    if not status.is_alive:
        return Text("silent", style="red")
    if status.starting:
        return plain(f"{status.starting}, {status.alive_s:.0f} s")
    if status.retriever_down_s:
        return Text(f"retriever down {status.retriever_down_s:.0f} s", style="red")
    if status.hangs(lease_s):
        return Text(f"no token for {status.last_token_age_s:.0f} s", style="red")
    return Text("ok", style="green")


def ledger(counts: Ledger) -> Text:
    """In two lines, and whether it closes."""
    closes = "[green]closes[/]" if counts.closes else "[bold red]DOES NOT CLOSE[/]"
    return Text.from_markup(
        f"finished {counts.finished} = buffered {counts.buffered} + claimed {counts.claimed} "
        f"+ trained {counts.trained} + unselected {counts.unselected} + quarantined {counts.quarantined} "
        f"+ lost {counts.lost}   {closes}\n"
        f"requeued {counts.requeued}   duplicates refused {counts.duplicates_refused}   "
        f"late refused {counts.late_refused}"
    )
