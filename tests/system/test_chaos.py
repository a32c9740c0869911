"""A short chaos run; `make test-chaos` is the long one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.chaos import LONGEST_LIFE_S, Chaos, is_clean

pytestmark = pytest.mark.system


def test_a_run_whose_processes_are_killed_again_and_again_loses_nothing(tmp_path: Path):
    summary = Chaos(tmp_path, kills=3).run()
    assert is_clean(summary), json.dumps(summary, indent=1)
    assert summary["kills"] == dict.fromkeys(LONGEST_LIFE_S, 3)
    assert summary["finished"] >= summary["steps"] * 16
    assert summary["staleness_max"] <= 2
