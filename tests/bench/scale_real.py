"""A simulated case in real time: the worker's own loop on a real Redis, with episodes, updates and transfers that only
take their time. What `bench_scale` compares its simulation with, on two hosts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from cusearch_async.algorithm.tickets import RunQuestions
from cusearch_async.config import Config
from cusearch_async.rollout.loop import RolloutLoop
from cusearch_async.simulation.durations import Durations, Troubles
from cusearch_async.streams import Stream, stream
from cusearch_async.training.loop import POLL_S
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import LearnerBuffer, WorkerBuffer
from cusearch_async.types import Question, Trajectory
from tests.rollout.workers import FakeEngine, FakeSearch
from tests.strategies import make_trajectory

PATIENCE_S = 60.0


class StandingEngine(FakeEngine):
    """Loads by standing still."""

    def __init__(self, load_s: float) -> None:
        super().__init__()
        self.stood_s, self._load_s = 0.0, load_s

    async def load(self, store: object, name: str, check: bool) -> None:
        self.stood_s += self._load_s
        await asyncio.sleep(self._load_s)
        await super().load(store, name, check)


class TimedRunner:
    """Episodes that take what the simulation would draw, and longer while the engine stands still."""

    def __init__(
        self, engine: StandingEngine, durations: Durations, troubles: Troubles, factor: float, seed: int
    ) -> None:
        self._engine, self._durations, self._troubles, self._factor = engine, durations, troubles, factor
        self._random = stream(Stream.SIMULATION, seed)

    def _seconds(self) -> float:
        chance, hang_s = self._troubles.hang
        hangs = self._random.random() < 1 - (1 - chance) ** self._durations.searches
        return float(self._random.choice(self._durations.episode_s) + hang_s * hangs) * self._factor

    async def run(self, question: Question, ticket: int, rollout: int, worker: str) -> Trajectory:
        first, stood_s, left_s = self._engine.version, self._engine.stood_s, self._seconds()
        while left_s > 0:
            await asyncio.sleep(left_s)
            left_s, stood_s = self._engine.stood_s - stood_s, self._engine.stood_s
        versions = np.array([first, first, self._engine.version, self._engine.version], np.int32)
        return make_trajectory(ticket, rollout, question_id=question.id, worker=worker, versions=versions)


class RealCase:
    """One run; its name in the Redis of `config` is its own."""

    def __init__(self, config: Config, workers: int, durations: Durations, troubles: Troubles, steps: int) -> None:
        self._config, self._durations, self._troubles, self._steps = config, durations, troubles, steps
        self._slow = round(troubles.slow[0] * workers)
        self._workers = workers
        names = [Question(id=f"q{n}", text="?", answers=("a",), category="x") for n in range(64)]
        self._questions = RunQuestions([(1, names)], config.run.seed)

    async def learn(self) -> tuple[float, float]:
        """The learner's part. Share of the time that it waits, over the steps that the simulation counts; and the
        seconds of its work in a step, with claim and commit."""
        async with open_buffer(self._config, PATIENCE_S) as buffer:
            found = await self._learn(buffer)
            await buffer.finish()
        return found

    async def work(self, numbers: Iterable[int]) -> None:
        """The part of these workers, until the learner has finished the run."""
        async with contextlib.AsyncExitStack() as opened, asyncio.TaskGroup() as tasks:
            for number in numbers:
                buffer = await opened.enter_async_context(open_buffer(self._config, PATIENCE_S))
                tasks.create_task(self._loop(number, buffer).run(asyncio.Event()))

    def _loop(self, number: int, buffer: WorkerBuffer) -> RolloutLoop:
        engine = StandingEngine(self._durations.load_s)
        factor = self._troubles.slow[1] if number < self._slow else 1.0
        runner: Any = TimedRunner(engine, self._durations, self._troubles, factor, number)
        given: Any = engine, None, runner, FakeSearch()
        return RolloutLoop(f"w{number}", self._config, buffer, *given, self._questions)

    async def _learn(self, buffer: LearnerBuffer) -> tuple[float, float]:
        random, waits, ends = stream(Stream.SIMULATION, self._workers), [], []
        publishing_s = 0.0
        await buffer.recover(0)
        publishing = asyncio.create_task(self._publish(buffer, 0))
        for step in range(self._steps):
            began = asked = time.monotonic()
            while (pool := await buffer.claim(step)) is None:
                await asyncio.sleep(POLL_S)
                asked = time.monotonic()
            waits.append(asked - began)
            await asyncio.sleep(float(random.choice(self._durations.update_s)))
            held = time.monotonic()
            await publishing
            publishing_s += time.monotonic() - held
            await buffer.commit(pool, pool.trajectories[: self._config.method.budget])
            await buffer.checkpoint(step + 1)
            ends.append(time.monotonic())
            publishing = asyncio.create_task(self._publish(buffer, step + 1))
        await publishing
        first = min(self._config.pool.staleness_bound + 2, self._steps // 2)
        whole_s, waited_s = ends[-1] - ends[first - 1], sum(waits[first:])
        work_s = (whole_s - waited_s - publishing_s) / (self._steps - first)
        return waited_s / whole_s, work_s

    async def _publish(self, buffer: LearnerBuffer, version: int) -> None:
        await asyncio.sleep(self._durations.publish_s)
        await buffer.announce(version, f"v{version:06d}-e1")
