"""The operator's side of the buffer in Redis: inspect, pause, quarantine, requeue, reset. Listings are read in pieces,
never a whole bucket at once."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

from cusearch_async.transport import codec
from cusearch_async.transport.interface import Audit
from cusearch_async.transport.keys import Keys
from cusearch_async.transport.listing import Filter, TrajectoryRow
from cusearch_async.transport.redis_run import RedisRun, text_of
from cusearch_async.types import Trajectory

_PIECE = 500
SHOWN = ("depth", "version", "reward", "em", "question", "prediction", "turns", "tokens", "worker", "bytes")
_NUMBERS = {"depth": int, "version": int, "reward": float, "em": float, "turns": int, "tokens": int, "bytes": int}


class OperatorSide(RedisRun):
    """Implements `interface.OperatorBuffer`."""

    async def pause(self, paused: bool) -> None:
        async def write(client: Any) -> None:
            async with client.pipeline(transaction=True) as pipe:
                pipe.hset(self.keys.state, "paused", int(paused))
                await pipe.xadd(self.keys.news, {"paused": int(paused)}, maxlen=1, approximate=False).execute()

        await self.ask(write)

    async def quarantine(self, trajectory_id: str, reason: str) -> bool:
        return bool(await self.run_script("quarantine", "", trajectory_id, reason))

    async def reopen(self, ticket: int) -> bool:
        return bool(await self.run_script("reopen", ticket))

    async def capacities(self) -> list[int]:
        async def count(client: Any) -> Any:
            async with client.pipeline(transaction=False) as pipe:
                for depth in range(self._limits.s_max + 1):
                    pipe.zcard(self.keys.depth(depth))
                return await pipe.execute()

        return [int(n) for n in await self.ask(count)]

    async def audit(self) -> Audit:
        """Compare buckets, hashes, payloads and pools with the ledger, and check that every ticket is in exactly one
        place. This blocks Redis for about 3 microseconds per trajectory."""
        kinds = (self.keys.trajectory(""), self.keys.payload(""))
        names = [text_of(name) for name in await self._key_names()]
        seen = {":".join(name.split(":")[-2:]) for name in names if name.startswith(kinds)}
        kept, findings = await self.run_script("audit", *seen)
        return Audit(kept, tuple(text_of(finding) for finding in findings))

    async def depth_by_version(self) -> dict[tuple[int, int], int]:
        """(depth, oldest version) -> buffered trajectories."""
        raw = await self.ask(lambda client: client.hgetall(self.keys.depth_by_version))
        cells = {}
        for cell, count in raw.items():
            depth, _, version = cell.partition(b":")
            place = self._number("depth_by_version", depth), self._number("depth_by_version", version)
            cells[place] = self._number("depth_by_version", count)
        return cells

    async def rows(self, wanted: Filter) -> AsyncIterator[TrajectoryRow]:
        """Buffered trajectories that pass the filter, by depth, then by ticket."""
        step = (await self.state()).step
        depths = range(self._limits.s_max + 1) if wanted.depth is None else [wanted.depth]
        for depth in depths:
            async for id_, fields in self._bucket(depth):
                for name, kind in _NUMBERS.items():
                    self._number(f"{name} of {id_}", fields[name].encode(), kind)
                row = TrajectoryRow(id_, fields, max(0, step - int(fields["version"])))
                if wanted.passes(row):
                    yield row

    async def quarantined(self) -> dict[str, str]:
        """Trajectory id -> why it is quarantined."""
        raw = await self.ask(lambda client: client.hgetall(self.keys.quarantine))
        return {text_of(id_): text_of(reason) for id_, reason in raw.items()}

    async def fetch(self, trajectory_id: str) -> tuple[Trajectory, dict[str, str]] | None:
        """A trajectory in any state, quarantined ones included, with its fields; None when there is none.

        Raises: CorruptPayload."""
        keys = self.keys
        places = (
            (keys.trajectory(trajectory_id), keys.payload(trajectory_id)),
            (keys.quarantined(trajectory_id), keys.quarantined_payload(trajectory_id)),
        )

        async def read(client: Any) -> Any:
            async with client.pipeline() as pipe:
                for fields, payload in places:
                    pipe.hgetall(fields).get(payload)
                return await pipe.execute()

        *kept, fields, payload = await self.ask(read)
        if kept[0]:
            fields, payload = kept
        if not fields:
            return None
        shown = {text_of(name): text_of(value) for name, value in fields.items()}
        return codec.decode(payload or b"", self._limits.max_tokens), shown

    async def _bucket(self, depth: int) -> AsyncIterator[tuple[str, dict[str, str]]]:
        for first in itertools.count(0, _PIECE):

            async def piece(client: Any, first: int = first) -> Any:
                ids = await client.zrange(self.keys.depth(depth), first, first + _PIECE - 1)
                async with client.pipeline(transaction=False) as pipe:
                    for id_ in ids:
                        pipe.hmget(self.keys.trajectory(text_of(id_)), *SHOWN)
                    return ids, await pipe.execute()

            ids, found = await self.ask(piece)
            for id_, values in zip(ids, found, strict=True):
                if all(value is not None for value in values):  # else it was claimed and forgotten in the meantime
                    yield text_of(id_), {n: text_of(v) for n, v in zip(SHOWN, values, strict=True)}
            if len(ids) < _PIECE:
                return

    async def reset(self) -> int:
        """Delete every key of the run; returns how many there were."""

        names = await self._key_names()

        async def delete(client: Any) -> int:
            return sum([int(await client.unlink(name)) for name in names])

        return int(await self.ask(delete))

    async def exists(self) -> bool:
        keys = self.keys
        return bool(await self.ask(lambda client: client.exists(keys.state, keys.workers, keys.ledger)))

    async def runs(self) -> list[str]:
        before, after = Keys("*").state.split("*")

        async def scan(client: Any) -> list[str]:
            found = [key async for key in client.scan_iter(Keys("*").state)]
            return sorted(text_of(key)[len(before) : -len(after)] for key in found)

        return await self.ask(scan)  # type: ignore[no-any-return]

    async def size(self) -> int:
        return len(await self._key_names())

    async def _key_names(self) -> list[bytes]:
        """Every key of the run."""

        async def scan(client: Any) -> list[bytes]:
            return [key async for key in client.scan_iter(match=_literal(self.keys.prefix) + "*", count=1000)]

        return await self.ask(scan)  # type: ignore[no-any-return]


def _literal(text: str) -> str:
    """`text` for a MATCH pattern, its special characters escaped."""
    return "".join("\\" + c if c in "*?[]\\" else c for c in text)
