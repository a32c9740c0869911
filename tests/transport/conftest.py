"""Both buffers with one interface, so that the same tests run on them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cusearch_async.config import RedisConfig
from cusearch_async.run.identity import NOBODY, Identity
from cusearch_async.transport.buffer import RedisBuffer
from cusearch_async.transport.connection import Connection
from cusearch_async.transport.interface import Buffer
from cusearch_async.transport.keys import Keys
from cusearch_async.transport.limits import RunLimits
from cusearch_async.transport.memory import MemoryBuffer, MemoryRun

_runs = itertools.count()


def make_limits(**changes: Any) -> RunLimits:
    values = {"questions": 4, "rollouts": 2, "max_staleness": 1, "order": "ticket", "s_max": 5, "lease_s": 60.0}
    values |= {"max_attempts": 3, "limit": 1000, "limit_bytes": 10**9, "max_tokens": 1000, "steps": 1000}
    return RunLimits(**(values | changes))  # type: ignore[arg-type]


class RedisBackend:
    """A fresh run on a real Redis; each `make` is another process's view of it."""

    def __init__(self, url: str) -> None:
        self._settings = RedisConfig(url=url)
        self._run = f"test-{next(_runs)}"
        self.keys = Keys(self._run)
        self._connections: list[Connection] = []

    def make(self, identity: Identity = NOBODY, **limits: Any) -> RedisBuffer:
        self._connections.append(Connection(self._settings, patience_s=0))
        return RedisBuffer(self._connections[-1], self._run, make_limits(**limits), identity)

    @property
    def client(self) -> Any:
        return self._connections[0].client

    async def expire_leases(self) -> None:
        """As if lease_s had passed without a heartbeat."""
        keys = self.keys
        for ticket in await self.client.zrange(keys.lease, 0, -1):
            await self.client.zadd(keys.lease, {ticket: 0})

    async def age_leases(self) -> None:
        """As if they had been granted long ago, and renewed since."""
        for ticket in await self.client.zrange(self.keys.leased_at, 0, -1):
            await self.client.zadd(self.keys.leased_at, {ticket: -1e18})

    async def memory(self) -> str:
        return (await self.client.get(self.keys.memory) or b"").decode()

    async def sizes(self) -> dict[int, int]:
        return {int(k): int(v) for k, v in (await self.client.hgetall(self.keys.sizes)).items()}

    async def quarantined(self) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in (await self.client.hgetall(self.keys.quarantine)).items()}

    async def vanish(self, *ids: str) -> None:
        """As if the server had evicted them."""
        for id_ in ids:
            await self.client.delete(self.keys.trajectory(id_), self.keys.payload(id_))

    async def forget_everything(self) -> None:
        for key in [key async for key in self.client.scan_iter(match=f"cusearch:{{{self._run}}}:*")]:
            await self.client.delete(key)

    async def dump(self) -> dict[bytes, bytes]:
        """A copy of all that the run keeps."""
        keys = [key async for key in self.client.scan_iter(match=f"cusearch:{{{self._run}}}:*", count=1000)]
        return {key: await self.client.dump(key) for key in keys}

    async def restore(self, dump: dict[bytes, bytes]) -> None:
        await self.forget_everything()
        for key, value in dump.items():
            await self.client.restore(key, 0, value)

    async def tickets(self) -> dict[str, Any]:
        """Where every ticket is."""
        keys = self.keys
        async with self.client.pipeline() as pipe:
            for name in (keys.lease, keys.requeue, keys.ready):
                pipe.zrange(name, 0, -1)
            for name in (keys.owner, keys.hedged, keys.groups, keys.attempts, keys.incomplete):
                pipe.hgetall(name)
            *sets, owners, hedged, groups, attempts, incomplete = await pipe.execute()
        counts = ({int(t): int(n) for t, n in found.items() if int(n)} for found in (groups, attempts, incomplete))
        return {
            **dict(zip(("lease", "requeue", "ready"), ({int(t) for t in found} for found in sets), strict=True)),
            "owner": {int(ticket): worker.decode() for ticket, worker in owners.items()},
            "hedged": {int(ticket): worker.decode() for ticket, worker in hedged.items()},
            **dict(zip(("groups", "attempts", "incomplete"), counts, strict=True)),
        }

    async def taken(self) -> tuple[set[int], dict[int, list[int]]]:
        """What steps have claimed, and what is reserved for some; in deferred order."""
        taken, reserved = (
            await self.client.zrange(self.keys.taken, 0, -1),
            await self.client.hgetall(self.keys.reserved),
        )
        return {int(t) for t in taken}, {int(s): [*map(int, listed.split(b","))] for s, listed in reserved.items()}

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()


class MemoryBackend:
    def __init__(self) -> None:
        self.run = MemoryRun()

    def make(self, identity: Identity = NOBODY, **limits: Any) -> Buffer:
        return MemoryBuffer(self.run, make_limits(**limits), identity)

    async def expire_leases(self) -> None:
        self.run.now += 1e9

    async def age_leases(self) -> None:
        self.run.leased_at = dict.fromkeys(self.run.leased_at, -1e15)

    async def memory(self) -> str:
        return self.run.memory

    async def sizes(self) -> dict[int, int]:
        return dict(self.run.sizes)

    async def quarantined(self) -> dict[str, str]:
        return {id_: entry.reason for id_, entry in self.run.quarantined.items()}

    async def vanish(self, *ids: str) -> None:
        for id_ in ids:
            if id_ in self.run.entries:
                self.run.entries[id_].has_gone = True

    async def forget_everything(self) -> None:
        for field in dataclasses.fields(MemoryRun):
            setattr(self.run, field.name, getattr(MemoryRun(), field.name))


@pytest.fixture
async def redis_backend(redis_url: str) -> AsyncIterator[RedisBackend]:
    backend = RedisBackend(redis_url)
    yield backend
    await backend.close()


@pytest.fixture(params=["memory", "redis"])
async def backend(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[RedisBackend | MemoryBackend]:
    if request.param == "memory":
        yield MemoryBackend()
        return
    redis = RedisBackend(redis_url)
    yield redis
    await redis.close()
