"""What `make bench-lm` does not do again after it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import lm_over_trl
from tests.bench.lm_over_trl import CASE, POINTS, SAVED


@pytest.mark.parametrize(
    ("models", "seconds", "is_used"), [(POINTS, 600.5, True), (POINTS - 1, 600.5, False), (POINTS, 600.25, False)]
)
def test_trls_models_are_used_if_all_are_there_and_were_trained_as_long_as_this_run(
    tmp_path, monkeypatch, models, seconds, is_used
):
    def write(output: Path, seconds: float, count: int) -> None:
        output.mkdir(parents=True, exist_ok=True)
        (output / CASE).write_text(json.dumps({"seconds": seconds}))
        lines = [json.dumps({"step": step, "seconds": step, "model": f"step-{step}"}) for step in range(count)]
        (output / SAVED).write_text("".join(f"{line}\n" for line in lines))

    trained: list[float] = []

    def run_trl(configs, settings, output, seconds):
        trained.append(seconds)
        write(output, seconds, POINTS)

    monkeypatch.setattr(lm_over_trl, "run_trl", run_trl)
    write(tmp_path / "trl", seconds, models)
    found = lm_over_trl.train_with_trl([], [], tmp_path, 600.5)
    assert [point["step"] for point in found] == list(range(POINTS))
    assert trained == ([] if is_used else [600.5])
