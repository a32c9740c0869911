"""When checkpoints are begun, with fakes for the learner and the disk."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from cusearch_async.config import load_config
from cusearch_async.training.checkpoint import state_at
from cusearch_async.training.publisher import Saver
from cusearch_async.transport.interface import NOTHING
from cusearch_async.transport.memory import MemoryBuffer, MemoryRun
from tests.transport.conftest import make_limits


class Parts:
    """The learner and its checkpoints: what was captured, and what was written."""

    def __init__(self) -> None:
        self.captured: list[str] = []
        self.written: list[int] = []

    @asynccontextmanager
    async def active(self):
        yield

    async def capture(self, folder):
        self.captured.append(folder.name)
        return lambda: None

    def begin_write(self, step):
        return Path(f"step{step}")

    @contextmanager
    def write(self, state):
        yield
        self.written.append(state.step)

    def finish(self, step):
        assert step == self.written[-1]

    def superfluous(self):
        return []

    def oldest_kept(self):
        return 0

    def remove(self, folders):
        assert folders == []


@pytest.fixture
async def saver(atlas_config):
    buffer = MemoryBuffer(MemoryRun(), make_limits())
    await buffer.recover(0)
    parts = Parts()
    return Saver(parts, buffer, parts, 3, state_at(3, NOTHING, load_config(atlas_config))), parts


async def test_a_step_is_saved_once_and_not_the_one_that_the_run_went_on_from(saver):
    saver, parts = saver
    for step in (3, 5, 5):
        await saver.save(step, NOTHING)
        await saver.finish()
    assert (parts.captured, parts.written) == (["step5"], [5])


async def test_a_checkpoint_is_due_every_so_many_steps(saver):
    saver, parts = saver
    for step in range(3, 11):
        await saver.save_if_due(step, NOTHING)
    await saver.finish()
    assert parts.written == [6, 9]
