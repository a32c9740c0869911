"""The rollout buffer in Redis, keyed by search depth.

Workers lease tickets and put finished trajectories. The learner claims whole pools, commits them after training, and
announces weights. Each of these operations is one Lua script, so it is atomic, and repeating it has no effect.
docs/redis.md lists every key.

Covered: any worker or learner may die at any time; no trajectory that was put is lost or trained on twice. Not covered:
data that Redis itself loses (see appendfsync in docs/redis.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cusearch_async.config import Config, redis_password
from cusearch_async.extensions import load_function
from cusearch_async.run.identity import NOBODY, Identity
from cusearch_async.transport.connection import Connection
from cusearch_async.transport.interface import Buffer
from cusearch_async.transport.limits import limits_of
from cusearch_async.transport.redis_learner import LearnerSide
from cusearch_async.transport.redis_operator import OperatorSide
from cusearch_async.transport.redis_worker import WorkerSide


class RedisBuffer(WorkerSide, LearnerSide, OperatorSide):
    """Implements `interface.Buffer` on one Redis."""


@asynccontextmanager
async def open_buffer(
    config: Config,
    patience_s: float = 0.0,
    stop: asyncio.Event | None = None,
    vocab_size: int | None = None,
    identity: Identity = NOBODY,
) -> AsyncIterator[Buffer]:
    """The buffer of a run, with its own client. The client retries for `patience_s` during an outage, or until `stop`
    is set. No connection is made yet. Trajectories with token ids beyond `vocab_size` are refused. Learner, workers and
    evaluator must give their identity; operators need none.

    Raises: ConfigError when redis.transport names none."""
    name = config.redis.transport
    transport = TRANSPORTS.get(name) or load_function("redis.transport", name, TRANSPORTS)
    async with transport(config, patience_s, stop, vocab_size, identity) as buffer:
        yield buffer


@asynccontextmanager
async def open_redis(
    config: Config, patience_s: float, stop: asyncio.Event | None, vocab_size: int | None, identity: Identity
) -> AsyncIterator[RedisBuffer]:
    """The buffer of a run in Redis."""
    connection = Connection(
        config.redis, patience_s, stop, functools.partial(redis_password, config.redis, config.folder)
    )
    try:
        yield RedisBuffer(connection, config.run.name, limits_of(config, vocab_size), identity)
    finally:
        await connection.close()


Transport = Callable[
    [Config, float, asyncio.Event | None, int | None, Identity], contextlib.AbstractAsyncContextManager[Buffer]
]
"""Opens the buffer of a run, as `open_buffer` does."""
TRANSPORTS: dict[str, Transport] = {"redis": open_redis}
