"""The rollout buffer in Redis, keyed by search depth.

Workers are admitted to tickets and put finished trajectories; the learner claims whole pools, commits what it
did with them, and announces weights. Each of these is one Lua script: it happens wholly or not at all, and
repeating it does no harm. docs/redis.md names every key.

Covered: any worker or learner may die at any time; nothing that was put is lost or trained twice in one
lineage. Not covered: what Redis itself loses (see appendfsync in docs/redis.md).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import redis.asyncio as aioredis
from redis import exceptions

from cusearch_async.algorithm import methods
from cusearch_async.config import Config, redis_password
from cusearch_async.errors import BufferUnavailable, ConfigError, CorruptPayload, Fenced, InvalidTrajectory
from cusearch_async.transport import codec
from cusearch_async.transport.keys import Keys
from cusearch_async.types import Pool, Trajectory

_SCRIPTS = ("admit", "heartbeat", "put", "claim", "commit", "announce", "checkpoint", "recover")
_FETCH_AT_ONCE = 64
_RETRY_S = 0.2
_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class Place:
    """One rollout that a worker has been granted."""

    ticket: int
    rollout: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a run stands. Steps, versions and tickets count from 0."""

    epoch: int = 0
    step: int = 0
    """The next step to commit; also the version of the learner's policy."""
    phase: int = 0
    published: int = -1
    """Newest announced weight version; -1 before the first."""
    weights: str = ""
    """Its directory in the weight store."""
    next_ticket: int = 0
    checkpoint: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where every finished trajectory is. It closes: finished = the sum of the next five."""

    finished: int = 0
    buffered: int = 0
    claimed: int = 0
    trained: int = 0
    unselected: int = 0
    expired: int = 0
    duplicates_refused: int = 0
    late_refused: int = 0
    requeued: int = 0

    @property
    def closes(self) -> bool:
        return self.finished == self.buffered + self.claimed + self.trained + self.unselected + self.expired


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the buffer must know of the run."""

    questions: int
    """N, groups per pool."""
    rollouts: int
    """G, trajectories per group; a method may give single groups another size when it commits."""
    max_staleness: int
    order: str
    s_max: int
    lease_s: float
    limit: int
    """Most buffered trajectories beyond the pool that is waited for."""


def shape_of(config: Config) -> Shape:
    return Shape(
        questions=config.questions_per_step,
        rollouts=config.pool.rollouts,
        max_staleness=config.pool.max_staleness,
        order=config.pool.order,
        s_max=config.episode.s_max,
        lease_s=config.redis.lease_s,
        limit=config.buffer_limit,
    )


@asynccontextmanager
async def open_buffer(config: Config) -> AsyncIterator[Buffer]:
    """The buffer of a run, on a client of its own. No connection is made yet."""
    client = connect(config.redis.url, redis_password())
    try:
        yield Buffer(client, config.run.name, shape_of(config))
    finally:
        await client.aclose()


def connect(url: str, password: str | None) -> Any:
    """A client for one process; no connection is made yet. Callers beyond its connections wait for one."""
    optional = {"password": password} if password else {}
    pool = aioredis.BlockingConnectionPool.from_url(url, max_connections=_CONNECTIONS, timeout=None, **optional)
    return aioredis.Redis.from_pool(pool)


