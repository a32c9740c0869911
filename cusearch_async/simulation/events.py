"""A run without GPUs: the real admission, order, hedging and pools, on a virtual clock.

`transport.memory` decides who is granted what and which pool is complete; only episodes, updates and transfers are
replaced by the time that they take. Events happen in the order of their times, so a run of hours takes seconds, and
gives the same figures each time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cusearch_async.config import Config
from cusearch_async.errors import ConfigError
from cusearch_async.rollout.room import Room
from cusearch_async.simulation.durations import Durations, Troubles
from cusearch_async.streams import Stream, stream
from cusearch_async.transport.interface import IDLE_S, WorkerStatus
from cusearch_async.transport.limits import limits_of
from cusearch_async.transport.memory import MemoryBuffer
from cusearch_async.transport.memory_run import MemoryRun
from cusearch_async.types import Pool, Trajectory

T = TypeVar("T")
RETRY_S = 0.5
"""From a put that finds the buffer full to the next."""
_BATCH = 4096
_NOTHING = WorkerStatus()


@dataclass(slots=True)
class _Worker:
    name: str
    factor: float
    """How many times as long its episodes take."""
    room: Room
    version: int = -1
    life: int = 0
    """How often it has died."""
    is_down: bool = False
    """Between a death and its restart."""
    in_flight: int = 0
    episodes: dict[int, set[_Episode]] = field(default_factory=dict)
    """Those in flight, by ticket."""
    stood_s: float = 0.0
    """Time that it has spent on loading, which its episodes take longer."""
    asks: bool = False
    """Whether there may be tickets for it, as soon as it has room."""
    busy_since: float = 0.0
    full_since: float | None = None
    """Since when it has had no room for a group; None while it has."""


@dataclass(slots=True, eq=False)
class _Episode:
    worker: _Worker
    ticket: int
    rollout: int
    version: int
    began: float
    stood_s: float
    """Of the worker, when the end of the episode was set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of the steps between the first few, in which the run finds its pace, and its last ones."""

    step_s: float
    """Mean."""
    learner_idle: float
    """Share of the time that the learner waits for its pool."""
    workers_idle: float
    """Share of the time that workers have no episode in flight."""
    workers_full: float
    """Share of the time that workers have no room for another group."""
    staleness_mean: float
    staleness_max: int
    """Of all steps."""
    wasted: float
    """Share of the episodes' time that was spent in vain: by workers that died, and twice."""
    trajectories_per_hour: float
    """That are generated for the learner."""


