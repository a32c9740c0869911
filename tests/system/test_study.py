"""A study of real runs, two methods with CUSEARCH_STUDY_SEEDS seeds each, and a kill in the middle.

`make test-study` sets 2; a run takes a minute. `tests/study` has the same with a stand-in for `launch`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import psutil
import pytest

from cusearch_async.study.plan import read_plan
from cusearch_async.study.tables import Tables
from tests.conftest import SLOW, wait_until

pytestmark = pytest.mark.system

SEEDS = int(os.environ.get("CUSEARCH_STUDY_SEEDS", "0"))
STUDY = f"""
[study]
name = "miniature"
configs = ["atlas-hard"]
baseline = {{ "method.name" = "grpo_full" }}

[settings]
"run.steps" = 1
"pool.questions" = 6
"pool.rollouts" = 3
"pool.max_staleness" = 0
"method.budget" = 8
"loss.minibatch" = 8
"learner.cores" = []
"rollout.cores" = []
"eval.every" = 1
"eval.in_order" = true
"eval.questions_per_category" = 2

[[part]]
name = "methods"
seeds = {max(SEEDS, 1)}
[part.grid]
"method.name" = ["grpo_full", "sdga_phase"]
"""
RUN_S = 240 * SLOW


def study(file: Path, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cusearch_async.cli.main", "study", str(file), "--folder", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.skipif(not SEEDS, reason="minutes: make test-study")
def test_a_study_that_is_killed_goes_on_and_reports_all_of_its_runs(tmp_path: Path) -> None:
    file, folder = tmp_path / "miniature.toml", tmp_path / "study"
    file.write_text(STUDY, encoding="utf-8")
    plan = read_plan(file)
    first = folder / "work" / next(iter(plan.runs))
    killed = study(file, folder)
    try:
        wait_until((first / "logs" / "learner.log").exists, RUN_S)
        alive = psutil.Process(killed.pid).children(recursive=True)
        assert len(alive) >= 3
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    wait_until(lambda: not any(child.is_running() for child in alive), 60 * SLOW)

    again = study(file, folder)
    output, _ = again.communicate(timeout=4 * RUN_S)
    assert again.returncode == 0, output
    tables = Tables.read(folder)
    assert tables.statuses == dict.fromkeys(plan.runs, "done"), output
    for name in plan.runs:
        answers = tables.answers[tables.answers["run"] == name]
        assert sorted(answers["version"].unique()) == [0, 1]
        assert len(answers) == 2 * 10
    trained = dict(zip(tables.runs["method.name"], tables.runs["trained"], strict=True))
    assert trained == {"grpo_full": 18, "sdga_phase": 8}
    assert set(tables.runs["trajectories"]) == {18}
    report = (folder / "report.md").read_text()
    assert f"{len(plan.runs)} of {len(plan.runs)} runs are done, 0 failed" in report
    assert ("no interval" in report) == (SEEDS == 1)
    assert "Less grpo_full" in report
    assert isinstance(pd.read_csv(folder / "runs.csv"), pd.DataFrame)
    assert not any(path.is_dir() for path in (folder / "work").iterdir())
