"""The keys of a run in Redis: commands, the state of the run, and the errors of the scripts."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from redis import exceptions

from cusearch_async.errors import BufferLost, ConfigError, CusearchError, Fenced
from cusearch_async.run.identity import NOBODY, Identity, granted_otherwise, has_joined, refusal
from cusearch_async.transport.connection import Connection
from cusearch_async.transport.interface import AHEAD_S, ALIVE_S, LearnerStatus, Ledger, Queues, RunState, WorkerStatus
from cusearch_async.transport.keys import Keys
from cusearch_async.transport.limits import RunLimits
from cusearch_async.transport.scripts import SCRIPTS, script

N = TypeVar("N", int, float)
S = TypeVar("S", WorkerStatus, LearnerStatus)

_DAMAGE_WORDS = ("WRONGTYPE", "user_script", "not an integer", "not a valid float")
"""Words in the errors of a server whose data was not written by our scripts."""
_REMEDY = "a restart does not help: restore the data, or `cusearch reset` the run"
_PLACE = ("run_id", "host", "folder")
"""Fields of `state` that belong to the run, and not to its learner."""


class RedisRun:
    """Operations that every process of a run uses: implements `interface.RunView`."""

    def __init__(self, connection: Connection, run: str, limits: RunLimits, identity: Identity = NOBODY) -> None:
        self.keys = Keys(run)
        self.connection = connection
        self._limits = limits
        self._identity = identity
        self._life = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._scripts = {name: connection.client.register_script(script(name)) for name in SCRIPTS}

    def next_name(self) -> str:
        """A unique name: "process/number". Numbers increase."""
        return f"{self._life}/{next(self._numbers)}"

    async def state(self) -> RunState:
        raw, next_ticket = await self.ask_all(lambda pipe: pipe.hgetall(self.keys.state).get(self.keys.next_ticket))
        known = {text_of(name): value for name, value in raw.items()} | {"next_ticket": next_ticket or b"0"}
        weights = text_of(known.pop("weights", b""))
        numbers = {
            name: self._number(name, known[name]) for name in known.keys() & RunState.__dataclass_fields__.keys()
        }
        names = text_of(known.get("method_fields", b"")).split()
        fields = {name: self._number(name, known.get(name, b""), float) for name in names}
        others: dict[str, Any] = {"weights": weights, "paused": bool(numbers.get("paused")), "fields": fields}
        return RunState(**(numbers | others))

    async def identity(self) -> Identity:
        keys = self.keys
        contract, place = await self.ask_all(lambda pipe: pipe.hgetall(keys.contract).hmget(keys.state, *_PLACE))
        terms = {text_of(key): text_of(text) for key, text in contract.items()}
        terms.pop("digest", None)
        return Identity(terms, *(text_of(value or b"") for value in place))

    async def check_identity(self, accepts_changes: bool = False) -> bool:
        run = await self.identity()
        if is_it := has_joined(self.keys.run, self._identity, run, accepts_changes):
            self._identity = self._identity.after_joining(run)
        return is_it

    async def ledger(self) -> Ledger:
        raw = await self.ask(lambda client: client.hgetall(self.keys.ledger))
        counts = {text_of(name): self._number(text_of(name), value) for name, value in raw.items()}
        return Ledger(**{name: counts.get(name, 0) for name in Ledger.__dataclass_fields__})

    async def server_memory(self) -> tuple[int, int]:
        async def info(client: Any) -> dict[str, Any]:
            try:
                return dict(await client.info("memory"))
            except exceptions.NoPermissionError:
                return {}

        found = await self.ask(info)
        return int(found.get("used_memory", 0)), int(found.get("maxmemory", 0))

    async def queues(self, step: int) -> Queues:
        keys, (first, last) = self.keys, self._limits.due(step)

        def count(pipe: Any) -> None:
            pipe.zcount(keys.ready, first, last).zcount(keys.taken, first, last)
            pipe.zcard(keys.ready).zcard(keys.lease).zcard(keys.requeue).hlen(keys.incomplete)
            pipe.exists(keys.pool_info(step)).hget(keys.reserved, step)

        due, taken, *counts, is_claimed, kept = await self.ask_all(count)
        names = ("ready", "leased", "requeued", "incomplete")
        found = dict(zip(names, counts, strict=True))
        ready_of_pool = self._limits.ready_of_pool(step, found["ready"], due + taken)
        if kept:  # these, and no others
            ready_of_pool = sum(
                place is not None
                for place in await self.ask(lambda client: client.zmscore(keys.ready, kept.split(b",")))
            )
        return Queues(is_claimed=bool(is_claimed), ready_of_pool=ready_of_pool, **found)

    async def learner(self) -> LearnerStatus | None:
        raw, left_ms = await self.ask_all(lambda pipe: pipe.hgetall(self.keys.learner).pttl(self.keys.learner))
        age_s = ALIVE_S - left_ms / 1000  # below 0 where the server's clock was put back, for as long as by how much
        return self._status(LearnerStatus, raw, age_s) if raw and age_s > -AHEAD_S else None

    async def workers(self) -> dict[str, WorkerStatus]:
        keys = self.keys
        (seconds, micros), beats = await self.ask_all(
            lambda pipe: pipe.time().zrange(keys.workers, 0, -1, withscores=True)
        )
        now = seconds + micros / 1e6
        fields = await self.ask_all(lambda pipe: [pipe.hgetall(keys.worker(text_of(name))) for name, _ in beats])
        return {
            text_of(name): self._status(WorkerStatus, raw, now - beat / 1000)
            for (name, beat), raw in zip(beats, fields, strict=True)
        }

    def _status(self, kind: type[S], raw: dict[bytes, bytes], age_s: float) -> S:
        fields = {text_of(name): text_of(value) for name, value in raw.items()}
        try:
            return msgspec.convert(fields | {"heartbeat_age_s": age_s}, kind, strict=False)
        except msgspec.ValidationError as error:
            raise self._damaged(f"{kind.__name__}: {error}") from error

    async def run_script(self, script: str, *args: Any) -> Any:
        """The result of a script in lua/."""
        return await self.ask(lambda _: self._scripts[script](keys=[self.keys.state], args=args))

    async def ask_all(self, fill: Callable[[Any], Any]) -> list[Any]:
        """The answers to the commands that `fill` adds to a transaction."""

        async def send(client: Any) -> Any:
            async with client.pipeline() as pipe:
                fill(pipe)
                return await pipe.execute()

        return await self.ask(send)  # type: ignore[no-any-return]

    async def ask(self, command: Callable[[Any], Awaitable[Any]]) -> Any:
        """The answer to a command on the client; it is retried during outages. Raises: the CusearchError for an error
        of Redis."""
        try:
            return await self.connection.run(lambda: command(self.connection.client))
        except exceptions.ResponseError as error:
            named = self._named(str(error))
            if named is None:
                raise
            raise named from error

    def _named(self, answer: str) -> CusearchError | None:
        """The error for an error message of Redis; None when it is a bug in this code."""
        run = self.keys.run
        kind, _, what = answer.partition(" ")
        first, _, second = what.partition(" ")
        found: CusearchError | None = None
        if kind == "FENCED":
            found = Fenced(f"another learner has taken over run {run!r}; this one stops")
        elif kind in ("LOST", "DAMAGED"):
            again = "start the learner again, it continues from its newest checkpoint"
            remedy = again if kind == "LOST" else _REMEDY
            found = BufferLost(f"Redis has lost data of run {run!r}: {what}; {remedy}")
        elif kind == "ANOTHER":
            found = refusal(run, self._identity, msgspec.json.decode(what, type=Identity))
        elif kind == "GRANTED":
            found = granted_otherwise(run, first, getattr(self._limits, first), second)
        elif kind == "GONE":
            found = ConfigError(
                f"Redis has forgotten the pools of run {run!r} before step {first}, but the newest checkpoint is of "
                f"step {second}; if another run has this name, choose another run.name; otherwise restore the "
                "checkpoint, or `cusearch reset` the run"
            )
        elif any(word in answer for word in _DAMAGE_WORDS):
            found = self._damaged(" ".join(answer.split()))
        return found

    def _number(self, name: str, value: bytes, kind: type[N] = int) -> N:
        try:
            return kind(value)
        except ValueError as error:
            raise self._damaged(f"{name} = {text_of(value)!r}") from error

    def _damaged(self, found: str) -> BufferLost:
        return BufferLost(
            f"the data of run {self.keys.run!r} in Redis is damaged, or was written by another program or version; "
            f"{_REMEDY} ({found})"
        )


def reported(status: WorkerStatus | LearnerStatus) -> list[Any]:
    """Field, value, … for the script that stores a heartbeat. Its age comes from Redis' clock."""
    fields = msgspec.structs.asdict(status)
    del fields["heartbeat_age_s"]
    return list(itertools.chain.from_iterable(fields.items()))


def text_of(value: bytes) -> str:
    """Also of bytes that no script of ours has written."""
    return value.decode(errors="replace")
