"""The rollout buffer in Redis, keyed by search depth.

Workers are admitted to tickets and put finished trajectories; the learner claims whole pools, commits what it
did with them, and announces weights. Each of these is one Lua script: it happens wholly or not at all, and
repeating it does no harm. docs/redis.md names every key.

Covered: any worker or learner may die at any time; nothing that was put is lost or trained twice in one
lineage. Not covered: what Redis itself loses (see appendfsync in docs/redis.md).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from redis import exceptions

from cusearch_async.batcher import Batcher
from cusearch_async.config import Config, redis_password
from cusearch_async.errors import BufferLost, ConfigError, CorruptPayload, CusearchError, Fenced, InvalidTrajectory
from cusearch_async.transport import codec
from cusearch_async.transport.checks import faults
from cusearch_async.transport.connection import Connection
from cusearch_async.transport.contract import (
    ALIVE_S,
    NOTHING,
    Ledger,
    MethodState,
    Outcome,
    Place,
    QuestionOf,
    Queues,
    RunState,
    Shape,
    shape_of,
)
from cusearch_async.transport.health import check_server
from cusearch_async.transport.keys import Keys
from cusearch_async.transport.origin import Origin, another_run
from cusearch_async.transport.scripts import script
from cusearch_async.types import Pool, Trajectory

log = logging.getLogger(__name__)
N = TypeVar("N", int, float)

_SCRIPTS = (
    "admit",
    "put",
    "heartbeat",
    "release",
    "claim",
    "commit",
    "announce",
    "checkpoint",
    "recover",
    "quarantine",
    "reopen",
    "learner",
    "audit",
)
_FETCH_AT_ONCE = 64
_PUT_AT_ONCE = 64
_STAGED_S = 600
"""A staged payload that no put took up is gone after this."""
_STAGINGS = 3
"""Times that a payload is sent before a server that drops it is given up."""
_DAMAGE_WORDS = ("WRONGTYPE", "user_script", "not an integer", "not a valid float")
"""In the answers of a server that holds what no script of ours has written."""


@asynccontextmanager
async def open_buffer(
    config: Config, patience_s: float = 0.0, stop: asyncio.Event | None = None, vocab_size: int | None = None
) -> AsyncIterator[RedisBuffer]:
    """The buffer of a run, on a client of its own that rides out outages of `patience_s`, or until `stop` is set. No
    connection is made yet. Trajectories with tokens beyond `vocab_size` are refused."""
    connection = Connection(config.redis, patience_s, stop, functools.partial(redis_password, config))
    try:
        yield RedisBuffer(connection, config.run.name, shape_of(config, vocab_size))
    finally:
        await connection.close()


@dataclass(frozen=True, slots=True)
class _Put:
    """One that waits to be sent."""

    staged: str
    payload: bytes
    request: bytes


_DAMAGED = "Redis holds what this project has not written for run {!r}; restore its data, or `cusearch reset` the run"
_SHAPE_KEYS = {
    "questions": "groups per step (pool.questions, or K / G for grpo_half)",
    "rollouts": "pool.rollouts",
    "order": "pool.order",
}


class RedisBuffer:
    """Keeps the contract of `contract.Buffer` on one Redis."""

    def __init__(self, connection: Connection, run: str, shape: Shape) -> None:
        self.keys = Keys(run)
        self.connection = connection
        self._shape = shape
        self._epoch = 0
        self._life = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._puts: Batcher[_Put, Outcome | Literal["unstaged"]] = Batcher(self._send_puts, _PUT_AT_ONCE)
        self._scripts = {name: connection.client.register_script(script(name)) for name in _SCRIPTS}

    # --- rollout worker -------------------------------------------------------------------------------

    async def admit(self, worker: str, loaded_version: int, room: int) -> list[Place]:
        token = f"{self._life}/{next(self._numbers)}"
        granted = await self.run_script("admit", worker, token, room, loaded_version)
        return [Place(*map(int, place.split(b":"))) for place in granted]

    async def put(self, trajectory: Trajectory) -> Outcome:
        self._shape.check(trajectory)
        payload = codec.encode(trajectory)
        name = f"{self._life}/{next(self._numbers)}"
        fields = codec.readable_fields(trajectory) | {"bytes": len(payload)}
        listed = list(itertools.chain.from_iterable(fields.items()))
        request = (trajectory.id, name, trajectory.depth, fields["version"], len(payload), listed)
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
                pipe.evalsha(script.sha, 1, self.keys.state, *(put.request for put in batch))
                return (await pipe.execute())[-1]
        except exceptions.NoScriptError:
            await client.script_load(script.script)
            return await self._send(batch, client)

    async def heartbeat(self, worker: str, tickets: Sequence[int], facts: Mapping[str, str | int | float]) -> None:
        told = itertools.chain.from_iterable(facts.items())
        await self.run_script("heartbeat", worker, len(tickets), *tickets, *told)

    async def release(self, worker: str, tickets: Sequence[int], failed: bool) -> None:
        await self.run_script("release", worker, int(failed), 0, *tickets)

    async def leave(self, worker: str, tickets: Sequence[int]) -> None:
        await self.run_script("release", worker, 0, 1, *tickets)

    # --- learner --------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._epoch

    async def recover(
        self,
        step: int,
        method: MethodState = NOTHING,
        least_epoch: int = 0,
        origin: Origin | None = None,
    ) -> None:
        await check_server(self.connection)
        told, nonce, shape = _told(method), uuid.uuid4().hex, _laid_down(self._shape)
        whose = (origin.run_id, origin.host, origin.folder) if origin else ()
        self._epoch = await self.run_script("recover", step, told, nonce, least_epoch, shape, *whose)

    async def claim(self, step: int, question_of: QuestionOf | None = None) -> Pool | None:
        answer = await self.run_script("claim", self._epoch, step, "look")
        if answer is None:
            return None
        status, gone, names = answer[0].decode(), _decoded(answer[1]), _decoded(answer[2])
        if gone:
            log.warning("%d trajectories have gone from Redis and count as lost: %s", len(gone), ", ".join(gone))
        if status == "waits":
            log.warning("step %d waits for tickets that are played again: %s", step, ", ".join(names))
            return None
        found, bad = await self._read_all(names)
        if status == "found":
            bad |= faults(found, step, self._shape, question_of)
        if bad:
            for name, reason in bad.items():
                log.warning("trajectory %s is quarantined: %s", name, reason)
            await self.run_script("quarantine", self._epoch, *itertools.chain.from_iterable(bad.items()))
        if status == "found":
            taken = None if bad else await self.run_script("claim", self._epoch, step, "take", *names)
            if taken is None or taken[0] != b"kept":
                return None
        pool = Pool(step, tuple(t for t in found if t.id not in bad))
        if not pool.trajectories:
            log.warning("the pool of step %d is empty: no episode of it succeeded", step)
        return pool

    async def commit(self, pool: Pool, selected: Sequence[Trajectory], method: MethodState = NOTHING) -> None:
        await self.run_script("commit", self._epoch, pool.step, _told(method), *(t.id for t in selected))

    async def announce(self, version: int, directory: str) -> None:
        await self.run_script("announce", self._epoch, version, directory)

    async def checkpoint(self, step: int) -> None:
        await self.run_script("checkpoint", self._epoch, step)

    def follow_epoch(self, epoch: int) -> None:
        """Speak for the learner that has taken the run over as `epoch` on another connection."""
        self._epoch = epoch

    async def learner_heartbeat(self, facts: Mapping[str, str | int | float]) -> None:
        told = itertools.chain.from_iterable(facts.items())
        await self.run_script("learner", self._epoch, int(ALIVE_S * 1000), *told)

    async def learner_leaves(self) -> None:
        await self.run_script("learner", self._epoch, 0)

    # --- operator -------------------------------------------------------------------------------------

    async def pause(self, paused: bool) -> None:
        await self.ask(lambda client: client.hset(self.keys.state, "paused", int(paused)))

    async def quarantine(self, trajectory_id: str, reason: str) -> bool:
        return bool(await self.run_script("quarantine", "", trajectory_id, reason))

    async def reopen(self, ticket: int) -> bool:
        return bool(await self.run_script("reopen", ticket))

    async def state(self) -> RunState:
        async def read(client: Any) -> Any:
            async with client.pipeline(transaction=False) as pipe:
                return await pipe.hgetall(self.keys.state).get(self.keys.next_ticket).execute()

        raw, next_ticket = await self.ask(read)
        known = {name.decode(): value for name, value in raw.items()} | {"next_ticket": next_ticket or b"0"}
        weights = known.pop("weights", b"").decode()
        whose = [known.get(name, b"").decode() for name in ("run_id", "host", "folder")]
        numbers = {
            name: self._number(name, known[name]) for name in known.keys() & RunState.__dataclass_fields__.keys()
        }
        names = known.get("method_fields", b"").decode().split()
        fields = {name: self._number(name, known.get(name, b""), float) for name in names}
        told = {"weights": weights, "paused": bool(numbers.get("paused")), "fields": fields}
        return RunState(**(numbers | told | {"origin": Origin(*whose) if whose[0] else None}))

    async def ledger(self) -> Ledger:
        raw = await self.ask(lambda client: client.hgetall(self.keys.ledger))
        counts = {name.decode(): self._number(name.decode(), value) for name, value in raw.items()}
        return Ledger(**{name: counts.get(name, 0) for name in Ledger.__dataclass_fields__})

    async def capacities(self) -> list[int]:
        async def count(client: Any) -> Any:
            async with client.pipeline(transaction=False) as pipe:
                for depth in range(self._shape.s_max + 1):
                    pipe.zcard(self.keys.depth(depth))
                return await pipe.execute()

        return [int(n) for n in await self.ask(count)]

    async def queues(self, step: int) -> Queues:
        """Where the open tickets are, and how far the pool of `step` has come."""
        keys, questions = self.keys, self._shape.questions

        async def count(client: Any) -> Any:
            async with client.pipeline(transaction=False) as pipe:
                if self._shape.order == "ticket":
                    pipe.zcount(keys.ready, step * questions, (step + 1) * questions - 1)
                else:
                    pipe.zcard(keys.ready)
                pipe.zcard(keys.ready).zcard(keys.lease).zcard(keys.requeue).hlen(keys.incomplete)
                return await pipe.execute()

        names = ("ready_of_pool", "ready", "leased", "requeued", "incomplete")
        return Queues(**dict(zip(names, await self.ask(count), strict=True)))

    async def learner(self) -> dict[str, str]:
        async def read(client: Any) -> Any:
            async with client.pipeline(transaction=True) as pipe:
                return await pipe.hgetall(self.keys.learner).pttl(self.keys.learner).execute()

        raw, left_ms = await self.ask(read)
        told = {key.decode(): value.decode() for key, value in raw.items()}
        return told | {"heartbeat_age_s": f"{ALIVE_S - left_ms / 1000:.1f}"} if told else {}

    async def workers(self) -> dict[str, dict[str, str]]:
        """What each worker said of itself at its last heartbeat, with `heartbeat_age_s`."""

        async def read(client: Any) -> Any:
            async with client.pipeline(transaction=False) as pipe:
                beats = await client.zrange(self.keys.workers, 0, -1, withscores=True)
                for name, _ in beats:
                    pipe.hgetall(self.keys.worker(name.decode()))
                return await client.time(), beats, await pipe.execute()

        (seconds, micros), beats, facts = await self.ask(read)
        now = seconds + micros / 1e6
        found = {}
        for (name, beat), raw in zip(beats, facts, strict=True):
            told = {k.decode(): v.decode() for k, v in raw.items() if not k.startswith(b"admit_")}
            found[name.decode()] = told | {"heartbeat_age_s": f"{now - beat / 1000:.1f}"}
        return found

    async def reset(self) -> int:
        """Delete every key of the run; returns how many there were."""

        names = await self.key_names()

        async def delete(client: Any) -> int:
            return sum([int(await client.unlink(name)) for name in names])

        return int(await self.ask(delete))

    async def key_names(self) -> list[bytes]:
        """Every key of the run."""

        async def scan(client: Any) -> list[bytes]:
            return [key async for key in client.scan_iter(match=_literal(self.keys.prefix) + "*", count=1000)]

        return await self.ask(scan)  # type: ignore[no-any-return]

    # ---------------------------------------------------------------------------------------------------

    async def _payloads(self, ids: Sequence[str]) -> list[tuple[str, bytes]]:
        found: list[tuple[str, bytes]] = []
        for start in range(0, len(ids), _FETCH_AT_ONCE):
            some = ids[start : start + _FETCH_AT_ONCE]

            async def fetch(client: Any, some: Sequence[str] = some) -> Any:
                async with client.pipeline(transaction=False) as pipe:
                    for name in some:
                        pipe.get(self.keys.payload(name))
                    return await pipe.execute()

            found += zip(some, await self.ask(fetch), strict=True)
        return found

    async def _read_all(self, names: Sequence[str]) -> tuple[list[Trajectory], dict[str, str]]:
        """The trajectories, and why some of them cannot be had."""
        found, bad = [], {}
        for name, payload in await self._payloads(names):
            try:
                found.append(self._read(name, payload))
            except (CorruptPayload, InvalidTrajectory) as error:
                bad[name] = str(error)
        return found, bad

    def _read(self, name: str, payload: bytes | None) -> Trajectory:
        """Raises: CorruptPayload or InvalidTrajectory, for what must not be trained on."""
        trajectory = codec.decode(payload or b"", self._shape.max_tokens)
        if trajectory.id != name:
            raise CorruptPayload(f"the payload is of trajectory {trajectory.id}")
        self._shape.check(trajectory)
        return trajectory

    async def run_script(self, script: str, *args: Any) -> Any:
        """The answer of one of the scripts in lua/."""
        return await self.ask(lambda _: self._scripts[script](keys=[self.keys.state], args=args))

    async def ask(self, command: Callable[[Any], Awaitable[Any]]) -> Any:
        """The answer to a command on the client, riding out outages. Raises: the CusearchError that Redis' answer
        means."""
        try:
            return await self.connection.run(lambda: command(self.connection.client))
        except exceptions.ResponseError as error:
            named = self._named(str(error))
            if named is None:
                raise
            raise named from error

    def _named(self, answer: str) -> CusearchError | None:
        """What an error that Redis answers with means, if it is not a mistake of ours."""
        run = self.keys.run
        kind, _, what = answer.partition(" ")
        if kind == "FENCED":
            return Fenced(f"another learner has taken over run {run!r}; this one stops")
        if kind == "LOST":
            return BufferLost(
                f"Redis has lost run {run!r}: {what}; start the learner again, it goes on from its newest checkpoint"
            )
        if kind == "ANOTHER":
            return another_run(run, Origin(*what.split(" ", 2)))
        if kind == "GONE":
            forgotten, _, step = what.partition(" ")
            return ConfigError(
                f"Redis holds run {run!r} with the pools before step {forgotten} forgotten, but the newest checkpoint "
                f"is of step {step}; if another run has this name, choose another run.name; else restore the "
                "checkpoint, or `cusearch reset` the run"
            )
        if kind == "SHAPE":
            name, _, value = what.partition(" ")
            return ConfigError(
                f"Redis holds tickets of run {run!r} that were granted with {_SHAPE_KEYS[name]} = {value}; set it "
                "back, or `cusearch reset` the run"
            )
        is_damaged = any(word in answer for word in _DAMAGE_WORDS)
        return BufferLost(f"{_DAMAGED.format(run)} ({' '.join(answer.split())})") if is_damaged else None

    def _number(self, name: str, value: bytes, kind: type[N] = int) -> N:
        try:
            return kind(value)
        except ValueError as error:
            told = f"{name} = {value.decode(errors='replace')!r}"
            raise BufferLost(f"{_DAMAGED.format(self.keys.run)} ({told})") from error


def _decoded(texts: Iterable[bytes]) -> list[str]:
    return [text.decode() for text in texts]


def _laid_down(shape: Shape) -> str:
    """What the scripts must know of the run, as `recover` writes it into its state."""
    names = ("questions", "rollouts", "max_staleness", "order", "s_max", "max_attempts", "limit", "limit_bytes")
    told = {name: str(getattr(shape, name)) for name in names}
    return json.dumps(told | {"lease_ms": str(int(shape.lease_s * 1000))})


def _told(method: MethodState) -> bytes:
    """As the scripts take it: JSON."""
    return msgspec.json.encode(method)


def _literal(text: str) -> str:
    """`text` for a MATCH pattern, its special characters escaped."""
    return "".join("\\" + c if c in "*?[]\\" else c for c in text)
