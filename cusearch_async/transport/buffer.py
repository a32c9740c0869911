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
from typing import Any

import msgspec
from redis import exceptions

from cusearch_async.algorithm import methods
from cusearch_async.batcher import Batcher
from cusearch_async.config import Config, redis_password
from cusearch_async.errors import BufferLost, ConfigError, CorruptPayload, EmptyPool, Fenced, InvalidTrajectory
from cusearch_async.transport import codec
from cusearch_async.transport.connection import Connection
from cusearch_async.transport.contract import LEARNER_ALIVE_S, Ledger, Outcome, Place, Queues, RunState, Shape, shape_of
from cusearch_async.transport.keys import Keys
from cusearch_async.transport.scripts import script
from cusearch_async.types import Pool, Trajectory

log = logging.getLogger(__name__)

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
)
_FETCH_AT_ONCE = 64
_PUT_AT_ONCE = 64
_STAGED_S = 600
"""A staged payload that no put took up is gone after this."""


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


class RedisBuffer:
    """Keeps the contract of `contract.Buffer` on one Redis."""

    def __init__(self, connection: Connection, run: str, shape: Shape) -> None:
        self.keys = Keys(run)
        self.connection = connection
        self._shape = shape
        self._epoch = 0
        self._life = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._puts: Batcher[_Put, Outcome] = Batcher(self._send_puts, _PUT_AT_ONCE)
        self._scripts = {name: connection.client.register_script(script(name)) for name in _SCRIPTS}

    # --- rollout worker -------------------------------------------------------------------------------

    async def admit(self, worker: str, loaded_version: int, room: int) -> list[Place]:
        shape = self._shape
        token = f"{self._life}/{next(self._numbers)}"
        granted = await self._run(
            "admit",
            worker,
            token,
            room,
            int(shape.lease_s * 1000),
            loaded_version,
            shape.max_staleness,
            shape.questions,
            shape.rollouts,
            shape.max_attempts,
        )
        return [Place(*map(int, place.split(b":"))) for place in granted]

    async def put(self, trajectory: Trajectory) -> Outcome:
        self._shape.check(trajectory)
        payload = codec.encode(trajectory)
        name = f"{self._life}/{next(self._numbers)}"
        fields = codec.readable_fields(trajectory) | {"bytes": len(payload)}
        listed = list(itertools.chain.from_iterable(fields.items()))
        request = (trajectory.id, name, trajectory.depth, fields["version"], len(payload), listed)
        return await self._puts(_Put(self.keys.staged(name), payload, msgspec.msgpack.encode(request)))

    async def _send_puts(self, batch: Sequence[_Put]) -> list[Outcome]:
        outcomes = await self.ask(functools.partial(self._send, batch))
        return [outcome.decode() for outcome in outcomes]

    async def _send(self, batch: Sequence[_Put], client: Any) -> Any:
        shape, script = self._shape, self._scripts["put"]
        numbers = (shape.rollouts, shape.questions, shape.limit, shape.limit_bytes)
        try:
            async with client.pipeline(transaction=False) as pipe:
                for put in batch:
                    pipe.execute_command("SET", put.staged, put.payload, "EX", _STAGED_S)
                pipe.evalsha(script.sha, 1, self.keys.state, *numbers, *(put.request for put in batch))
                return (await pipe.execute())[-1]
        except exceptions.NoScriptError:
            await client.script_load(script.script)
            return await self._send(batch, client)

    async def heartbeat(self, worker: str, tickets: Sequence[int], facts: Mapping[str, str | int | float]) -> None:
        lease_ms = int(self._shape.lease_s * 1000)
        told = itertools.chain.from_iterable(facts.items())
        await self._run("heartbeat", worker, lease_ms, len(tickets), *tickets, *told)

    async def release(self, worker: str, tickets: Sequence[int], failed: bool) -> None:
        await self._release(worker, tickets, failed=failed, leaves=False)

    async def leave(self, worker: str, tickets: Sequence[int]) -> None:
        await self._release(worker, tickets, failed=False, leaves=True)

    async def _release(self, worker: str, tickets: Sequence[int], failed: bool, leaves: bool) -> None:
        shape = self._shape
        await self._run("release", worker, int(failed), shape.max_attempts, shape.rollouts, int(leaves), *tickets)

    # --- learner --------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._epoch

    async def recover(self, step: int, state: methods.State, sizes: Mapping[int, int], least_epoch: int = 0) -> None:
        try:
            memory, nonce = _memory(state, state.visits, sizes), uuid.uuid4().hex
            self._epoch = await self._run("recover", step, self._shape.questions, memory, nonce, least_epoch)
        except exceptions.ResponseError as error:
            if not str(error).startswith("GONE"):
                raise
            raise ConfigError(
                f"Redis holds run {self.keys.run!r} with the pools before step {str(error).split()[-1]} forgotten, but "
                f"the newest checkpoint is of step {step}; if another run has this name, choose another run.name; else "
                "restore the checkpoint, or `cusearch reset` the run"
            ) from error

    async def claim(self, step: int, question_of: Callable[[int], str] | None = None) -> Pool | None:
        shape = self._shape
        try:
            ids = await self._run("claim", self._epoch, step, shape.questions, shape.rollouts, shape.order, shape.s_max)
        except exceptions.ResponseError as error:
            if not str(error).startswith("EMPTY"):
                raise
            raise EmptyPool(_nothing_left(step)) from error
        if not ids:
            return None
        names = sorted((i.decode() for i in ids), key=lambda i: tuple(map(int, i.split(":"))))
        trajectories = []
        for name, payload in await self._payloads(names):
            try:
                trajectories.append(self._read(name, payload))
            except (CorruptPayload, InvalidTrajectory) as error:
                log.warning("trajectory %s is quarantined: %s", name, error)
                await self._run("quarantine", name, str(error), self._epoch, step)
        if not trajectories:
            raise EmptyPool(_nothing_left(step))
        return Pool(step, tuple(trajectories))

    async def commit(
        self, pool: Pool, selected: Sequence[Trajectory], state: methods.State, sizes: Mapping[int, int]
    ) -> None:
        memory = _memory(state, {t.question_id for t in pool}, sizes)
        try:
            await self._run("commit", self._epoch, pool.step, memory, *(t.id for t in selected))
        except exceptions.ResponseError as error:
            if not str(error).startswith("LOST"):
                raise
            raise BufferLost(
                f"Redis has gone back in time: it is at step {str(error).split()[-1]} of run {self.keys.run!r} and "
                f"knows nothing of pool {pool.step}; start the learner again, it goes on from its newest checkpoint"
            ) from error

    async def announce(self, version: int, directory: str) -> None:
        await self._run("announce", self._epoch, version, directory)

    async def checkpoint(self, step: int) -> None:
        await self._run("checkpoint", self._epoch, step)

    def follow_epoch(self, epoch: int) -> None:
        """Speak for the learner that has taken the run over as `epoch` on another connection."""
        self._epoch = epoch

    async def learner_heartbeat(self, facts: Mapping[str, str | int | float]) -> None:
        told = itertools.chain.from_iterable(facts.items())
        await self._run("learner", self._epoch, int(LEARNER_ALIVE_S * 1000), *told)

    async def learner_leaves(self) -> None:
        await self._run("learner", self._epoch, 0)

    # --- operator -------------------------------------------------------------------------------------

    async def pause(self, paused: bool) -> None:
        await self.ask(lambda client: client.hset(self.keys.state, "paused", int(paused)))

    async def quarantine(self, trajectory_id: str, reason: str) -> bool:
        return bool(await self._run("quarantine", trajectory_id, reason, "", ""))

    async def reopen(self, ticket: int) -> bool:
        return bool(await self._run("reopen", ticket, self._shape.rollouts))

    async def state(self) -> RunState:
        async def read(client: Any) -> Any:
            async with client.pipeline(transaction=False) as pipe:
                return await pipe.hgetall(self.keys.state).get(self.keys.next_ticket).execute()

        raw, next_ticket = await self.ask(read)
        values: dict[str, Any] = {"next_ticket": int(next_ticket or 0)}
        for key, value in raw.items():
            name = key.decode()
            if name in RunState.__dataclass_fields__:
                values[name] = value.decode() if name == "weights" else int(value)
        return RunState(**(values | {"paused": bool(values.get("paused"))}))

    async def ledger(self) -> Ledger:
        raw = await self.ask(lambda client: client.hgetall(self.keys.ledger))
        counts = {key.decode(): int(value) for key, value in raw.items()}
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
        return told | {"heartbeat_age_s": f"{LEARNER_ALIVE_S - left_ms / 1000:.1f}"} if told else {}

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

    def _read(self, name: str, payload: bytes | None) -> Trajectory:
        """Raises: CorruptPayload or InvalidTrajectory, for what must not be trained on."""
        if payload is None:
            raise CorruptPayload("the payload is missing")
        trajectory = codec.decode(payload, self._shape.max_tokens)
        if trajectory.id != name:
            raise CorruptPayload(f"the payload is of trajectory {trajectory.id}")
        self._shape.check(trajectory)
        return trajectory

    async def _run(self, script: str, *args: Any) -> Any:
        try:
            return await self.connection.run(lambda: self._scripts[script](keys=[self.keys.state], args=args))
        except exceptions.ResponseError as error:
            if "FENCED" in str(error):
                raise Fenced(f"another learner has taken over run {self.keys.run!r}; this one stops") from error
            raise

    async def ask(self, command: Callable[[Any], Awaitable[Any]]) -> Any:
        """The answer to a command on the client, riding out outages."""
        return await self.connection.run(lambda: command(self.connection.client))


def _nothing_left(step: int) -> str:
    return (
        f"the pool of step {step} holds no trajectory: every episode of it failed pool.max_attempts times, or was "
        "quarantined; see the workers' logs and `cusearch buffer quarantine`"
    )


def _memory(state: methods.State, questions: Iterable[str], sizes: Mapping[int, int]) -> str:
    """What a method remembers, as the scripts take it; of the questions' histories those of `questions`."""
    histories = {name: state.visits[name] for name in questions if name in state.visits}
    visits = {name: " ".join(f"{passed}/{played}" for passed, played in h) for name, h in histories.items()}
    return json.dumps({"phase": state.phase, "visits": visits, "sizes": {str(t): n for t, n in sizes.items()}})


def _literal(text: str) -> str:
    """`text` for a MATCH pattern, its special characters escaped."""
    return "".join("\\" + c if c in "*?[]\\" else c for c in text)
