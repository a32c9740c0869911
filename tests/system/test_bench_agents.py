"""`make bench-agents`, in small; its campaign of kills is `agents` of test_chaos.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.templates import chat_starter
from tests.bench import bench_agents

pytestmark = [pytest.mark.system, pytest.mark.slow]


def test_agents_episodes_are_exact_and_measured_against_the_native_loop(tmp_path: Path):
    model = chat_starter(tmp_path / "chat")
    found = bench_agents.exactness(model, 12)
    assert (found["ids_exact_share"], found["rows_per_episode"]) == (1.0, 1.0)
    assert 0 < found["logp_max_diff"] < 1e-3
    ratios = bench_agents.over_native_loop(model, 1, 24)
    assert min(ratios["over_native_loop"], ratios["over_native_loop_openai"]) > 0.2
