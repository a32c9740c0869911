"""A learner that writes down what it is told, and a buffer in memory that plays what it waits for."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from cusearch_async.algorithm.tickets import RunQuestions
from cusearch_async.learner.interface import Lent
from cusearch_async.run.identity import NOBODY
from cusearch_async.transport.limits import limits_of
from cusearch_async.transport.memory import MemoryBuffer
from cusearch_async.types import Question
from cusearch_async.weights.interface import Canary
from tests.strategies import make_trajectory

QUESTIONS = RunQuestions([(1, [Question(id=f"q{i}", text="?", answers=("a",), category="x") for i in range(5)])], 0)


class Learner:
    """Its weights are the number of its updates."""

    def __init__(self, events):
        self.events = events
        self.updates = 0
        self.at_update = lambda step: None
        self.is_offloaded = False
        self.waited_s = 0.25

    def update(self, selected, advantages, step):
        assert not self.is_offloaded
        self.events.append(f"update {step}")
        self.updates += 1
        self.selected = list(selected)
        self.advantages = advantages
        self.at_update(step)
        return {"train/loss": 0.5}

    def enter_thread(self):
        self.thread = threading.current_thread()

    def lend(self):
        assert not self.is_offloaded
        self.is_lent = True
        return Lent({"w": torch.full((2,), float(self.updates))}, self.take_back)

    def take_back(self):
        self.is_lent = False

    def canary(self):
        assert not self.is_offloaded
        return Canary([1], [], 0.1)

    def offload(self):
        assert not self.is_lent
        self.events.append("offload")
        self.is_offloaded = True

    def reload(self):
        self.events.append("reload")
        self.is_offloaded = False

    def capture(self, folder):
        assert not self.is_offloaded
        self.events.append(f"capture {folder.name}")
        updates = self.updates

        def write():
            (folder / "model").mkdir(parents=True)
            (folder / "model" / "weights").write_text(str(updates))
            self.events.append(f"write {folder.name}")

        return write


class Recorded(MemoryBuffer):
    """Writes down what the learner asks of it, and plays what it waits for."""

    def __init__(self, run, config, events, depth_of, identity=NOBODY):
        super().__init__(run, limits_of(config), identity)
        self.events, self.depth_of = events, depth_of
        self.question_of = QUESTIONS.id_of
        self.gpus = None
        """The engines' lock, where they take turns."""

    async def claim(self, step, question_of=None):
        pool = await super().claim(step, question_of)
        if pool is None and self.gpus:
            await self.gpus.take()
            self.events.append("generate")
            await self.generate()
            self.gpus.release()
        elif pool is None:
            await self.generate()
        else:
            self.events.append(f"claim {step}")
        return pool

    async def generate(self):
        version = (await self.state()).published
        for slot in await self.admit("w", version, 4):
            versions = np.full(4, version, np.int32)
            what = {"question_id": self.question_of(slot.ticket), "reward": slot.rollout / 2, "versions": versions}
            depth = self.depth_of(slot.ticket, slot.rollout)
            assert await self.put(make_trajectory(slot.ticket, slot.rollout, depth=depth, **what)) == "stored"

    async def commit(self, pool, selected, method=None):
        await super().commit(pool, selected, method)
        self.events.append(f"commit {pool.step}")

    async def announce(self, version, directory):
        await super().announce(version, directory)
        self.events.append(f"announce {directory}")

    async def checkpoint(self, step):
        await super().checkpoint(step)
        self.events.append(f"forget {step}")


def at_once(coroutine):
    """Run what waits for nothing."""
    with pytest.raises(StopIteration):
        coroutine.send(None)
