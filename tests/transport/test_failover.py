"""A planned failover behind one address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from redis import exceptions

from cusearch_async.config import RedisConfig
from cusearch_async.transport.connection import Connection
from tests.conftest import SLOW
from tests.strategies import make_trajectory
from tests.transport.filling import G, N, start
from tests.transport.test_faults import Server, buffer_on, server

__all__ = ["server"]

pytestmark = pytest.mark.system


@asynccontextmanager
async def address_of(target: Server) -> AsyncIterator[tuple[str, list[Server]]]:
    """A URL that leads to the last server of the list, as a DNS name or a proxy does."""
    targets = [target]

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(65536):
                writer.write(piece)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", targets[-1].port)
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    proxy = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{proxy.sockets[0].getsockname()[1]}/0", targets
    finally:
        proxy.close()


async def test_a_master_that_is_demoted_is_left_for_the_one_that_its_address_leads_to(server, tmp_path):
    """Without Sentinel: the retries went to the old master, over its open connections, until patience ended."""
    (tmp_path / "replica").mkdir()
    replica = Server(tmp_path / "replica", "--replicaof", "127.0.0.1", str(server.port))
    try:
        async with address_of(server) as (url, targets), buffer_on(url, patience_s=20 * SLOW) as buffer:
            await start(buffer)
            slots = await buffer.admit("w", 0, N * G)
            server.client.wait(1, 20000)
            replica.client.replicaof("no", "one")
            server.client.replicaof("127.0.0.1", replica.port)
            targets.append(replica)
            assert await buffer.put(make_trajectory(slots[0].ticket, slots[0].rollout)) == "stored"
            assert replica.client.role()[0] == "master"
    finally:
        replica.kill()


async def test_a_script_that_is_forgotten_between_loading_and_running_is_sent_again():
    """Found by the chaos campaign: a worker ended with redis' NoScriptError."""
    connection, errors = Connection(RedisConfig(url="redis://127.0.0.1:1/0"), 10.0), [exceptions.NoScriptError("No.")]

    async def command() -> str:
        if errors:
            raise errors.pop()
        return "done"

    assert await connection.run(command) == "done"
