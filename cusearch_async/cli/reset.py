"""`cusearch reset CONFIG`: forget a run, in Redis and on disk."""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any

from cusearch_async.config import Config, load_config
from cusearch_async.errors import ConfigError
from cusearch_async.transport.buffer import open_buffer

log = logging.getLogger(__name__)

ALIVE_S = 10.0


def add(commands: Any) -> None:
    parser = commands.add_parser("reset", help="delete a run: its keys in Redis, its checkpoints, weights and metrics")
    parser.add_argument("config", type=Path)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, overrides)
    asyncio.run(refuse_if_alive(config))
    forget_folder(config.folder)
    keys = asyncio.run(forget_keys(config))
    log.info("deleted %d keys of run %s and %s", keys, config.run.name, config.folder)


async def refuse_if_alive(config: Config) -> None:
    """Raises: ConfigError while a worker of the run is alive."""
    async with open_buffer(config) as buffer:
        alive = [n for n, facts in (await buffer.workers()).items() if float(facts["heartbeat_age_s"]) < ALIVE_S]
    if alive:
        raise ConfigError(f"run {config.run.name!r} is alive: {', '.join(alive)}; stop it first")


async def forget_keys(config: Config) -> int:
    """Delete what Redis holds of the run; returns how many keys that were."""
    async with open_buffer(config) as buffer:
        return await buffer.reset()


def forget_folder(folder: Path) -> None:
    """Raises: ConfigError when `folder` exists and holds something else than a run."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "config.toml").exists():
            raise ConfigError(f"{folder} holds no config.toml, so it is no run's folder; it is left alone")
        shutil.rmtree(folder)
