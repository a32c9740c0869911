"""`make bench-rollout`: the worker and vLLM alone sample the same turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import bench_rollout, figures

pytestmark = [pytest.mark.system, pytest.mark.slow]


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
