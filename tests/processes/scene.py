"""What the processes that play episodes meet, with small parts in place of Redis, the retriever and vLLM."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cusearch_async.config import Config
from cusearch_async.data.questions import load_run_questions
from cusearch_async.models import load_tokenizer
from cusearch_async.rollout import start_report
from cusearch_async.run.identity import NOBODY, Identity, identity_of
from cusearch_async.transport.limits import limits_of
from cusearch_async.transport.memory import MemoryBuffer, MemoryRun
from tests.conftest import SLOW
from tests.fakes import FakeTurn
from tests.rollout.workers import FakeEngine

CONTRACT, RETRIEVER, STARTED, CLOSED = "contract is checked", "retriever is asked", "engine starts", "engine is closed"


class Engine(FakeEngine):
    """Answers every question at once, and rightly."""

    def __init__(self, scene: Scene, tokenizer: Any) -> None:
        super().__init__()
        self._scene = scene
        self._answer = tokenizer("<answer>me</answer>", add_special_tokens=False)["input_ids"]

    async def generate(
        self, prompt: list[int], max_tokens: int, temperature: float, seed: int | None, stops: Sequence[str]
    ) -> FakeTurn:
        self._scene.prompts += 1
        await self._scene.engine_answers.wait()
        n = len(self._answer)
        return FakeTurn(list(self._answer), np.full(n, -1.0, np.float32), np.full(n, self.version, np.int32))

    async def load(self, store: object, name: str, check: bool) -> None:
        await self._scene.weights_arrive.wait()
        if self._scene.loading_fails is not None:
            raise self._scene.loading_fails
        await super().load(store, name, check)

    def close(self) -> None:
        self._scene.events.append(CLOSED)


class Buffer(MemoryBuffer):
    scene: Scene

    async def check_identity(self, accepts_changes: bool = False) -> bool:
        self.scene.note_first(CONTRACT)
        return await super().check_identity(accepts_changes)

    async def state(self) -> Any:
        self.scene.looks += 1
        return await super().state()


class Scene:
    """One process and what it meets; `events` are what the process did, in order."""

    def __init__(self, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = config
        self.events: list[str] = []
        self.looks = 0
        """How often the process has looked at the run's state."""
        self.prompts = 0
        """How many the engine was given."""
        self.vocab_sizes: list[int | None] = []
        """Given to each buffer that was opened."""
        self.gives_up = asyncio.Event()
        """Given to the newest one: when it waits for Redis no more."""
        self.stop, self.retriever_answers, self.engine_answers = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.engine_answers.set()
        self.weights_arrive = asyncio.Event()
        self.weights_arrive.set()
        self.retriever_fails: Exception | None = None
        self.loading_fails: Exception | None = None
        self.run = MemoryRun()
        tokenizer = load_tokenizer(config.model.location)
        self.serves: str | None = "a corpus (1)"
        identity = identity_of(config, load_run_questions(config).all, tokenizer)
        self.identity = identity.with_retriever(self.serves) if config.searching else identity
        stand_in = SimpleNamespace(Engine=SimpleNamespace(start=self._start_engine))
        monkeypatch.setitem(sys.modules, "cusearch_async.rollout.engine", stand_in)
        self.engines, *others = (_load(name, monkeypatch) for name in ("engines", "rollout", "evaluator"))
        self.rollout, self.evaluator = others
        for module in others:
            monkeypatch.setattr(module, "open_buffer", self._open_buffer)
            monkeypatch.setattr(module, "SearchClient", SimpleNamespace(open=self._open_search))
            monkeypatch.setattr(module, "stop_on_signals", lambda: self.stop)
        monkeypatch.setattr(start_report, "open_buffer", self._open_elsewhere)

    async def process(self, name: str) -> bool:
        """The process from start to end, which must come in time; whether its work is done."""
        work = (
            self.rollout.run(self.config, "w", os.sched_getaffinity(0))
            if name == "rollout"
            else self.evaluator.run(self.config)
        )
        return await asyncio.wait_for(work, 20 * SLOW)

    @asynccontextmanager
    async def running(self, name: str) -> AsyncIterator[asyncio.Task[bool]]:
        """The process at work; stopped at the end, and waited for. Raises what ended it."""
        working = asyncio.create_task(self.process(name))
        try:
            yield working
        finally:
            self.stop.set()
            await working

    def learner(self, identity: Identity | None = None) -> MemoryBuffer:
        """A learner's view of the run, with the contract of the process unless another is given."""
        return MemoryBuffer(self.run, limits_of(self.config), identity or self.identity)

    def note_first(self, event: str) -> None:
        if event not in self.events:
            self.events.append(event)

    def _start_engine(self, model: str, tokenizer: Any, config: Config, lock: object) -> Engine:
        self.events.append(STARTED)
        return Engine(self, tokenizer)

    @asynccontextmanager
    async def _open_buffer(
        self,
        config: Config,
        patience_s: float,
        stop: asyncio.Event,
        vocab_size: int | None = None,
        identity: Identity = NOBODY,
    ) -> AsyncIterator[Buffer]:
        self.vocab_sizes.append(vocab_size)
        self.gives_up = stop
        buffer = Buffer(self.run, limits_of(config, vocab_size), identity)
        buffer.scene = self
        yield buffer

    @asynccontextmanager
    async def _open_elsewhere(self, config: Config, identity: Identity) -> AsyncIterator[MemoryBuffer]:
        """For the thread that reports that a worker is starting: it must not change the run beside the event loop."""
        yield MemoryBuffer(MemoryRun(), limits_of(config), identity)

    @asynccontextmanager
    async def _open_search(self, *_: object) -> AsyncIterator[Scene]:
        yield self

    # --- as a search client ---

    async def wait_until_answering(self, timeout_s: float) -> None:
        self.events.append(RETRIEVER)
        if self.retriever_fails is not None:
            raise self.retriever_fails
        await self.retriever_answers.wait()

    def status(self) -> dict[str, Any]:
        return {}


def _load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of a process, loaded again beside what stands in for vLLM, until the end of the test."""
    package = importlib.import_module("cusearch_async.processes")
    spec = importlib.util.find_spec(f"cusearch_async.processes.{name}")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.setattr(package, name, module, raising=False)
    spec.loader.exec_module(module)
    return module
