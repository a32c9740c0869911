"""`cusearch reset CONFIG`: deletes a run, in Redis and on disk."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys

from cusearch_async.cli.parts.arguments import add_config
from cusearch_async.cli.parts.opening import refuse_if_alive
from cusearch_async.config import Config, load_config
from cusearch_async.errors import BufferLost, ConfigError, RunInUse, first_line
from cusearch_async.objects import Objects
from cusearch_async.run import folder as run_folder
from cusearch_async.run.identity import NOBODY, refusal
from cusearch_async.training.checkpoint_objects import CheckpointObjects
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.server import may_be_asked, url_of_own

log = logging.getLogger(__name__)


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Raises: RunInUse; ConfigError when the folder does not belong to this run, or without --yes and a terminal."""
    config = load_config(arguments.config, overrides)
    folder = config.folder
    with contextlib.ExitStack() as held:
        for own in config.folders:
            if own.exists():
                run_folder.check_deletable(own)
                run_folder.refuse_others(own, config.run.name)
        if folder.exists():
            held.enter_context(run_folder.hold(folder))
        # The run's own Redis is not running: its keys are in the folder.
        is_in_folder = (folder / "redis").exists() and not may_be_asked(config.redis)
        if is_in_folder and (url := url_of_own(config.redis, folder)):
            raise RunInUse(f"this run's Redis listens at {url}; add --redis.url {url}, or stop it first")
        keys = 0 if is_in_folder else asyncio.run(count_keys(config))
        objects = CheckpointObjects.of(config)
        store, versions = published(config)
        elsewhere = [
            (len(objects.files()) if objects is not None else 0, config.learner.checkpoint_objects),
            (sum(map(len, versions.values())), config.weights.objects),
        ]
        what = _describe(config, keys, is_in_folder, elsewhere)
        if not what:
            log.info("run %s has no keys in Redis and no folder %s; nothing to delete", config.run.name, folder)
            return
        if folder.exists():
            held.enter_context(run_folder.hold_without_learner(folder))
        if not arguments.yes and not _confirmed(f"delete run {config.run.name}: {what}?"):
            log.info("nothing was deleted")
            return
        if not is_in_folder:
            asyncio.run(forget_keys(config))
        if objects is not None:
            objects.forget()
        if store is not None:
            from cusearch_async.weights.interface import MANIFEST  # noqa: PLC0415  (torch)

            for name, files in versions.items():
                store.remove_sealed(name, files, MANIFEST)
            store.remove(run_folder.MARKER)
        for own in config.folders:
            run_folder.forget(own, keep=() if is_in_folder else ("redis",))
    log.info("deleted run %s: %s", config.run.name, what)


def published(config: Config) -> tuple[Objects | None, dict[str, set[str]]]:
    """The object store with the run's weights, and the files of its versions; None without one.

    Raises: ConfigError, also where they are another run's; MissingExtra; WeightsUnavailable."""
    if not config.weights.objects or config.weights.transport != "object":
        return None, {}
    from cusearch_async.weights.objects import open_objects, refuse_others, versions_in  # noqa: PLC0415  (torch)

    store = open_objects(config.weights.objects)
    own = run_folder.read_marker(config.folder)
    refuse_others(store, config.run.name, own.id if own else "")
    return store, versions_in(store)


def _describe(config: Config, keys: int, is_in_folder: bool, elsewhere: list[tuple[int, str | None]]) -> str:
    """The things that will be deleted, in words; empty when there are none."""
    parts = []
    if keys:
        strange = "" if config.folder.exists() else f" (but there is no folder {config.folder}: is this your run?)"
        parts.append(f"{keys} keys at {config.redis.place}{strange}")
    for folder in config.folders:
        with_redis = " (its Redis, which is not running, too)" if is_in_folder and folder == config.folder else ""
        if count := sum(path.is_file() for path in folder.rglob("*")):
            parts.append(f"{count} files in {folder}{with_redis}")
    parts += [f"{count} files at {url}" for count, url in elsewhere if count]
    return ", ".join(parts)


def _confirmed(question: str) -> bool:
    """Ask the user. Raises: ConfigError when standard input is not a terminal."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} Standard input is not a terminal; add --yes to confirm")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # ctrl-D
        return False


async def count_keys(config: Config) -> int:
    """Number of keys of the run in Redis. Raises: ConfigError when they belong to another run; RunInUse."""
    async with open_buffer(config) as buffer:
        try:
            own, run = NOBODY.in_folder(config.folder), await buffer.identity()
            refused = refusal(config.run.name, own, run, accepts_changes=True)
            if refused and not own.may_delete(run):
                raise refused
            await refuse_if_alive(config)
        except BufferLost as error:  # a reset is what helps there
            log.warning("%s; whose run it is, and whether it is alive, cannot be read", first_line(error))
        return await buffer.size()


async def forget_keys(config: Config) -> int:
    async with open_buffer(config) as buffer:
        return await buffer.reset()
