"""The worker's side of the buffer in Redis: implements `interface.WorkerBuffer`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from redis import exceptions

from cusearch_async.concurrency import Batcher
from cusearch_async.errors import BufferLost
from cusearch_async.transport import codec
from cusearch_async.transport.interface import AHEAD_S, Outcome, RolloutSlot, WorkerStatus
from cusearch_async.transport.redis_run import RedisRun, reported
from cusearch_async.types import Trajectory

_PUT_AT_ONCE = 64
_STAGED_S = 600
"""Seconds until a staged payload without a put expires."""
_STAGINGS = 3
"""Attempts to send a payload that the server drops."""


@dataclass(frozen=True, slots=True)
class _Put:
    """A put that will be sent."""

    staged: str
    payload: bytes
    request: bytes


class WorkerSide(RedisRun):
    _read_news: bytes | str = "0"
    """Entry of the stream `news` that was read last."""

    @functools.cached_property
    def _puts(self) -> Batcher[_Put, Outcome | Literal["unstaged"]]:
        return Batcher(self._send_puts, _PUT_AT_ONCE)

    async def admit(self, worker: str, loaded_version: int, room: int) -> list[RolloutSlot]:
        token = self.next_name()
        granted = await self.run_script("admit", worker, token, room, loaded_version, self._identity.joined)
        return [RolloutSlot(*(self._number("a ticket", part) for part in slot.rsplit(b":", 1))) for slot in granted]

    async def put(self, trajectory: Trajectory) -> Outcome:
        self._limits.check(trajectory)
        payload = codec.encode(trajectory)
        name = self.next_name()
        fields = codec.readable_fields(trajectory) | {"bytes": len(payload)}
        listed = list(itertools.chain.from_iterable(fields.items()))
        request = (trajectory.id, name, trajectory.depth, trajectory.oldest_version, len(payload), listed)
        put = _Put(self.keys.staged(name), payload, msgspec.msgpack.encode(request))
        for _ in range(_STAGINGS):
            outcome = await self._puts(put)
            if outcome != "unstaged":
                return outcome
        raise BufferLost(
            f"Redis has dropped the payload of trajectory {trajectory.id} between two commands, {_STAGINGS} times; is "
            "its maxmemory-policy noeviction?"
        )

    async def _send_puts(self, batch: Sequence[_Put]) -> list[Outcome | Literal["unstaged"]]:
        outcomes = await self.ask(functools.partial(self._send, batch))
        return [outcome.decode() for outcome in outcomes]

    async def _send(self, batch: Sequence[_Put], client: Any) -> Any:
        script = self._scripts["put"]
        try:
            async with client.pipeline(transaction=False) as pipe:
                for put in batch:
                    pipe.execute_command("SET", put.staged, put.payload, "EX", _STAGED_S)
                pipe.evalsha(script.sha, 1, self.keys.state, self._identity.joined, *(put.request for put in batch))
                answers = await pipe.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer  # unchanged: the pipeline would add a prefix to its message
            return answers[-1]
        except exceptions.NoScriptError:
            await client.script_load(script.script)
            return await self._send(batch, client)

    async def wait_for_news(self, longest_s: float) -> bool:
        block_ms = int(1000 * min(longest_s, self.connection.timeout_s / 2))
        found = await self.ask(lambda client: client.xread({self.keys.news: self._read_news}, block=block_ms))
        for _, entries in found:
            self._read_news = entries[-1][0]
        return bool(found)

    async def heartbeat(self, worker: str, tickets: Sequence[int], status: WorkerStatus) -> list[int]:
        joined, ahead_ms = self._identity.joined, int(AHEAD_S * 1000)
        closed = await self.run_script("heartbeat", worker, joined, ahead_ms, len(tickets), *tickets, *reported(status))
        return [int(ticket) for ticket in closed]

    async def release(self, worker: str, tickets: Sequence[int], failed: bool) -> None:
        await self.run_script("release", worker, self.next_name(), int(failed), 0, *tickets)

    async def leave(self, worker: str, tickets: Sequence[int]) -> None:
        await self.run_script("release", worker, self.next_name(), 0, 1, *tickets)
