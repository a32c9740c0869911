"""The buffer of a run that Redis knows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from cusearch_async.config import Config
from cusearch_async.errors import ConfigError
from cusearch_async.transport.buffer import RedisBuffer, open_buffer
from cusearch_async.transport.keys import Keys


@asynccontextmanager
async def open_run(config: Config) -> AsyncIterator[RedisBuffer]:
    """For commands that look into a run, or change what is in it.

    Raises: ConfigError when Redis has nothing of this run, naming the runs it knows; BufferUnavailable."""
    async with open_buffer(config) as buffer:
        keys = buffer.keys
        if not await buffer.ask(lambda client: client.exists(keys.state, keys.workers, keys.ledger)):
            known = await buffer.ask(_names)
            there = f"it knows {', '.join(known)}" if known else "it knows none"
            raise ConfigError(f"Redis at {config.redis.url} has no run {config.run.name!r}; {there}; set --run.name")
        yield buffer


async def _names(client: Any) -> list[str]:
    before, after = Keys("*").state.split("*")
    return sorted([key.decode()[len(before) : -len(after)] async for key in client.scan_iter(Keys("*").state)])
