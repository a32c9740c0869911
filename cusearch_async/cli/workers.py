"""`cusearch workers CONFIG`: shows the workers of a run and their last heartbeats, or with --contract the run
contract."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cusearch_async.cli import view
from cusearch_async.cli.runs import open_run
from cusearch_async.cli.terminal import plain
from cusearch_async.cli.trust import add_trust
from cusearch_async.config import CONFIG_HELP, Config, load_config
from cusearch_async.run.contract import RunContract
from cusearch_async.transport.interface import WorkerStatus


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="+", help=CONFIG_HELP)
    add_trust(parser)
    parser.add_argument("--contract", action="store_true", help="show the run contract, which every process must match")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    found, agreed = asyncio.run(read(load_config(arguments.config, overrides)))
    Console().print(contract(agreed) if arguments.contract else view.workers(found))


async def read(config: Config) -> tuple[dict[str, WorkerStatus], RunContract]:
    async with open_run(config) as buffer:
        return await buffer.workers(), await buffer.contract()


def contract(agreed: RunContract) -> Table:
    """The keys and values of the run contract."""
    shown = Table("contract", "", box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=True)
    for key, text in sorted(agreed.terms.items()):
        shown.add_row(plain(key), plain(text))
    return shown
