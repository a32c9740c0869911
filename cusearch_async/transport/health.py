"""Checks that a Redis server does not lose data: no eviction, and writes on disk."""

from __future__ import annotations

import logging
from typing import Any

from redis import exceptions

from cusearch_async.errors import ConfigError
from cusearch_async.transport.connection import Connection

log = logging.getLogger(__name__)


async def check_server(connection: Connection) -> None:
    """Warn when the server writes nothing to disk. Raises: ConfigError when it evicts keys when it is full."""

    async def ask() -> Any:
        try:
            return await connection.client.info("memory"), await connection.client.info("persistence")
        except exceptions.NoPermissionError:
            return None

    answer = await connection.run(ask)
    if answer is None:
        log.warning("this Redis user may not run INFO: make sure that maxmemory-policy is noeviction")
        return
    memory, persistence = answer
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ConfigError(
            f"Redis has maxmemory-policy {policy}: when it is full, it would delete trajectories before they are "
            "trained on; run `redis-cli CONFIG SET maxmemory-policy noeviction`, or change the server's configuration"
        )
    if not int(persistence.get("aof_enabled", 0)):
        log.warning(
            "Redis has appendonly off: buffered trajectories are lost when the server ends; "
            "run `redis-cli CONFIG SET appendonly yes`, or change the server's configuration"
        )
