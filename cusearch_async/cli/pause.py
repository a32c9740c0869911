"""`cusearch pause CONFIG` and `cusearch resume CONFIG`: stop and start admission; episodes in flight continue."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path
from urllib.parse import urlsplit

from cusearch_async.cli.trust import add_trust
from cusearch_async.config import CONFIG_HELP, Config, load_config
from cusearch_async.errors import ConfigError
from cusearch_async.transport.buffer import open_buffer

log = logging.getLogger(__name__)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="+", help=CONFIG_HELP)
    add_trust(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, overrides)
    paused = arguments.command == "pause"
    asyncio.run(pause(config, paused))
    log.info("run %s is %s", config.run.name, "paused" if paused else "resumed")


async def pause(config: Config, paused: bool) -> None:
    """Stop or start admission. Raises: ConfigError for a run that no learner has started."""
    async with open_buffer(config) as buffer:
        if not (await buffer.state()).exists:
            raise ConfigError(
                f"Redis at {urlsplit(config.redis.url).netloc.rpartition('@')[2]} has no run {config.run.name!r}: "
                "no learner has started it; check run.name and redis.url"
            )
        await buffer.pause(paused)