class Buffer:
    """The contract between workers and learner, on one Redis."""

    def __init__(self, client: Any, run: str, shape: Shape) -> None:
        self.keys = Keys(run)
        self._redis = client
        self._shape = shape
        self._epoch = 0
        self._admissions = itertools.count()
        folder = resources.files("cusearch_async.transport") / "lua"
        self._scripts = {
            name: client.register_script((folder / f"{name}.lua").read_text(encoding="utf-8")) for name in _SCRIPTS
        }

    async def wait_until_reachable(self, timeout_s: float) -> None:
        """Raises: BufferUnavailable when Redis does not answer within `timeout_s`, or at once when it refuses."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self.state()
                return
            except BufferUnavailable as error:
                is_refusal = isinstance(error.__cause__, exceptions.AuthenticationError | exceptions.ResponseError)
                if is_refusal or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)

    # --- rollout worker -------------------------------------------------------------------------------

    async def admit(self, worker: str, loaded_version: int, room: int) -> list[Place]:
        """Lease whole groups of up to `room` rollouts in all; empty while the staleness bound leaves none.

        Requeued tickets come first, without the rollouts that are in the buffer already."""
        keys = self.keys
        token = f"{worker}/{next(self._admissions)}"
        granted = await self._run(
            "admit",
            [keys.state, keys.lease, keys.owner, keys.requeue, keys.ledger, keys.worker(worker), keys.sizes],
            [
                worker,
                token,
                room,
                int(self._shape.lease_s * 1000),
                loaded_version,
                self._shape.max_staleness,
                self._shape.questions,
                self._shape.rollouts,
                keys.prefix,
            ],
        )
        return [Place(*map(int, place.split(b":"))) for place in granted]

    async def put(self, trajectory: Trajectory) -> str:
        """Store a trajectory: `stored`, `duplicate`, `late`, or `full` (nothing stored, try again later).

        Raises: BufferUnavailable when Redis cannot take it; InvalidTrajectory when it is deeper than s_max."""
        if trajectory.depth > self._shape.s_max:
            raise InvalidTrajectory(
                f"trajectory {trajectory.id}: depth must be at most episode.s_max ({self._shape.s_max}), "
                f"got {trajectory.depth}"
            )
        keys = self.keys
        fields = itertools.chain.from_iterable(codec.readable_fields(trajectory).items())
        answer: bytes = await self._run(
            "put",
            [
                keys.state,
                keys.lease,
                keys.owner,
                keys.requeue,
                keys.groups,
                keys.ready,
                keys.ledger,
                keys.depth(trajectory.depth),
                keys.trajectory(trajectory.id),
                keys.sizes,
            ],
            [
                trajectory.ticket,
                trajectory.id,
                self._shape.rollouts,
                self._shape.questions,
                self._shape.limit,
                codec.encode(trajectory),
                *fields,
            ],
        )
        return answer.decode()

    async def heartbeat(self, worker: str, tickets: Sequence[int], facts: dict[str, str | int | float]) -> None:
        """Renew the leases of `tickets` and publish `facts` in the worker's hash."""
        await self._beat(worker, tickets, facts, self._shape.lease_s)

    async def give_back(self, worker: str, tickets: Sequence[int]) -> None:
        """End the leases of `tickets` now: another worker may play what is missing."""
        await self._beat(worker, tickets, {}, 0.0)

    async def leave(self, worker: str, tickets: Sequence[int]) -> None:
        """Give back `tickets` and be no worker of the run any more."""
        await self.give_back(worker, tickets)
        async with self._named_failures():
            await self._redis.zrem(self.keys.workers, worker)
            await self._redis.unlink(self.keys.worker(worker))

    async def _beat(
        self, worker: str, tickets: Sequence[int], facts: dict[str, str | int | float], lease_s: float
    ) -> None:
        keys = self.keys
        await self._run(
            "heartbeat",
            [keys.workers, keys.worker(worker), keys.lease, keys.owner],
            [
                worker,
                int(lease_s * 1000),
                len(tickets),
                *tickets,
                *itertools.chain.from_iterable(facts.items()),
            ],
        )

    # --- learner --------------------------------------------------------------------------------------

    async def recover(self, step: int, state: methods.State, sizes: Mapping[int, int]) -> None:
        """Take over the run at `step`, with the method's state and the group sizes by ticket that the checkpoint
        holds; earlier learners are fenced off.

        Pools that were trained after that step are claimed again, each by its step.
        Raises: ConfigError when Redis has already forgotten pools that the checkpoint needs."""
        try:
            self._epoch = await self._run(
                "recover",
                [self.keys.state, self.keys.ledger, self.keys.visits, self.keys.sizes],
                [step, self._shape.questions, self.keys.prefix, _memory(state, state.visits, sizes)],
            )
        except exceptions.ResponseError as error:
            if not str(error).startswith("GONE"):
                raise
            raise ConfigError(
                f"Redis holds run {self.keys.run!r} with the pools before step {str(error).split()[-1]} forgotten, but "
                f"the newest checkpoint is of step {step}; restore the checkpoint, or `cusearch reset` the run"
            ) from error

    @property
    def epoch(self) -> int:
        """Number of this learner's reign; 0 before `recover`."""
        return self._epoch

    async def claim(self, step: int) -> Pool | None:
        """The pool of a step, or None while it is not complete. Asking again gives the same pool.

        Raises: Fenced when another learner has taken over; CorruptPayload naming the trajectory."""
        keys = self.keys
        shape = self._shape
        ids = await self._run(
            "claim",
            [keys.state, keys.ready, keys.ledger, keys.pool(step), keys.sizes],
            [self._epoch, step, shape.questions, shape.rollouts, shape.order, keys.prefix],
        )
        if not ids:
            return None
        names = sorted((i.decode() for i in ids), key=lambda i: tuple(map(int, i.split(":"))))
        trajectories = [t async for t in self._fetch(names)]
        return Pool(step, tuple(trajectories))

    async def commit(
        self, pool: Pool, selected: Sequence[Trajectory], state: methods.State, sizes: Mapping[int, int]
    ) -> None:
        """The pool's step has trained on `selected` of it and ends with `state`; coming tickets get the group
        `sizes`, unless they have one. Repeating it changes nothing."""
        keys = self.keys
        memory = _memory(state, {t.question_id for t in pool}, sizes)
        await self._run(
            "commit",
            [keys.state, keys.ledger, keys.pool(pool.step), keys.visits, keys.sizes],
            [self._epoch, pool.step, keys.prefix, memory, *(t.id for t in selected)],
        )

    async def announce(self, version: int, directory: str) -> None:
        """Tell the workers that weight version `version` is complete in `directory`."""
        await self._run("announce", [self.keys.state], [self._epoch, version, directory])

    async def checkpoint(self, step: int) -> None:
        """All steps before `step` are safe in every kept checkpoint: forget their pools."""
        await self._run("checkpoint", [self.keys.state, self.keys.sizes], [self._epoch, step, self.keys.prefix])

    # --- looking in -----------------------------------------------------------------------------------

    async def state(self) -> State:
        async with self._named_failures():
            raw = await self._redis.hgetall(self.keys.state)
        values: dict[str, Any] = {}
        for key, value in raw.items():
            name = key.decode()
            if name in State.__dataclass_fields__:
                values[name] = value.decode() if name == "weights" else int(value)
        return State(**values)

    async def ledger(self) -> Ledger:
        async with self._named_failures():
            raw = await self._redis.hgetall(self.keys.ledger)
        counts = {key.decode(): int(value) for key, value in raw.items()}
        return Ledger(**{name: counts.get(name, 0) for name in Ledger.__dataclass_fields__})

    async def capacities(self) -> list[int]:
        """Buffered trajectories per depth 0..S_max."""
        async with self._named_failures(), self._redis.pipeline(transaction=False) as pipe:
            for depth in range(self._shape.s_max + 1):
                pipe.zcard(self.keys.depth(depth))
            return [int(n) for n in await pipe.execute()]

    async def workers(self) -> dict[str, dict[str, str]]:
        """What each worker said of itself at its last heartbeat, with `heartbeat_age_s`."""
        async with self._named_failures():
            seconds, micros = await self._redis.time()
            beats = await self._redis.zrange(self.keys.workers, 0, -1, withscores=True)
            async with self._redis.pipeline(transaction=False) as pipe:
                for name, _ in beats:
                    pipe.hgetall(self.keys.worker(name.decode()))
                facts = await pipe.execute()
        now = seconds + micros / 1e6
        found = {}
        for (name, beat), raw in zip(beats, facts, strict=True):
            told = {k.decode(): v.decode() for k, v in raw.items() if not k.startswith(b"admit_")}
            found[name.decode()] = told | {"heartbeat_age_s": f"{now - beat / 1000:.1f}"}
        return found

    async def reset(self) -> int:
        """Delete every key of the run; returns how many there were."""
        deleted = 0
        async with self._named_failures():
            async for key in self._redis.scan_iter(match=_literal(self.keys.prefix) + "*", count=1000):
                deleted += int(await self._redis.unlink(key))
        return deleted

    # ---------------------------------------------------------------------------------------------------

    async def _fetch(self, ids: Sequence[str]) -> AsyncIterator[Trajectory]:
        for start in range(0, len(ids), _FETCH_AT_ONCE):
            some = ids[start : start + _FETCH_AT_ONCE]
            async with self._named_failures(), self._redis.pipeline(transaction=False) as pipe:
                for name in some:
                    pipe.hget(self.keys.trajectory(name), "payload")
                payloads = await pipe.execute()
            for name, payload in zip(some, payloads, strict=True):
                try:
                    yield codec.decode(payload or b"")
                except CorruptPayload as error:
                    raise CorruptPayload(f"trajectory {name}: {error}") from error

    async def _run(self, script: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        async with self._named_failures():
            return await self._scripts[script](keys=keys, args=args)

    @asynccontextmanager
    async def _named_failures(self) -> AsyncIterator[None]:
        """Failures of Redis by our names, with what to do about them."""
        where = self._redis.connection_pool.connection_kwargs
        address = f"{where.get('host', 'localhost')}:{where.get('port', 6379)}"
        try:
            yield
        except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
            raise BufferUnavailable(
                f"Redis at {address} refuses us ({error}); set CUSEARCH_REDIS_PASSWORD, and the user name in redis.url"
            ) from error
        except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
            raise BufferUnavailable(
                f"Redis at {address} cannot be reached ({error}); start one (`cusearch redis CONFIG`) or mend redis.url"
            ) from error
        except exceptions.ResponseError as error:
            if "FENCED" in str(error):
                raise Fenced(f"another learner has taken over run {self.keys.run!r}; this one stops") from error
            if "NOAUTH" in str(error):
                raise BufferUnavailable(f"Redis at {address} wants a password; set CUSEARCH_REDIS_PASSWORD") from error
            raise


def _memory(state: methods.State, questions: Iterable[str], sizes: Mapping[int, int]) -> str:
    """What a method remembers, as the scripts take it; of the questions' histories those of `questions`."""
    histories = {name: state.visits[name] for name in questions if name in state.visits}
    visits = {name: " ".join(f"{passed}/{played}" for passed, played in h) for name, h in histories.items()}
    return json.dumps({"phase": state.phase, "visits": visits, "sizes": {str(t): n for t, n in sizes.items()}})


def _literal(text: str) -> str:
    """`text` for a MATCH pattern, its special characters escaped."""
    return "".join("\\" + c if c in "*?[]\\" else c for c in text)
