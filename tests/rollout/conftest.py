"""A worker's loop on the buffer in memory."""

from __future__ import annotations

import pytest

from cusearch_async.config import load_config
from cusearch_async.rollout.loop import RolloutLoop
from cusearch_async.transport.memory import MemoryBuffer, MemoryRun
from tests.rollout.workers import QUESTIONS, SMALL, FakeEngine, FakeSearch, HeldRunner
from tests.transport.conftest import make_limits


@pytest.fixture
def buffer_class() -> type[MemoryBuffer]:
    return MemoryBuffer


@pytest.fixture
def most() -> int:
    """Episodes at once."""
    return 64


@pytest.fixture
def drain_s() -> float:
    """`rollout.drain_s`."""
    return 0.0


@pytest.fixture
def parts(atlas_config, buffer_class, most, drain_s):
    given = {"pool.max_staleness": 1, "rollout.max_episodes": most, "rollout.drain_s": drain_s}
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    config = load_config(atlas_config, [*SMALL, *words])
    run = MemoryRun()
    buffer, runner = buffer_class(run, make_limits(max_staleness=1)), HeldRunner()
    loop = RolloutLoop("w", config, buffer, FakeEngine(), None, runner, FakeSearch(), QUESTIONS)
    return run, buffer, runner, loop
