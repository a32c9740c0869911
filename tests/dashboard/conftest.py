"""A run of some steps, for the page."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cusearch_async.config import load_config
from cusearch_async.files import append_row
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import record_start
from tests.conftest import free_port


@pytest.fixture
def config(atlas_config, tmp_path):
    folder = ["--run.folder", str(tmp_path / "demo"), "--run.steps", "10"]
    folder += ["--run.tags", "short", "--run.note", "a first try"]
    made = load_config(atlas_config, [*folder, "--redis.url", f"redis://127.0.0.1:{free_port()}/0"])
    run_folder.mark(made.folder, made.run.name)
    record_start(made, 1, 0)
    return made


def add_step(config, step: int, **more: Any) -> None:
    row = {
        "reward/em": 0.5,
        "reward/all": 0.6,
        "depth/mean": 2.0,
        "time/step_s": 3.0,
        "depth/generated": [1, 2, 0, 0, 0, 1],
    }
    append_row(config.folder / "metrics.jsonl", {"step": step, "epoch": 1, "time": 0.0} | row | more)


def data_of(text: str) -> dict[str, Any]:
    """The data of a page, as its script reads them."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)
