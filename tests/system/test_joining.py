"""Processes that would join a run with another contract, on a real Redis."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cusearch_async.config import Config, load_config, redis_password
from cusearch_async.data.questions import load_run_questions
from cusearch_async.errors import ContractMismatch
from cusearch_async.models import load_tokenizer
from cusearch_async.run.identity import Identity, identity_of
from cusearch_async.transport.buffer import RedisBuffer, open_buffer
from cusearch_async.transport.interface import RunState
from cusearch_async.transport.memory import MemoryBuffer, MemoryRun
from cusearch_async.transport.server import is_listening
from tests.conftest import SLOW, wait_until
from tests.system.conftest import ATLAS, Run
from tests.system.forked import Process
from tests.transport.conftest import make_limits

pytestmark = pytest.mark.system


def config_of(run: Run) -> Config:
    return load_config(ATLAS, run.arguments())


def as_learner(run: Run, act: Callable[[RedisBuffer], Awaitable[Any]]) -> Any:
    """What `act` answers on a buffer with the run's own contract."""
    config = config_of(run)
    identity = identity_of(config, load_run_questions(config).all, load_tokenizer(config.model.location))

    async def in_contact() -> Any:
        async with open_buffer(config, 10 * SLOW, identity=identity) as buffer:
            return await act(buffer)

    return asyncio.run(in_contact())


async def begin(buffer: RedisBuffer) -> int:
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")
    return buffer.epoch


async def look(buffer: RedisBuffer) -> tuple[RunState, Identity]:
    return await buffer.state(), await buffer.identity()


@pytest.fixture
def begun(run: Run) -> Run:
    """A run whose learner has written its contract."""
    run.cusearch("redis")
    config = config_of(run)
    wait_until(lambda: is_listening(config.redis.url) and bool(redis_password(config.redis, config.folder)), 30)
    assert as_learner(run, begin) == 1
    return run


def last_line(process: Process) -> str:
    """Of a process that has ended with status 1 and without a traceback."""
    output, _ = process.communicate(timeout=120 * SLOW)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    assert "VLLM" not in output, "no engine was started"
    return output.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("process", "changes", "said"),
    [
        ("rollout", {"run__seed": 7}, "run.seed is 7 here and 0 in the run"),
        ("rollout", {"pool__max_staleness": 7}, "pool.max_staleness is 7 here and 2 in the run"),
        ("evaluator", {"eval__every": 1, "retriever__topk": 1}, "retriever.topk is 1 here and 2 in the run"),
        ("learner", {"pool__max_attempts": 7}, "pool.max_attempts is 7 here and 5 in the run"),
    ],
)
def test_a_process_with_another_value_exits_with_status_1_and_one_line(begun: Run, process, changes, said):
    before = as_learner(begun, look)
    line = last_line(begun.worker(process, **changes))
    assert line.startswith(f"{process}: this process does not match run 'atlas': {said}; use the settings")
    assert as_learner(begun, look) == before, "nobody was fenced off, and no ticket was taken"


def test_a_process_that_cannot_join_says_so_before_it_loads_vllm():
    """Which takes 8 s of a core."""
    what = (
        "import sys, cusearch_async.processes.rollout, cusearch_async.processes.evaluator; print('vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", what], capture_output=True, text=True, check=True, timeout=60 * SLOW)
    assert done.stdout == "False\n"


def test_a_worker_with_other_questions_exits_with_status_1_and_one_line(begun: Run, tmp_path: Path):
    data = tmp_path / "questions.jsonl"
    data.write_text('{"id": 1, "question": "who?", "golden_answers": ["me"]}\n')
    line = last_line(begun.worker("rollout", data__source=data))
    assert "does not match run 'atlas': content of data.source is 1 (" in line
    assert " here and 20923 (" in line


@pytest.mark.slow  # test_run's launch with --accept-changes does, too
def test_a_launch_that_accepts_changes_goes_on_with_workers_of_the_new_contract(run: Run):
    launched = run.cusearch("launch", run__steps=1)
    output, _ = launched.communicate(timeout=300 * SLOW)
    assert launched.returncode == 0, output
    launched = run.cusearch("launch", "--accept-changes", run__steps=2, run__seed=7, pool__max_attempts=4)
    output, _ = launched.communicate(timeout=300 * SLOW)
    assert launched.returncode == 0, output
    assert [row["step"] for row in run.metrics()] == [0, 1]


async def test_an_evaluator_scores_no_version_of_a_run_that_was_changed_since(tmp_path: Path):
    from cusearch_async.processes.evaluator import Evaluator

    config = load_config(ATLAS, ["--eval.every", "1", "--run.folder", str(tmp_path)])
    run, ours, theirs = MemoryRun(), Identity({"run.seed": "0"}), Identity({"run.seed": "7"})
    buffer, learner = MemoryBuffer(run, make_limits(), ours), MemoryBuffer(run, make_limits(), theirs)
    await buffer.recover(0)
    assert await buffer.check_identity()
    await learner.recover(0, accepts_changes=True)
    await learner.announce(1, "v000001-e2")
    with pytest.raises(ContractMismatch, match=r"run\.seed is 0 here and 7 in the run"):
        await Evaluator(buffer, None, None, None, [], config).load_due(await buffer.state(), is_finished=False)