class Simulation:
    def __init__(
        self, config: Config, workers: int, durations: Durations, troubles: Troubles, steps: int, seed: int = 0
    ) -> None:
        self._config, self._durations, self._troubles, self._steps = config, durations, troubles, steps
        self._run = MemoryRun()
        # The last steps of a run wait for all of its tickets; those here are followed by others.
        self._buffer = MemoryBuffer(
            self._run, replace(limits_of(config), steps=steps + config.pool.staleness_bound + 1)
        )
        self._random = stream(Stream.SIMULATION, seed)
        slow = math.ceil(troubles.slow[0] * workers)
        factors = [troubles.slow[1] if n < slow else 1.0 for n in range(workers)]
        sizes = config.rollout.max_episodes, config.largest_group
        self._workers = [_Worker(f"w{n}", factor, Room(*sizes)) for n, factor in enumerate(factors)]
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._drawn: Iterator[float] = iter(())
        self._read_news = 0
        self._waits_since: float | None = None
        self._step = 0
        self._published_at = 0.0
        self._ends: list[float] = []
        self._waits: list[float] = []
        self._staleness: list[tuple[float, int]] = []
        self._wasted_s = self._spent_s = 0.0
        self._spent_at: list[NDArray[np.float64]] = []
        self._busy_s = self._full_s = 0.0
        self._template = _template()

    # --- the clock ------------------------------------------------------------------------------------

    def result(self) -> Outcome:
        """Runs to the end of the last step."""
        _now(self._buffer.recover(0))
        self._at(self._durations.publish_s, self._announce, 0)
        self._at(IDLE_S, self._look)
        for worker in self._workers:
            self._set_death(worker)
        self._waits_since = 0.0
        while self._step < self._steps:
            self._run.now, _, happen, arguments = heapq.heappop(self._events)
            happen(*arguments)
            if self._run.news != self._read_news:
                self._wake_idle()
        return self._outcome()

    def _at(self, seconds: float, happen: Callable[..., None], *arguments: Any) -> None:
        """After `seconds`."""
        heapq.heappush(self._events, (self._run.now + seconds, next(self._numbers), happen, arguments))

    # --- workers --------------------------------------------------------------------------------------

    def _announce(self, version: int) -> None:
        _now(self._buffer.announce(version, f"v{version:06d}-e1"))
        for worker in self._in_any_order():
            if not worker.is_down:
                self._load(worker, version)

    def _in_any_order(self) -> Iterator[_Worker]:
        """Whoever comes first takes what it has room for; it is not always the same one, such as a slow one."""
        return (self._workers[number] for number in self._random.permutation(len(self._workers)))

    def _load(self, worker: _Worker, version: int) -> None:
        worker.stood_s += self._durations.stands_s
        self._at(self._durations.load_s, self._loaded, worker, worker.life, version)

    def _loaded(self, worker: _Worker, life: int, version: int) -> None:
        if worker.life == life:
            worker.version = max(worker.version, version)
            self._ask(worker)

    def _look(self) -> None:
        """What workers do every few seconds: renew leases, and ask if something has become free."""
        for worker in self._workers:
            if worker.episodes:
                closed = _now(self._buffer.heartbeat(worker.name, list(worker.episodes), _NOTHING))
                for episode in [episode for ticket in closed for episode in worker.episodes[ticket]]:
                    self._leave_off(episode, in_time=False)
        self._wake_idle()
        if self._waits_since is not None:  # a group may have closed with its last attempt
            self._claim()
        self._at(IDLE_S, self._look)

    def _wake_idle(self) -> None:
        self._read_news = self._run.news
        refused: dict[int, int] = {}
        """Version -> room for which there was nothing: nor is there for another worker with as much."""
        for worker in self._in_any_order():
            room = worker.room.size - worker.in_flight
            may_get = worker.version >= 0 and room > refused.get(worker.version, 0)
            if may_get and not self._ask(worker):
                refused[worker.version] = room

    def _ask(self, worker: _Worker) -> bool:
        """Whether there was something for it."""
        room = worker.room.size - worker.in_flight
        slots = _now(self._buffer.admit(worker.name, worker.version, room)) if room > 0 else []
        for slot in slots:
            if not worker.in_flight:
                worker.busy_since = self._run.now
            worker.in_flight += 1
            episode = _Episode(worker, slot.ticket, slot.rollout, worker.version, self._run.now, worker.stood_s)
            worker.episodes.setdefault(slot.ticket, set()).add(episode)
            self._at(self._seconds(worker), self._end, episode)
        worker.asks = room - len(slots) < self._config.largest_group
        if worker.asks and worker.full_since is None:
            worker.full_since = self._run.now
        elif not worker.asks:
            self._has_room(worker)
        return bool(slots)

    def _has_room(self, worker: _Worker) -> None:
        if worker.full_since is not None:
            self._full_s += self._run.now - worker.full_since
            worker.full_since = None

    def _seconds(self, worker: _Worker) -> float:
        """Of the worker's next episode."""
        drawn = next(self._drawn, None)
        if drawn is None:
            chance, hang_s = self._troubles.hang
            times = self._random.choice(self._durations.episode_s, _BATCH)
            hangs = self._random.random(_BATCH) < 1 - (1 - chance) ** self._durations.searches
            self._drawn = iter((times + hang_s * hangs).tolist())
            drawn = next(self._drawn)
        return drawn * worker.factor

    def _end(self, episode: _Episode) -> None:
        worker = episode.worker
        if episode not in worker.episodes.get(episode.ticket, ()):  # it was left off, or the worker has died
            return
        if worker.stood_s > episode.stood_s:  # it has waited for weights meanwhile
            self._at(worker.stood_s - episode.stood_s, self._end, episode)
            episode.stood_s = worker.stood_s
            return
        outcome = _now(self._buffer.put(self._trajectory(episode)))
        if outcome == "full":
            self._at(RETRY_S, self._end, episode)
            return
        self._leave_off(episode, in_time=outcome == "stored")
        if worker.asks:
            self._ask(worker)
        if self._waits_since is not None and episode.ticket in self._run.ready:
            self._claim()

    def _leave_off(self, episode: _Episode, in_time: bool) -> None:
        worker, spent_s = episode.worker, self._run.now - episode.began
        self._spent_s += spent_s
        self._wasted_s += 0.0 if in_time else spent_s
        worker.room.note(in_time)
        worker.in_flight -= 1
        worker.episodes[episode.ticket].discard(episode)
        if not worker.episodes[episode.ticket]:
            del worker.episodes[episode.ticket]
        if not worker.in_flight:
            self._busy_s += self._run.now - worker.busy_since

    def _trajectory(self, episode: _Episode) -> Trajectory:
        versions = np.array([episode.version, max(episode.version, episode.worker.version)], np.int32)
        return replace(self._template, ticket=episode.ticket, rollout=episode.rollout, versions=versions)

    def _set_death(self, worker: _Worker) -> None:
        if self._troubles.mtbf_s:
            self._at(float(self._random.exponential(self._troubles.mtbf_s)), self._die, worker)

    def _die(self, worker: _Worker) -> None:
        if worker.in_flight:
            in_flight = (episode for episodes in worker.episodes.values() for episode in episodes)
            lost_s = sum(self._run.now - episode.began for episode in in_flight)
            self._busy_s += self._run.now - worker.busy_since
            self._wasted_s, self._spent_s = self._wasted_s + lost_s, self._spent_s + lost_s
        worker.life, worker.is_down = worker.life + 1, True
        worker.version, worker.in_flight, worker.asks = -1, 0, False
        worker.episodes.clear()
        worker.room = Room(self._config.rollout.max_episodes, self._config.largest_group)
        self._has_room(worker)
        self._at(self._troubles.restart_s, self._join, worker)

    def _join(self, worker: _Worker) -> None:
        worker.is_down = False
        if self._run.state.published >= 0:
            self._load(worker, self._run.state.published)
        self._set_death(worker)

    # --- learner --------------------------------------------------------------------------------------

    def _claim(self) -> None:
        enough = len(self._run.ready) >= self._config.questions_per_step
        pool = _now(self._buffer.claim(self._step)) if enough else None
        if pool is None:
            return
        if not pool.trajectories:
            most = self._config.pool.max_attempts
            raise ConfigError(
                f"no episode of step {self._step} ends: {most} workers (pool.max_attempts) died one after the other "
                "with each of its tickets; give a longer mtbf-s, or shorter episodes"
            )
        assert self._waits_since is not None
        self._waits.append(self._run.now - self._waits_since)
        self._waits_since = None
        staleness = [self._step - trajectory.oldest_version for trajectory in pool]
        self._staleness.append((float(np.mean(staleness)), max(staleness)))
        until = max(
            self._run.now + float(self._random.choice(self._durations.update_s)), self._published_at
        )  # it may not change what is written
        self._at(until - self._run.now, self._trained, pool)

    def _trained(self, pool: Pool) -> None:
        _now(self._buffer.commit(pool, pool.trajectories[: self._config.method.budget]))
        self._step += 1
        _now(self._buffer.checkpoint(self._step))
        self._ends.append(self._run.now)
        busy_s = sum(self._run.now - worker.busy_since for worker in self._workers if worker.in_flight)
        full_s = sum(self._run.now - since for worker in self._workers if (since := worker.full_since) is not None)
        self._spent_at.append(np.array([self._busy_s + busy_s, self._full_s + full_s]))
        if self._step % self._config.learner.publish_every == 0:
            self._published_at = self._run.now + self._durations.publish_s
            self._at(self._durations.publish_s, self._announce, self._step)
        self._waits_since = self._run.now
        self._claim()

    def _outcome(self) -> Outcome:
        first = min(self._config.pool.staleness_bound + 2, self._steps // 2)
        time_s, steps = self._ends[-1] - self._ends[first - 1], self._steps - first
        spent_s = self._spent_at[-1] - self._spent_at[first - 1]
        busy, full = np.minimum(1, spent_s / (time_s * len(self._workers)))  # sums of times are rounded
        generated = steps * self._config.pool.rollouts * self._config.questions_per_step
        return Outcome(
            step_s=time_s / steps,
            learner_idle=sum(self._waits[first:]) / time_s,
            workers_idle=1 - float(busy),
            workers_full=float(full),
            staleness_mean=float(np.mean([mean for mean, _ in self._staleness[first:]])),
            staleness_max=max(most for _, most in self._staleness),
            wasted=self._wasted_s / self._spent_s,
            trajectories_per_hour=generated / time_s * 3600,
        )


def _now(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine of the buffer in memory, which never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("the buffer in memory waits")


def _template() -> Trajectory:
    """A prompt of one token, and two sampled ones."""
    return Trajectory(
        ticket=0,
        rollout=0,
        environment="search",
        question_id="q",
        question="",
        answers=(),
        prediction=None,
        token_ids=np.zeros(3, np.int32),
        sampled=np.array([False, True, True]),
        logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int32),
        depth=0,
        retrieval_tokens=0,
        turns=1,
        cut_turns=0,
        recall=None,
        reward=0.0,
        em=0.0,
        f1=0.0,
        format_valid=True,
        worker="w",
        episode_s=0.0,
        search_s=0.0,
    )
