"""The engine and the runner with which commands score a policy."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest

from cusearch_async.cli.parts import passes
from cusearch_async.config import load_config
from cusearch_async.processes import engines


@pytest.mark.parametrize("fails", [False, True])
async def test_what_is_scored_is_a_whole_model_and_programs_elsewhere_find_the_next_one(monkeypatch, fails):
    """A run's adapter is merged: its engine refused float32 on a GPU, and models without LoRA. The runner before still
    had the port to which programs turn, and the second one waited for ever."""
    seen = []

    class Runner:
        async def close(self):
            seen.append("closed")

    @contextmanager
    def open_runner(config, model, tokenizer, search):
        seen.append(config.learner.lora.rank)
        yield None, Runner()

    async def run_passes(*_):
        seen.append("run")
        if fails:
            raise OSError
        return []

    monkeypatch.setattr(engines, "open_runner", open_runner)
    monkeypatch.setattr(engines, "check_policy", lambda config, model: None)
    monkeypatch.setattr(passes, "run_passes", run_passes)
    config = load_config(Path("atlas"), ["--learner.lora.rank", "8"])
    try:
        await passes.run_passes_with(None, config, "m", [])
    except OSError:
        assert fails
    assert seen == [0, "run", "closed"]
    assert config.learner.lora.rank == 8
