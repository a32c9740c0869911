"""`make bench-weights` runs, and writes the figures that are quoted."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bench.weight_ways import WAYS, after_a_step, ways_of
from tests.conftest import SLOW

pytestmark = pytest.mark.system


@pytest.mark.slow
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


def test_a_version_goes_each_way(tmp_path: Path):
    """The object store refused to begin: its run's folder had no marker."""
    found = asyncio.run(ways_of("1 M", tmp_path))
    kinds = [(kind, way) for way in WAYS for kind in ("whole", "adapter")] + [("difference", "http")]
    assert found.keys() == {f"1 M, {kind}, {way}" for kind, way in kinds}
    assert len({found[f"1 M, whole, {way}"]["bytes"] for way in WAYS}) == 1


def test_a_step_changes_as_many_weights_as_one_of_float32_weights():
    """Half as many were changed: the masters lay in the inner half of what rounds to a weight."""
    noise = torch.Generator().manual_seed(0)
    masters = torch.randn(300_000, generator=noise) * 0.02
    before, step = masters.bfloat16(), 1e-6 * torch.randn(masters.shape, generator=noise).sign()
    changed = [after_a_step({"a": before}, noise)["a"] != before, (masters + step).bfloat16() != before]
    drawn, exact = (float(one.float().mean()) for one in changed)
    assert drawn == pytest.approx(exact, rel=0.1)
    assert not after_a_step({"a": torch.zeros(9).bfloat16()}, noise)["a"].isnan().any()
