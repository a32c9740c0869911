"""`cusearch workers CONFIG`: who works on a run, and when each was last heard of."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from rich.console import Console

from cusearch_async.cli import buckets
from cusearch_async.cli.runs import open_run
from cusearch_async.config import CONFIG_HELP, Config, load_config
from cusearch_async.transport.interface import WorkerStatus


def add(commands: Any) -> None:
    parser = commands.add_parser("workers", help="list the rollout workers of a run")
    parser.add_argument("config", type=Path, help=CONFIG_HELP)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    found = asyncio.run(read(load_config(arguments.config, overrides)))
    Console().print(buckets.workers(found))


async def read(config: Config) -> dict[str, WorkerStatus]:
    async with open_run(config) as buffer:
        return await buffer.workers()
