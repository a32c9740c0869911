"""`make bench-rollout`: the worker and vLLM alone sample the same turns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.bench import bench_rollout, figures
from tests.bench.rollout_case import reached, sample
from tests.conftest import SLOW

pytestmark = pytest.mark.system


class Batching:
    """An engine of which a step ends the oldest request."""

    def __init__(self) -> None:
        self.running, self.sizes = [], []

    def add_request(self, number, prompt, params):
        self.running.append(len(prompt["prompt_token_ids"]))

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        self.sizes.append(len(self.running))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * self.running.pop(0))])]


def test_vllm_alone_is_as_full_as_the_worker_all_the_time_that_is_measured():
    """It was measured until its last turn had ended, and the worker while it went on."""
    engine = Batching()
    parts = {"before": [[[1], 0]] * 6, "measured": [[[1, 2], 0]] * 5, "after": [[[1, 2, 3], 0]] * 4}
    spent = sample(engine, dict, parts, 4)
    assert engine.sizes[:11] == [4] * 11
    assert not engine.running
    assert spent["tokens"] == 10


def test_a_worker_that_fails_is_not_waited_for():
    async def fail() -> None:
        raise RuntimeError("the engine died")

    async def wait() -> None:
        await reached(asyncio.Event(), asyncio.create_task(fail()))

    with pytest.raises(RuntimeError, match="the engine died"):
        asyncio.run(asyncio.wait_for(wait(), 10 * SLOW))


@pytest.mark.parametrize("settings", [[], ["--pool.max_staleness", "4"], ["--pool.questions", "32"]])
def test_a_round_has_tickets_for_all_of_its_episodes(monkeypatch, settings):
    """A setting for the run that is compared left it waiting for ever."""
    made = []

    class Stopped(Exception): ...

    def fleet(config):
        made.append(config)
        raise Stopped

    monkeypatch.setattr(bench_rollout, "Fleet", fleet)
    with pytest.raises(Stopped):
        bench_rollout.measure({}, 1, 144, settings=settings)
    (config,) = made
    assert config.pool.size * (config.pool.max_staleness + 1) > 4 * 144 + 144


@pytest.mark.slow
def test_worker_and_vllm_alone_are_measured():
    sides = {name: bench_rollout.SIDES[name] for name in ("worker", "raw, one process")}
    found = bench_rollout.measure(sides, 1, pool=24)
    (worker,), (raw,) = found["worker"], found["raw, one process"]
    assert worker["engine_s"] > worker["own_s"] > 0
    assert raw["engine_s"] == 0 < raw["own_s"]
    assert 0.5 < worker["tokens"] / raw["tokens"] < 2


def test_figures_of_several_benchmarks_stand_beside_each_other(tmp_path: Path):
    out = tmp_path / "bench" / "learner.json"
    figures.add(out, {"a": 1.0, "b": 2.0})
    figures.add(out, {"b": 3.0})
    assert json.loads(out.read_text()) == {"a": 1.0, "b": 3.0}
