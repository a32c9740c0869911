"""The operator's side of the buffer in Redis: implements `interface.OperatorBuffer`. Listings are read in pieces, never
a whole bucket at once."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator
from typing import Any

from cusearch_async.transport import codec
from cusearch_async.transport.interface import Audit, Filter, TrajectoryRow
from cusearch_async.transport.keys import Keys
from cusearch_async.transport.redis_run import RedisRun, text_of
from cusearch_async.types import Trajectory

_PIECE = 500
SHOWN = ("depth", "version", "reward", "em", "question", "prediction", "turns", "tokens", "worker", "bytes")
_NUMBERS = {"depth": int, "version": int, "reward": float, "em": float, "turns": int, "tokens": int, "bytes": int}


class OperatorSide(RedisRun):
    async def pause(self, paused: bool) -> None:
        def write(pipe: Any) -> None:
            pipe.hset(self.keys.state, "paused", int(paused))
            pipe.xadd(self.keys.news, {"paused": int(paused)}, maxlen=1, approximate=False)

        await self.ask_all(write)

    async def quarantine(self, trajectory_id: str, reason: str) -> bool:
        return bool(await self.run_script("quarantine", "", self.next_name(), trajectory_id, reason))

    async def reopen(self, ticket: int) -> bool:
        return bool(await self.run_script("reopen", ticket, self.next_name()))

    async def capacities(self) -> list[int]:
        depths = range(self._limits.s_max + 1)
        return await self.ask_all(lambda pipe: [pipe.zcard(self.keys.depth(depth)) for depth in depths])

    async def audit(self) -> Audit:
        """This blocks Redis for about 3 microseconds per trajectory."""
        kinds = (self.keys.trajectory(""), self.keys.payload(""))
        names = [text_of(name) for name in await self._key_names()]
        seen = {":".join(name.split(":")[-2:]) for name in names if name.startswith(kinds)}
        kept, findings = await self.run_script("audit", *seen)
        return Audit(kept, tuple(text_of(finding) for finding in findings))

    async def depth_by_version(self) -> dict[tuple[int, int], int]:
        raw = await self.ask(lambda client: client.hgetall(self.keys.depth_by_version))
        cells = {}
        for cell, count in raw.items():
            depth, _, version = cell.partition(b":")
            place = self._number("depth_by_version", depth), self._number("depth_by_version", version)
            cells[place] = self._number("depth_by_version", count)
        return cells

    async def rows(self, wanted: Filter) -> AsyncIterator[TrajectoryRow]:
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
        raw = await self.ask(lambda client: client.hgetall(self.keys.quarantine))
        return {text_of(id_): text_of(reason) for id_, reason in raw.items()}

    async def fetch(self, trajectory_id: str) -> tuple[Trajectory, dict[str, str]] | None:
        keys, id_ = self.keys, trajectory_id
        *kept, fields, payload = await self.ask_all(
            lambda pipe: (
                pipe.hgetall(keys.trajectory(id_))
                .get(keys.payload(id_))
                .hgetall(keys.quarantined(id_))
                .get(keys.quarantined_payload(id_))
            )
        )
        if kept[0]:
            fields, payload = kept
        if not fields:
            return None
        shown = {text_of(name): text_of(value) for name, value in fields.items()}
        return codec.decode(payload or b"", self._limits.max_trajectory_tokens), shown

    async def _bucket(self, depth: int) -> AsyncIterator[tuple[str, dict[str, str]]]:
        for first in itertools.count(0, _PIECE):
            ids, found = await self._piece(depth, first)
            for id_, values in zip(ids, found, strict=True):
                if all(value is not None for value in values):  # else it was claimed and forgotten in the meantime
                    yield id_, {name: text_of(value) for name, value in zip(SHOWN, values, strict=True)}
            if len(ids) < _PIECE:
                return

    async def _piece(self, depth: int, first: int) -> tuple[list[str], list[Any]]:
        raw = await self.ask(lambda client: client.zrange(self.keys.depth(depth), first, first + _PIECE - 1))
        ids = [text_of(id_) for id_ in raw]
        return ids, await self.ask_all(lambda pipe: [pipe.hmget(self.keys.trajectory(id_), *SHOWN) for id_ in ids])

    async def reset(self) -> int:
        names = await self._key_names()

        async def delete(client: Any) -> int:
            return sum([int(await client.unlink(name)) for name in names])

        return int(await self.ask(delete))

    async def exists(self) -> bool:
        keys = self.keys
        return bool(await self.ask(lambda client: client.exists(keys.state, keys.workers, keys.ledger)))

    async def runs(self) -> list[str]:
        before, after = Keys("*").state.split("*")
        return sorted(text_of(key)[len(before) : -len(after)] for key in await self._scan(Keys("*").state))

    async def size(self) -> int:
        return len(await self._key_names())

    async def _key_names(self) -> list[bytes]:
        """Every key of the run."""
        return await self._scan(re.sub(r"([*?\[\]\\])", r"\\\1", self.keys.prefix) + "*")

    async def _scan(self, pattern: str) -> list[bytes]:
        async def scan(client: Any) -> list[bytes]:
            return [key async for key in client.scan_iter(match=pattern, count=1000)]

        return await self.ask(scan)  # type: ignore[no-any-return]
