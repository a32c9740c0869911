"""The run of a command, in Redis: whether it exists, which folder it belongs to, and whether it is alive."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cusearch_async.config import Config, redis_password_file
from cusearch_async.errors import BufferUnavailable, ConfigError, RunInUse
from cusearch_async.run.history import place_of_buffer, read_starts
from cusearch_async.run.identity import NOBODY, has_joined
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import Audit, Buffer, Ledger


@asynccontextmanager
async def open_run(config: Config) -> AsyncIterator[Buffer]:
    """The buffer of a run, for commands that inspect or change it.

    Raises: ConfigError when Redis has no such run, with the names of the runs it has; BufferUnavailable."""
    async with open_buffer(config) as buffer:
        if not await buffer.exists():
            known = await buffer.runs()
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"{config.redis.place} has no run {config.run.name!r}; {there}; set --run.name")
        yield buffer


async def refuse_other_run(config: Config) -> None:
    """Raises: ConfigError when Redis holds a run of this name that was made in another folder."""
    async with open_buffer(config) as buffer:
        own = NOBODY.in_folder(config.folder)
        has_joined(config.run.name, own, await buffer.identity(), accepts_changes=True)


def had_another_redis(config: Config) -> bool:
    """Whether the run's Redis was at this address, with its data elsewhere than in the run's folder."""
    if redis_password_file(config.redis, config.folder) is None:  # none is started for such an address
        return False
    starts, own = read_starts(config.folder), config.folder / "redis"
    was_here = bool(starts) and starts[-1].buffer == place_of_buffer(config.redis)
    return was_here and not any(own.glob("appendonly*"))


def refuse_redis_that_is_down(config: Config) -> None:
    """Before a Redis is started for the run. Raises: BufferUnavailable when the run had another at this address."""
    if had_another_redis(config):
        own = config.folder / "redis"
        raise BufferUnavailable(
            f"nothing listens at redis.url {config.redis.url}, where this run's Redis was; its data is not in {own}. "
            "Start it; if its data is lost, `cusearch redis CONFIG` starts an empty one, and the run continues "
            "from its newest checkpoint"
        )


async def refuse_if_alive(config: Config, remedy: str = "stop it first") -> None:
    """Raises: RunInUse while a worker or the learner of the run is alive."""
    async with open_buffer(config) as buffer:
        alive = [name for name, status in (await buffer.workers()).items() if status.is_alive]
        learner = await buffer.learner()
    if learner:
        alive.append(f"the learner (process {learner.pid} on {learner.host})")
    if alive:
        raise RunInUse(f"run {config.run.name!r} is alive: {', '.join(alive)}; {remedy}")


async def read_ledger(config: Config, quick: bool = False) -> tuple[Ledger, Audit | None]:
    """The counters, and the result of counting the keys unless it is `quick`."""
    async with open_run(config) as buffer:
        return await buffer.ledger(), None if quick else await buffer.audit()


def is_closed(ledger: Ledger, counted: Audit | None) -> bool:
    """Whether the ledger closes, and agrees with the keys where they were counted."""
    return ledger.closes and (counted is None or counted.closes)
