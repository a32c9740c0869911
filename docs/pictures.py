"""The pictures of a terminal in docs/redis.md, drawn from a moment of a run that is kept in moment.json.

`make docs` draws them; `python -m docs.pictures CONFIG` keeps a moment of a live run in its place."""

from __future__ import annotations

import asyncio
import io
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.terminal_theme import MONOKAI

from cusearch_async.cli.buckets import Snapshot, look, view
from cusearch_async.cli.buffer import overview, turns
from cusearch_async.cli.parts.opening import open_run
from cusearch_async.config import Config, load_config
from cusearch_async.models import load_tokenizer
from cusearch_async.transport.codec import decode, encode
from cusearch_async.transport.interface import Filter, Ledger, Queues, RunState, WorkerStatus

MOMENT = Path(__file__).with_name("moment.json")
DEPTH = 3
"""Of the trajectory that is kept."""
COLUMNS = 80


class Moment(msgspec.Struct):
    at: float
    state: RunState
    ledger: Ledger
    pool: int
    queues: Queues
    buckets: list[tuple[int, int, int]]
    """Depth, version, trajectories."""
    workers: dict[str, WorkerStatus]
    trajectory: bytes
    fields: dict[str, str]


def buckets() -> str:
    """What `cusearch buckets` shows, without its last line, which depends on the machine."""
    now = _moment()
    cells = {(depth, version): count for depth, version, count in now.buckets}
    snapshot = Snapshot(now.at, now.state, now.ledger, now.pool, now.queues, cells, now.workers)
    shown = view(snapshot, None, load_config([Path("atlas")]))
    assert isinstance(shown, Group)
    return _svg("cusearch buckets CONFIG", shown.renderables[:-1])


def peek() -> str:
    """What `cusearch buffer peek` shows."""
    moment, config = _moment(), load_config([Path("atlas")])
    trajectory = decode(moment.trajectory, config.episode.max_trajectory_tokens)
    panels = turns(trajectory, load_tokenizer(config.model.location))
    return _svg(f"cusearch buffer peek CONFIG {trajectory.id}", [overview(trajectory, moment.fields), *panels])


def _moment() -> Moment:
    return msgspec.json.decode(MOMENT.read_bytes(), type=Moment)


def _svg(title: str, shown: Iterable[RenderableType]) -> str:
    """A window with what is shown, in the reader's monospaced font: a picture on a page loads none."""
    console = Console(record=True, file=io.StringIO(), width=COLUMNS, color_system="truecolor", force_terminal=True)
    for one in shown:
        console.print(one)
    drawn = console.export_svg(title=title, theme=MONOKAI, unique_id="terminal")
    return re.sub(r"\n *@font-face \{.*?\}", "", drawn, flags=re.DOTALL).replace("Fira Code, ", "")


async def keep(config: Config) -> None:
    """Write moment.json. Exits with a message where no trajectory of DEPTH is buffered."""
    async with open_run(config) as buffer:
        now = await look(buffer)
        async for row in buffer.rows(Filter(depth=DEPTH)):
            found = await buffer.fetch(row.id)
            if found is not None:
                state = replace(now.state, origin=None)  # not shown
                cells = [(*cell, count) for cell, count in sorted(now.depth_by_version.items())]
                parts = (now.at, state, now.ledger, now.pool, now.queues, cells, now.workers)
                moment = Moment(*parts, encode(found[0]), found[1])
                MOMENT.write_bytes(msgspec.json.format(msgspec.json.encode(moment), indent=1) + b"\n")
                return
    sys.exit(f"no trajectory of depth {DEPTH} is buffered")


if __name__ == "__main__":
    asyncio.run(keep(load_config([Path(sys.argv[1])])))
