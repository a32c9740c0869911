"""The loop of a rollout worker: admitted tickets in, trajectories out, newest weights always.

Three tasks beside the episodes: admission, weight pick-up, heartbeat. Whatever fails ends the worker by name;
its leases run out and other workers play what is missing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cusearch_async.algorithm.staleness import question_index, ticket_limit
from cusearch_async.config import Config
from cusearch_async.errors import SearchRefused, WeightsUnavailable
from cusearch_async.rollout.episode import Player
from cusearch_async.rollout.retrieval import SearchClient
from cusearch_async.transport.contract import Buffer, Place
from cusearch_async.transport.weights import WeightStore
from cusearch_async.types import Question

if TYPE_CHECKING:  # it brings vLLM
    from cusearch_async.rollout.engine import Engine

log = logging.getLogger(__name__)

POLL_S = 0.05
HEARTBEAT_S = 1.0


@dataclass(slots=True)
class Activity:
    """What the worker has done since it became ready; sent with every heartbeat."""

    ready_at: float = field(default_factory=time.monotonic)
    episodes: int = 0
    timeouts: int = 0
    weight_loads: int = 0
    weight_load_s: float = 0.0


async def load_announced(buffer: Buffer, engine: Engine, store: WeightStore, name: str, check: bool) -> bool:
    """Load the version that was announced as `name`; False when a newer one has replaced it meanwhile.

    Raises: WeightsUnavailable when it should be there and is not."""
    try:
        await engine.load(store, name, check)
    except WeightsUnavailable:
        if (await buffer.state()).weights == name:
            raise
        return False
    return True


class RolloutLoop:
    """Consumes tickets of `buffer`, produces trajectories in it. Waits for weights and for admission; unblocked
    by the learner's `announce`."""

    def __init__(
        self,
        name: str,
        config: Config,
        buffer: Buffer,
        engine: Engine,
        store: WeightStore,
        player: Player,
        search: SearchClient,
        questions: list[Question],
    ) -> None:
        self._name = name
        self._config = config
        self._buffer = buffer
        self._engine = engine
        self._store = store
        self._player = player
        self._search = search
        self._questions = questions
        self._in_flight: Counter[int] = Counter()
        self._episodes: dict[asyncio.Task[None], Place] = {}
        self._activity = Activity()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set; tickets in flight are then given back."""
        await self._wait_for_weights(stop)
        self._activity = Activity(weight_loads=1)
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(self._follow_weights(stop)), tasks.create_task(self._beat(stop))]
                episodes = await self._admit(tasks, stop)
                for task in [*helpers, *episodes]:
                    task.cancel()
        finally:
            await self._buffer.leave(self._name, list(self._in_flight))

    async def _wait_for_weights(self, stop: asyncio.Event) -> None:
        while not stop.is_set() and not await self._pick_up():
            await asyncio.sleep(POLL_S)

    async def _follow_weights(self, stop: asyncio.Event) -> None:
        while not stop.is_set():  # a library in between may swallow the one cancellation that ends this
            await self._pick_up()
            await asyncio.sleep(POLL_S)

    async def _pick_up(self) -> bool:
        """Load the announced version unless it is loaded; whether any version is loaded then."""
        state = await self._buffer.state()
        if not state.weights or state.weights == self._engine.loaded:
            return bool(self._engine.loaded)
        check = self._activity.weight_loads % self._config.rollout.canary_every == 0
        started, before = time.monotonic(), self._engine.version
        if not await load_announced(self._buffer, self._engine, self._store, state.weights, check):
            return bool(self._engine.loaded)  # the next poll takes the newer one
        self._activity.weight_loads += 1
        self._activity.weight_load_s += time.monotonic() - started
        log.info("loaded weights %s", state.weights)
        if self._engine.version < before:
            await self._drop_beyond_bound()
        return True

    async def _drop_beyond_bound(self) -> None:
        """A learner has gone back to its checkpoint, and with it the weights: give back the tickets that these weights
        may not start, or their last tokens would be older than max_staleness when they are trained on."""
        pool = self._config.pool
        limit = ticket_limit(self._engine.version, pool.max_staleness, self._config.questions_per_step)
        beyond = {task: place for task, place in self._episodes.items() if place.ticket >= limit}
        for task in beyond:
            task.cancel()
        await asyncio.gather(*beyond, return_exceptions=True)
        for task, place in beyond.items():
            if task.cancelled():
                self._forget(place)
        await self._buffer.release(self._name, sorted({place.ticket for place in beyond.values()}), failed=False)

    async def _admit(self, tasks: asyncio.TaskGroup, stop: asyncio.Event) -> set[asyncio.Task[None]]:
        """Keep up to `max_episodes` episodes in flight until `stop`; returns those still running."""
        while not stop.is_set():
            room = self._config.rollout.max_episodes - len(self._episodes)
            places = await self._buffer.admit(self._name, self._engine.version, room) if room > 0 else []
            for place in places:
                self._in_flight[place.ticket] += 1
                task = tasks.create_task(self._play(place))
                self._episodes[task] = place
                task.add_done_callback(self._episodes.pop)
            if not places:
                await asyncio.sleep(POLL_S)
        return set(self._episodes)

    async def _play(self, place: Place) -> None:
        index = question_index(place.ticket, len(self._questions), self._config.run.seed)
        try:
            async with asyncio.timeout(self._config.episode.timeout_s):
                trajectory = await self._player.play(self._questions[index], place.ticket, place.rollout, self._name)
        except (TimeoutError, SearchRefused) as error:
            self._activity.timeouts += isinstance(error, TimeoutError)
            why = str(error) or "it ran out of time"
            log.warning("episode %d:%d failed, its ticket goes back: %s", place.ticket, place.rollout, why)
            self._forget(place)
            await self._buffer.release(self._name, [place.ticket], failed=True)
            return
        while await self._buffer.put(trajectory) == "full":
            await asyncio.sleep(10 * POLL_S)
        self._activity.episodes += 1
        self._forget(place)

    def _forget(self, place: Place) -> None:
        self._in_flight[place.ticket] -= 1
        if not self._in_flight[place.ticket]:
            del self._in_flight[place.ticket]

    async def _beat(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._buffer.heartbeat(self._name, list(self._in_flight), self._facts())
            await asyncio.sleep(HEARTBEAT_S)

    def _facts(self) -> dict[str, str | int | float]:
        activity, engine = self._activity, self._engine
        return {
            "version": engine.version,
            "in_flight": sum(self._in_flight.values()),
            "episodes": activity.episodes,
            "timeouts": activity.timeouts,
            "sampled_tokens": engine.sampled_tokens,
            "busy_s": round(engine.busy_s, 3),
            "alive_s": round(time.monotonic() - activity.ready_at, 3),
            "weight_loads": activity.weight_loads,
            "weight_load_s": round(activity.weight_load_s, 3),
            **self._search.facts(),
        }
