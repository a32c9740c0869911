"""A process that plays episodes, with small parts around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cusearch_async.config import load_config
from tests.processes.scene import Scene
from tests.rollout.workers import SMALL


@pytest.fixture
def make_scene(atlas_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    """A run of four steps whose every second version is scored, on five questions."""
    source = tmp_path / "mine.jsonl"
    rows = ({"id": f"q{i}", "question": f"who {i}?", "golden_answers": ["me"]} for i in range(5))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    small = [*SMALL, "--run.folder", str(tmp_path / "run"), "--run.steps", "4", "--eval.every", "2"]
    small += ["--data.source", str(source), "--eval.suite", json.dumps([str(source)])]

    def make(*configs: Path, drain_s: float = 0.0) -> Scene:
        words = [*small, "--rollout.drain_s", str(drain_s)]
        return Scene(load_config([atlas_config, *configs], words), monkeypatch)

    return make


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene()
