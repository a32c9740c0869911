"""`cusearch reset CONFIG`: delete a run, in Redis and on disk."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from pathlib import Path
from urllib.parse import urlsplit

from cusearch_async import run_folder
from cusearch_async.cli.runs import refuse_if_alive
from cusearch_async.config import CONFIG_HELP, Config, load_config
from cusearch_async.errors import ConfigError
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.origin import another_run, may_delete
from cusearch_async.transport.server import is_listening

log = logging.getLogger(__name__)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="+", help=CONFIG_HELP)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Raises: RunInUse; ConfigError when the folder is no run's or another's, or there is nobody to ask."""
    config = load_config(arguments.config, overrides)
    folder = config.folder
    with contextlib.ExitStack() as held:
        if folder.exists():
            run_folder.check_deletable(folder)
            run_folder.refuse_others(folder, config.run.name)
            held.enter_context(run_folder.hold(folder))
        # a Redis of the run's own that is not running keeps its keys in the folder
        is_in_folder = (folder / "redis").exists() and not is_listening(config.redis.url)
        keys = 0 if is_in_folder else asyncio.run(count_keys(config))
        what = _describe(config, keys, is_in_folder)
        if what is None:
            log.info("run %s has no keys in Redis and no folder %s; nothing to delete", config.run.name, folder)
            return
        if folder.exists():
            held.enter_context(run_folder.hold_without_learner(folder))
        if not arguments.yes and not _confirmed(f"delete run {config.run.name}: {what}?"):
            log.info("nothing was deleted")
            return
        if not is_in_folder:
            asyncio.run(forget_keys(config))
        run_folder.forget(folder, keep=() if is_in_folder else ("redis",))
    log.info("deleted run %s: %s", config.run.name, what)


def _describe(config: Config, keys: int, is_in_folder: bool) -> str | None:
    """In words, what there is to delete; None for nothing."""
    files = sum(path.is_file() for path in config.folder.rglob("*"))
    parts = [f"{keys} keys in Redis at {urlsplit(config.redis.url).netloc.rpartition('@')[2]}"] if keys else []
    if keys and not config.folder.exists():
        parts[0] += f" (and no folder {config.folder}: is that run yours?)"
    if files:
        parts.append(f"{files} files in {config.folder}{' (its Redis, which is not running, too)' * is_in_folder}")
    return ", ".join(parts) or None


def _confirmed(question: str) -> bool:
    """Raises: ConfigError when there is nobody to ask."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} Nobody is there to ask; add --yes to do it")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


async def count_keys(config: Config) -> int:
    """Keys that Redis holds of the run. Raises: ConfigError when they are another's; RunInUse."""
    async with open_buffer(config) as buffer:
        known = (await buffer.state()).origin
        if known is not None and not may_delete(known, config.folder):
            raise another_run(config.run.name, known)
        await refuse_if_alive(config)
        return len(await buffer.key_names())


async def forget_keys(config: Config) -> int:
    """Delete what Redis holds of the run; returns how many keys that were."""
    async with open_buffer(config) as buffer:
        return await buffer.reset()
