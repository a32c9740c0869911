"""What a worker's loop is given in tests: an engine and runners that do what they are told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from cusearch_async.algorithm.tickets import RunQuestions
from cusearch_async.rollout.loop import RolloutLoop
from cusearch_async.transport.memory import MemoryBuffer
from cusearch_async.types import Question
from tests.conftest import SLOW
from tests.strategies import make_trajectory

QUESTIONS = RunQuestions([(1, [Question(id=f"q{i}", text="?", answers=("a",), category="x") for i in range(8)])], 0)
SMALL = ("--pool.questions", "4", "--pool.rollouts", "2", "--method.budget", "4", "--loss.minibatch", "4")


class FakeEngine:
    sampled_tokens, busy_s, request_s, last_token_age_s = 0, 0.0, 0.0, 0.0

    def __init__(self) -> None:
        self.loaded, self.version = "", -1

    async def load(self, store: object, name: str, check: bool) -> None:
        self.loaded, self.version = name, int(name[1:].split("-", maxsplit=1)[0])

    def active(self):
        return contextlib.nullcontext()


class HeldRunner:
    """Episodes end when they are let go."""

    def __init__(self) -> None:
        self.running: dict[tuple[int, int], asyncio.Event] = {}

    async def run(self, question: Question, ticket: int, rollout: int, worker: str):
        go = self.running[ticket, rollout] = asyncio.Event()
        try:
            await go.wait()
        finally:
            self.running.pop((ticket, rollout), None)
        return make_trajectory(ticket, rollout)


class FailingRunner(HeldRunner):
    """Fails the given places, once; the others end when they are let go."""

    def __init__(self, **failures) -> None:
        super().__init__()
        self.failures = {tuple(map(int, place.strip("p").split("_"))): error for place, error in failures.items()}

    async def run(self, question, ticket, rollout, worker):
        error = self.failures.pop((ticket, rollout), None)
        if error is not None:
            raise error
        return await super().run(question, ticket, rollout, worker)


class FakeSearch:
    def status(self):
        return {}


class BeatingBuffer(MemoryBuffer):
    """Keeps what the worker said at its last heartbeat."""

    tickets: tuple[int, ...] = ()
    beats = 0

    async def heartbeat(self, worker, tickets, status):
        self.tickets, self.status, self.beats = tuple(tickets), status, self.beats + 1
        return await super().heartbeat(worker, tickets, status)


@contextlib.asynccontextmanager
async def running(loop: RolloutLoop) -> AsyncIterator[asyncio.Task[None]]:
    """The worker at work; stopped at the end, and waited for. Raises what ended it."""
    stop = asyncio.Event()
    working = asyncio.create_task(loop.run(stop))
    try:
        yield working
    finally:
        stop.set()
        await working


async def until(condition) -> None:
    async with asyncio.timeout(5 * SLOW):
        while not condition():
            await asyncio.sleep(0.01)
