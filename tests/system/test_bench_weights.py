"""`make bench-weights` runs, and writes the figures that are quoted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SLOW

pytestmark = [pytest.mark.system, pytest.mark.slow]


def test_the_figures_of_publishing_are_written(tmp_path: Path):
    command = [sys.executable, "-m", "tests.bench.bench_weights", "--smoke", "--out", str(tmp_path / "weights.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=300 * SLOW)
    found = json.loads((tmp_path / "weights.json").read_text())
    assert found["learner_stop_s_500m"] < found["update_s"]
    assert found.keys() >= {"event_loop_lag_ms", "pause_over_copy", "before_s", "published_gb"}
    assert found["versions_bit_exact"] == 20
    assert 0 < found["lent_s_500m"] < found["update_s"]
    assert 0.01 < found["adapter_share"] <= 0.02
    assert 0.001 < found["delta_share_lr1e-6"] <= 0.1
