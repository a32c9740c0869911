"""`cusearch buckets CONFIG`: shows the buffer of a live run, refreshed until ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rich.console import Console
from rich.live import Live

from cusearch_async.cli.trust import add_trust
from cusearch_async.cli.view import look, view
from cusearch_async.config import CONFIG_HELP, Config, load_config
from cusearch_async.transport.buffer import open_buffer

REFRESH_S = 1.0


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="+", help=CONFIG_HELP)
    parser.add_argument("--once", action="store_true", help="print one view and exit")
    add_trust(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, overrides)
    asyncio.run(show(config, arguments.once))


async def show(config: Config, once: bool) -> None:
    async with open_buffer(config) as buffer:
        await buffer.state()  # fails at once when Redis is not running; a later outage is waited out below
    async with open_buffer(config, config.redis.outage_s) as buffer:
        before = await look(buffer)
        if once:
            Console().print(view(before, None, config))
            return
        with Live(view(before, None, config), refresh_per_second=4, screen=True) as live:
            while True:
                await asyncio.sleep(REFRESH_S)
                now = await look(buffer)
                live.update(view(now, before, config))
                before = now
