"""`cusearch ledger CONFIG`: where every finished trajectory is; status 1 when that does not add up."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from cusearch_async.cli import buckets
from cusearch_async.cli.runs import open_run
from cusearch_async.config import CONFIG_HELP, Config, load_config
from cusearch_async.transport.contract import Ledger


def add(commands: Any) -> None:
    parser = commands.add_parser("ledger", help="print and check the ledger of a run")
    parser.add_argument("config", type=Path, help=CONFIG_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    found = asyncio.run(read(load_config(arguments.config, overrides)))
    if arguments.json:
        print(msgspec.json.encode(asdict(found) | {"closes": found.closes}).decode())
    else:
        Console().print(buckets.ledger(found))
    sys.exit(0 if found.closes else 1)


async def read(config: Config) -> Ledger:
    async with open_run(config) as buffer:
        return await buffer.ledger()
