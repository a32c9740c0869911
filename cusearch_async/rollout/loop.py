"""The loop of a rollout worker: it leases tickets, runs their episodes with the newest weights, and puts the
trajectories into the buffer.

An error of one episode (its question, search, reward, trajectory or timeout) is logged and counted; the ticket's other
episodes run to their end, then it is released with one failed attempt, up to pool.max_attempts. In an outage (Redis,
the retriever, weights that cannot be read) the worker waits, and then exits. Any other error is a bug: the worker exits
at once, and its ticket gets a failed attempt, so that it cannot end one worker after another. An episode whose group
another worker has finished is left off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cusearch_async.algorithm.tickets import RunQuestions, ticket_limit
from cusearch_async.config import Config
from cusearch_async.errors import OF_ONE_EPISODE, BufferUnavailable, CusearchError
from cusearch_async.lifecycle.progress import log_waiting
from cusearch_async.lifecycle.signals import end_tasks, unless_stopped
from cusearch_async.retrieval.client import SearchClient
from cusearch_async.rollout.episode import EpisodeRunner
from cusearch_async.rollout.failures import Failures
from cusearch_async.rollout.room import Room
from cusearch_async.rollout.weight_loader import Finish, PatientLoader, wait_until_announced
from cusearch_async.transport.interface import IDLE_S, RolloutSlot, WorkerBuffer, WorkerStatus
from cusearch_async.types import Trajectory
from cusearch_async.weights.interface import WeightSource

if TYPE_CHECKING:  # it brings vLLM
    from cusearch_async.rollout.engine import Engine

log = logging.getLogger(__name__)

POLL_S = 0.05
HEARTBEAT_S = 1.0


@dataclass(slots=True)
class Activity:
    """Totals since the worker became ready; sent with every heartbeat."""

    ready_at: float = field(default_factory=time.monotonic)
    episodes: int = 0
    failures: Failures = field(default_factory=Failures)
    weight_loads: int = 0
    weight_load_s: float = 0.0
    late_episodes: int = 0


@dataclass(slots=True, eq=False)
class _Grant:
    """One grant of a ticket to this worker; granted again, it is another one."""

    ticket: int
    lacking: int
    """Episodes that are not buffered yet."""
    has_failed: bool = False


class RolloutLoop:
    """Consumes tickets of `buffer`, produces trajectories in it. Waits for weights and for admission; the learner's
    `announce` ends both waits."""

    def __init__(
        self,
        name: str,
        config: Config,
        buffer: WorkerBuffer,
        engine: Engine,
        source: WeightSource,
        runner: EpisodeRunner,
        search: SearchClient,
        questions: RunQuestions,
        finish: Finish | None = None,
    ) -> None:
        self._name = name
        self._config = config
        self._buffer = buffer
        self._engine = engine
        # a learner that starts again publishes them anew, which takes minutes; one that waits ends after the whole time
        self._loader = PatientLoader(engine, source, config.run.stall_s / 2)
        self._runner = runner
        self._search = search
        self._questions = questions
        self._grants: dict[int, _Grant] = {}
        """The newest grant of each ticket that is not released yet. Only the admission loop releases tickets."""
        self._episodes: dict[asyncio.Task[None], _Grant] = {}
        """Running episodes."""
        self._putting = set[asyncio.Task[None] | None]()
        """Those that are finished and wait to be buffered."""
        self._room = Room(config.rollout.max_episodes, config.largest_group)
        self._activity = Activity()
        self._change = asyncio.Event()
        """Wakes admission: an episode has ended, there is news, or the worker stops."""
        self._may_grant = True
        """False after the run had fewer tickets than there was room for, until there is news, or for IDLE_S."""
        self._finish = finish or Finish(config.run.steps)
        self.has_finished = False
        """Whether the worker ended because the run is finished."""

    async def run(self, stop: asyncio.Event, is_ready: Callable[[], None] = lambda: None) -> None:
        """Run until `stop` is set, which the end of the run does too; then finish the episodes that end within
        `rollout.drain_s`, and release the tickets of the others. `is_ready` is called before the first heartbeat.
        Raises the first error, not an exception group."""
        await self._wait_for_weights(stop)
        is_ready()
        self._activity = Activity(weight_loads=1)
        has_buffer = True
        try:
            await self._work(stop)
        except BaseExceptionGroup as group:
            cause = _first(group)
            has_buffer = not isinstance(cause, BufferUnavailable)
            raise cause from None
        finally:
            self._activity.failures.finish()
            if has_buffer:
                await self._release_ended()
                await self._buffer.leave(self._name, [])

    async def _work(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            work = self._follow_run(stop), self._send_heartbeats(), self._wake_at(stop)
            helpers = [tasks.create_task(helper) for helper in work]
            try:
                await self._admit(tasks, stop)
                await self._drain()
            finally:
                await end_tasks([*helpers, *self._episodes])

    async def _wait_for_weights(self, stop: asyncio.Event) -> None:
        await wait_until_announced(self._buffer, lambda: _is_over(stop))
        with log_waiting(log, "waiting for the first weights to be loaded"):
            while not _is_over(stop):
                loading = asyncio.ensure_future(self._load_announced(stop))
                if not await unless_stopped(loading, stop) or loading.result():
                    return
                await asyncio.sleep(POLL_S)

    async def _follow_run(self, stop: asyncio.Event) -> None:
        """Load what is announced, and wake admission at all news of the run."""
        while not (self.has_finished or _is_cancelled()):
            await self._load_announced(stop)
            self._may_grant = True
            self._change.set()
            if self._loader.is_failing:
                await asyncio.sleep(POLL_S)
            else:
                await self._buffer.wait_for_news(IDLE_S)

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        """Ask for tickets every IDLE_S, as `_follow_run` does otherwise: a load may be a download of minutes."""

        async def ask() -> None:
            while True:
                await asyncio.sleep(IDLE_S)
                self._may_grant = True
                self._change.set()

        asking = asyncio.create_task(ask())
        try:
            yield
        finally:
            await end_tasks([asking])

    async def _wake_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._change.set()

    async def _load_announced(self, stop: asyncio.Event) -> bool:
        """Load the announced version unless it is loaded, or set `stop` when the run is finished. True when any version
        is loaded. While the announced version cannot be loaded, the worker continues with the one before: admission
        keeps the staleness bound."""
        state, activity = await self._buffer.state(), self._activity
        if self._finish.has_come(state):
            self.has_finished = True
            stop.set()
        elif state.weights and state.weights != self._engine.loaded:
            check = activity.weight_loads % self._config.rollout.canary_every == 0
            started, before = time.monotonic(), self._engine.version
            async with self._asking():
                is_loaded = await self._loader.load(state.weights, check, idle=not self._episodes)
            if is_loaded:
                activity.weight_loads += 1
                activity.weight_load_s += time.monotonic() - started
                log.info("loaded weights %s", state.weights)
                if self._engine.version < before:
                    await self._end_beyond_bound()
        return bool(self._engine.loaded)

    @property
    def _limit(self) -> int:
        """Tickets from here on may not be started with the loaded weights."""
        pool = self._config.pool
        return ticket_limit(self._engine.version, pool.max_staleness, self._config.questions_per_step)

    async def _end_beyond_bound(self) -> None:
        """After a learner went back to its checkpoint, the weights are older. End the episodes that these weights may
        not start: their last tokens would exceed max_staleness when they are trained on."""
        limit = self._limit
        await end_tasks([task for task, grant in self._episodes.items() if grant.ticket >= limit])

    async def _admit(self, tasks: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        """Until `stop`, keep as many episodes running as there is room for, without those that wait for room in the
        buffer: it may stay full until somebody has run the tickets of a dead worker."""
        while not _is_over(stop):
            self._change.clear()
            await self._release_ended()
            slots = await self._request_slots()
            lacking = Counter(slot.ticket for slot in slots)
            self._grants |= {ticket: _Grant(ticket, count) for ticket, count in lacking.items()}
            if _is_over(stop):
                break
            limit = self._limit  # the weights may have become older since the request
            for slot in slots:
                if slot.ticket < limit:
                    grant = self._grants[slot.ticket]
                    task = tasks.create_task(self._run_episode(slot, grant))
                    self._episodes[task] = grant
                    task.add_done_callback(self._end_episode)
            if not slots:
                await asyncio.sleep(POLL_S)  # episodes that end meanwhile are handled together
                await self._change.wait()

    async def _drain(self) -> None:
        """Finish the episodes in flight, for as long as a worker that was told to stop may take; of a run that is
        finished nobody needs them."""
        deadline = time.monotonic() + self._config.rollout.drain_s
        while self._episodes and (left_s := deadline - time.monotonic()) > 0:
            if self.has_finished or _is_cancelled():
                break
            self._change.clear()
            await self._release_ended()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._change.wait(), left_s)

    async def _request_slots(self) -> list[RolloutSlot]:
        """Slots for the room that this worker has; asks for none while the buffer has no tickets. Nor while the engine
        hangs: it would get its own again, until they have failed too often."""
        room = self._room.size - (len(self._episodes) - len(self._putting))
        if room <= 0 or not self._may_grant or self._status().hangs(self._config.redis.lease_s):
            return []
        self._may_grant = False
        slots = await self._buffer.admit(self._name, self._engine.version, room)
        if room - len(slots) < self._config.largest_group:
            self._may_grant = True
        return slots

    def _end_episode(self, task: asyncio.Task[None]) -> None:
        del self._episodes[task]
        self._change.set()

    async def _release_ended(self) -> None:
        """Release the tickets that lack episodes but have none in flight, with one failed attempt if any has failed."""
        in_flight = set(self._episodes.values())
        over = [grant for grant in self._grants.values() if grant not in in_flight]
        for failed in (True, False):
            tickets = sorted(grant.ticket for grant in over if grant.lacking and grant.has_failed is failed)
            if tickets:
                await self._buffer.release(self._name, tickets, failed=failed)
        for grant in over:
            del self._grants[grant.ticket]

    async def _run_episode(self, slot: RolloutSlot, grant: _Grant) -> None:
        question = self._questions.of(slot.ticket)
        try:
            async with self._engine.active():
                trajectory = await self._runner.run(question, slot.ticket, slot.rollout, self._name)
            await self._put(trajectory)
        except tuple(OF_ONE_EPISODE) as error:
            grant.has_failed = True
            why = str(error) or type(error).__name__
            kind = next(kind for failed, kind in OF_ONE_EPISODE.items() if isinstance(error, failed))
            self._activity.failures.add(kind, slot.ticket, slot.rollout, why)
        except (CusearchError, asyncio.CancelledError):
            raise
        except BaseException:  # a library in Rust that panics raises no Exception
            grant.has_failed = True
            raise
        else:
            grant.lacking -= 1

    async def _put(self, trajectory: Trajectory) -> None:
        task = asyncio.current_task()
        self._putting.add(task)
        self._change.set()
        try:
            while (outcome := await self._buffer.put(trajectory)) == "full":
                if _is_cancelled():
                    raise asyncio.CancelledError
                await asyncio.sleep(10 * POLL_S)
        finally:
            self._putting.discard(task)
        self._note(in_time=outcome == "stored")

    def _note(self, in_time: bool) -> None:
        self._room.note(in_time)
        self._activity.episodes += in_time
        self._activity.late_episodes += not in_time

    def _leave_off(self, closed: Collection[int]) -> None:
        """End the episodes of groups that other workers have finished: their puts would be late."""
        for task, grant in self._episodes.items():
            if grant.ticket in closed and task not in self._putting and not task.cancelling():
                self._note(in_time=False)
                task.cancel()  # once: an agent's end takes its time

    async def _send_heartbeats(self) -> None:
        """Renew the leases, unless the engine hangs: then the leases run out, and the tickets are requeued."""
        lease_s, hangs = self._config.redis.lease_s, False
        while not _is_cancelled():
            status = self._status()
            if status.hangs(lease_s) and not hangs:
                age_s = status.last_token_age_s
                log.warning("the engine has produced no token for %.0f s: its tickets will be requeued", age_s)
            hangs = status.hangs(lease_s)
            tickets = [] if hangs else sorted({grant.ticket for grant in self._episodes.values()})
            self._leave_off(await self._buffer.heartbeat(self._name, tickets, status))
            await asyncio.sleep(HEARTBEAT_S)

    def _status(self) -> WorkerStatus:
        activity, failures, engine = self._activity, self._activity.failures, self._engine
        return WorkerStatus(
            version=engine.version,
            in_flight=len(self._episodes),
            episodes=activity.episodes,
            late_episodes=activity.late_episodes,
            failed_episodes=failures.by_kind.total(),
            failed_episodes_by_kind=" ".join(f"{kind}:{n}" for kind, n in sorted(failures.by_kind.items())),
            most_frequent_failure=failures.most_frequent,
            sampled_tokens=engine.sampled_tokens,
            busy_s=round(engine.busy_s, 3),
            request_s=round(engine.request_s, 3),
            last_token_age_s=round(engine.last_token_age_s, 1),
            alive_s=round(time.monotonic() - activity.ready_at, 3),
            weight_loads=activity.weight_loads,
            weight_load_s=round(activity.weight_load_s, 3),
            **self._search.status(),
        )


def _is_over(stop: asyncio.Event) -> bool:
    """Whether a loop must end, also after a cancellation that a library has swallowed."""
    return stop.is_set() or _is_cancelled()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _first(error: BaseException) -> BaseException:
    """The first error in the exception group of a TaskGroup."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
