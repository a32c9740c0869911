"""Whether a Redis server can be trusted with a run: it must keep what it is given."""

from __future__ import annotations

import logging
from typing import Any

from redis import exceptions

from cusearch_async.errors import ConfigError
from cusearch_async.transport.connection import Connection

log = logging.getLogger(__name__)


async def check_server(connection: Connection) -> None:
    """Warn of a server that keeps nothing on disk. Raises: ConfigError for one that evicts keys when it is full."""

    async def ask() -> Any:
        try:
            return await connection.client.info("memory"), await connection.client.info("persistence")
        except exceptions.NoPermissionError:
            return None

    answer = await connection.run(ask)
    if answer is None:
        log.warning("this user may not ask Redis for INFO: make sure that maxmemory-policy is noeviction")
        return
    memory, persistence = answer
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ConfigError(
            f"Redis has maxmemory-policy {policy}: when it is full it would delete trajectories that nobody has "
            "trained on; `redis-cli CONFIG SET maxmemory-policy noeviction`, or set it where the server is configured"
        )
    if not int(persistence.get("aof_enabled", 0)):
        log.warning(
            "Redis has appendonly off: what is buffered is lost when the server ends; "
            "`redis-cli CONFIG SET appendonly yes`, or set it where the server is configured"
        )
