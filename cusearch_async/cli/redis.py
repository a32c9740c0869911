"""`cusearch redis CONFIG`: a Redis server for a run, on loopback, in the foreground."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from cusearch_async import run_folder
from cusearch_async.config import CONFIG_HELP, load_config, redis_password
from cusearch_async.errors import ConfigError
from cusearch_async.transport.server import is_listening, server_command


def add(commands: Any) -> None:
    parser = commands.add_parser("redis", help="start a Redis server for a run (every write is on disk)")
    parser.add_argument("config", type=Path, help=CONFIG_HELP)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, overrides)
    if is_listening(config.redis.url):
        raise ConfigError(f"redis.url {config.redis.url}: something listens there already; choose another port")
    run_folder.mark(config.folder, config.run.name)
    command = server_command(config.redis.url, config.folder / "redis", redis_password())
    os.execv(command[0], command)  # noqa: S606  (we become the server)
