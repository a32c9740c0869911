"""The loop of a rollout worker: admitted tickets in, trajectories out, newest weights always.

Three tasks beside the episodes: admission, weight pick-up, heartbeat. What can go wrong, by kind:

- The data of one episode (its question, its search, its trajectory, its time): named in the log and counted in the
  heartbeat. The ticket's other episodes are played to their end; then it goes back, with one failed attempt however
  many of them failed. Others play what is missing, up to pool.max_attempts times.
- An outage (Redis, the retriever, weights that cannot be read): waited for, then the worker exits with its name.
- Anything else is an error in a program: the worker exits with it at once. Its ticket has failed an attempt, so that
  it cannot end one worker after another for ever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cusearch_async.algorithm.staleness import ticket_limit
from cusearch_async.algorithm.tickets import RunQuestions
from cusearch_async.config import Config
from cusearch_async.errors import BufferUnavailable, CusearchError, EpisodeFailed, InvalidTrajectory, SearchRefused
from cusearch_async.lifecycle.progress import log_waiting
from cusearch_async.lifecycle.signals import end_tasks
from cusearch_async.retrieval.client import SearchClient
from cusearch_async.rollout.episode import Player
from cusearch_async.rollout.loading import PatientLoader, wait_until_announced
from cusearch_async.transport.interface import RolloutSlot, WorkerBuffer, WorkerStatus
from cusearch_async.transport.weights import WeightStore
from cusearch_async.types import Trajectory

if TYPE_CHECKING:  # it brings vLLM
    from cusearch_async.rollout.engine import Engine

log = logging.getLogger(__name__)

POLL_S = 0.05
HEARTBEAT_S = 1.0
_FAILED = {TimeoutError: "timeout", SearchRefused: "search", EpisodeFailed: "episode", InvalidTrajectory: "trajectory"}
"""What fails one episode and nothing else, and what it is called in the heartbeat."""


@dataclass(slots=True)
class Activity:
    """What the worker has done since it became ready; sent with every heartbeat."""

    ready_at: float = field(default_factory=time.monotonic)
    episodes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    weight_loads: int = 0
    weight_load_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Grant:
    """A ticket that was granted to this worker. Granted again it is another one: what an old one does is its own."""

    ticket: int
    lacking: int
    """Episodes that have not been played to their end and put."""
    has_failed: bool = False


class RolloutLoop:
    """Consumes tickets of `buffer`, produces trajectories in it. Waits for weights and for admission; unblocked
    by the learner's `announce`."""

    def __init__(
        self,
        name: str,
        config: Config,
        buffer: WorkerBuffer,
        engine: Engine,
        store: WeightStore,
        player: Player,
        search: SearchClient,
        questions: RunQuestions,
    ) -> None:
        self._name = name
        self._config = config
        self._buffer = buffer
        self._engine = engine
        self._loader = PatientLoader(engine, store, config.redis.outage_s)
        self._player = player
        self._search = search
        self._questions = questions
        self._grants: dict[int, _Grant] = {}
        """The newest of each ticket that has not gone back yet. Only the admission loop gives tickets back."""
        self._episodes: dict[asyncio.Task[None], _Grant] = {}
        """Each until its task is done."""
        self._putting = 0
        """Of the episodes, those that are played and wait to be stored."""
        self._activity = Activity()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set; tickets in flight are then given back. Raises what ended the worker, by itself."""
        await self._wait_for_weights(stop)
        self._activity = Activity(weight_loads=1)
        has_buffer = True
        try:
            await self._work(stop)
        except BaseExceptionGroup as group:
            cause = _first(group)
            has_buffer = not isinstance(cause, BufferUnavailable)
            raise cause from None
        finally:
            if has_buffer:
                await self._release_ended()
                await self._buffer.leave(self._name, [])

    async def _work(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            helpers = [tasks.create_task(self._follow_weights(stop)), tasks.create_task(self._send_heartbeats(stop))]
            try:
                await self._admit(tasks, stop)
            finally:
                await end_tasks([*helpers, *self._episodes])

    async def _wait_for_weights(self, stop: asyncio.Event) -> None:
        await wait_until_announced(self._buffer, lambda: _is_over(stop))
        with log_waiting(log, "waiting for the first weights to be loaded"):
            while not _is_over(stop) and not await self._load_announced():
                await asyncio.sleep(POLL_S)

    async def _follow_weights(self, stop: asyncio.Event) -> None:
        while not _is_over(stop):
            await self._load_announced()
            await asyncio.sleep(POLL_S)

    async def _load_announced(self) -> bool:
        """Load the announced version unless it is loaded; whether any version is loaded then. While the announced one
        cannot be, the one before goes on: admission keeps the staleness bound."""
        state = await self._buffer.state()
        if not state.weights or state.weights == self._engine.loaded:
            return bool(self._engine.loaded)
        check = self._activity.weight_loads % self._config.rollout.canary_every == 0
        started, before = time.monotonic(), self._engine.version
        if not await self._loader.load(state.weights, check, idle=not self._episodes):
            return bool(self._engine.loaded)
        self._activity.weight_loads += 1
        self._activity.weight_load_s += time.monotonic() - started
        log.info("loaded weights %s", state.weights)
        if self._engine.version < before:
            await self._end_beyond_bound()
        return True

    @property
    def _limit(self) -> int:
        """Tickets from here on may not be started with the loaded weights."""
        pool = self._config.pool
        return ticket_limit(self._engine.version, pool.max_staleness, self._config.questions_per_step)

    async def _end_beyond_bound(self) -> None:
        """A learner has gone back to its checkpoint, and with it the weights: end the episodes that these weights may
        not start, or their last tokens would be older than max_staleness when they are trained on."""
        limit = self._limit
        await end_tasks([task for task, grant in self._episodes.items() if grant.ticket >= limit])

    async def _admit(self, tasks: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        """Keep up to `max_episodes` episodes at play until `stop`. Those that wait to be stored take no room: with room
        the worker takes over what a dead one has left, and the buffer may be full until that is played."""
        while not _is_over(stop):
            await self._release_ended()
            room = self._config.rollout.max_episodes - (len(self._episodes) - self._putting)
            slots = await self._buffer.admit(self._name, self._engine.version, room) if room > 0 else []
            lacking = Counter(slot.ticket for slot in slots)
            self._grants |= {ticket: _Grant(ticket, count) for ticket, count in lacking.items()}
            if _is_over(stop):
                break
            limit = self._limit  # the weights may have gone back since the question was sent
            for slot in slots:
                if slot.ticket < limit:
                    grant = self._grants[slot.ticket]
                    task = tasks.create_task(self._play(slot, grant))
                    self._episodes[task] = grant
                    task.add_done_callback(self._episodes.pop)
            if not slots:
                await asyncio.sleep(POLL_S)

    async def _release_ended(self) -> None:
        """Give back the tickets that lack episodes though none is in flight any more, with one failed attempt if any
        has failed."""
        in_flight = set(self._episodes.values())
        over = [grant for grant in self._grants.values() if grant not in in_flight]
        for failed in (True, False):
            tickets = sorted(grant.ticket for grant in over if grant.lacking and grant.has_failed is failed)
            if tickets:
                await self._buffer.release(self._name, tickets, failed=failed)
        for grant in over:
            del self._grants[grant.ticket]

    async def _play(self, slot: RolloutSlot, grant: _Grant) -> None:
        question = self._questions.of(slot.ticket)
        try:
            async with asyncio.timeout(self._config.episode.timeout_s):
                trajectory = await self._player.play(question, slot.ticket, slot.rollout, self._name)
            await self._put(trajectory)
        except tuple(_FAILED) as error:
            grant.has_failed = True
            self._activity.failures[_FAILED[type(error)]] += 1
            why = str(error) or "it ran out of time"
            log.warning("episode %d:%d failed, its ticket goes back: %s", slot.ticket, slot.rollout, why)
        except CusearchError:
            raise
        except Exception:
            grant.has_failed = True
            raise
        else:
            grant.lacking -= 1
            self._activity.episodes += 1

    async def _put(self, trajectory: Trajectory) -> None:
        self._putting += 1
        try:
            while await self._buffer.put(trajectory) == "full":
                if _is_cancelled():
                    raise asyncio.CancelledError
                await asyncio.sleep(10 * POLL_S)
        finally:
            self._putting -= 1

    async def _send_heartbeats(self, stop: asyncio.Event) -> None:
        """Renew the leases, unless the engine hangs: then others must have the tickets."""
        lease_s, hangs = self._config.redis.lease_s, False
        while not _is_over(stop):
            age_s = self._engine.last_token_age_s
            if age_s > lease_s and not hangs:
                log.warning("the engine has made no token for %.0f s: its tickets go to other workers", age_s)
            hangs = age_s > lease_s
            tickets = [] if hangs else sorted({grant.ticket for grant in self._episodes.values()})
            await self._buffer.heartbeat(self._name, tickets, self._status())
            await asyncio.sleep(HEARTBEAT_S)

    def _status(self) -> WorkerStatus:
        activity, engine = self._activity, self._engine
        return WorkerStatus(
            version=engine.version,
            in_flight=len(self._episodes),
            episodes=activity.episodes,
            failed_episodes=activity.failures.total(),
            failed_episodes_by_kind=" ".join(f"{kind}:{n}" for kind, n in sorted(activity.failures.items())),
            sampled_tokens=engine.sampled_tokens,
            busy_s=round(engine.busy_s, 3),
            last_token_age_s=round(engine.last_token_age_s, 1),
            alive_s=round(time.monotonic() - activity.ready_at, 3),
            weight_loads=activity.weight_loads,
            weight_load_s=round(activity.weight_load_s, 3),
            **self._search.status(),
        )


def _is_over(stop: asyncio.Event) -> bool:
    """Whether a loop has to end: a library in between may have swallowed the one cancellation that says so."""
    return stop.is_set() or _is_cancelled()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _first(error: BaseException) -> BaseException:
    """The failure that came first, out of a group of a TaskGroup."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
