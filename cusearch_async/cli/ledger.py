"""`cusearch ledger CONFIG`: shows where every finished trajectory is, from the counters, and compares them with the
keys in Redis. Exits with status 1 when they do not agree. `--quick` reads only the counters."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from cusearch_async.cli import view
from cusearch_async.cli.runs import open_run
from cusearch_async.cli.trust import add_trust
from cusearch_async.config import CONFIG_HELP, Config, load_config
from cusearch_async.transport.interface import Audit, Ledger


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="+", help=CONFIG_HELP)
    parser.add_argument(
        "--quick", action="store_true", help="read counters only; do not scan the keys (scanning blocks Redis)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    found, counted = asyncio.run(read(load_config(arguments.config, overrides), arguments.quick))
    closes = found.closes and (counted is None or counted.closes)
    if arguments.json:
        shown = asdict(found) | {"closes": closes} | ({"audit": asdict(counted)} if counted else {})
        print(msgspec.json.encode(shown).decode())
    else:
        Console().print(view.ledger(found))
        if counted:
            Console().print(report(counted))
    sys.exit(0 if closes else 1)


async def read(config: Config, quick: bool) -> tuple[Ledger, Audit | None]:
    async with open_run(config) as buffer:
        return await buffer.ledger(), None if quick else await buffer.audit()


def report(counted: Audit) -> Text:
    """The result of counting the keys: one line for each number that does not agree with the ledger."""
    if counted.closes:
        return Text(
            f"{counted.kept} trajectories in Redis, counted by keys: this agrees with the ledger", style="green"
        )
    return Text("\n".join(counted.findings), style="red")
