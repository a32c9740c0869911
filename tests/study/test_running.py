"""Runs of a study: one after the other, each once, and whatever happens to one is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError, RunInUse
from cusearch_async.run import folder as run_folder
from cusearch_async.study import running, tables
from cusearch_async.study.plan import OF_A_RUN
from cusearch_async.study.running import run_all, to_do
from cusearch_async.study.tables import Tables
from tests.conftest import SLOW, wait_until
from tests.study.one_study import fake_child, make
from tests.study.studies import plan_of

pytestmark = pytest.mark.system  # it starts processes and kills them


@pytest.fixture
def plan(tmp_path):
    """Two methods, one seed, and in the names of the runs a point."""
    return plan_of(
        tmp_path,
        ('"retriever.stochastic" = [true, false]', '"retriever.noise" = [0.5]'),
        ("seeds = 3", "seeds = 1"),
        ('[[part]]\nname = "staleness"\nseeds = 2', '[[part]]\nname = "staleness"\nseeds = 1'),
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "start_child", fake_child)
    monkeypatch.setattr(running, "_POLL_S", 0.02)
    return tmp_path / "study"


def test_a_run_that_is_done_is_in_the_tables_and_its_folder_is_gone(plan, folder):
    told = []
    tables = make(plan, folder, told)
    assert told == [(run, "done") for run in plan.runs]
    assert set(tables.statuses.values()) == {"done"}
    row = tables.runs.iloc[0]
    assert (row["trajectories"], row["trained"], row["trained_tokens"], row["steps_s"]) == (24, 12, 400, 8)
    assert row["em_last"] == pytest.approx(12 / 40)
    assert row["em_area"] == pytest.approx((2 * 3 + 2 * 9) / 4 / 40)
    assert row["depth_growth"] == 4
    assert (row["method.name"], row["seed"]) == ("grpo_full", 0)
    assert len(tables.steps) == 4 * len(plan.runs)
    needed = tables.answers[(tables.answers["run"] == row["run"]) & (tables.answers["version"] == 4)]["needed"]
    assert sorted(needed) == [links for links in range(1, 6) for _ in range(8)]
    assert row["over_search"] == pytest.approx((3 + 2 + 1) / 5)
    assert [path.name for path in (folder / "work").iterdir() if path.is_dir()] == []
    assert to_do(plan, tables, retry_failed=False) == []


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("fail", "the engine died (exited with 1)"),
        ("short", "it has 3 of 4 steps"),
        ("hole", "scores of versions [0, 4]"),
    ],
)
def test_a_run_that_fails_is_kept_with_its_reason_and_the_others_go_on(plan, folder, monkeypatch, how, reason):
    monkeypatch.setenv("FAKE_LAUNCH", how)
    tables = make(plan, folder, [])
    failed = tables.runs[tables.runs["status"] == "failed"]
    broken = [run.id for run in plan.runs.values() if how != "fail" or run.config.method.name == "sdga_phase"]
    assert sorted(failed["run"]) == sorted(broken)
    assert all(reason in text for text in failed["reason"])
    assert all((folder / "work" / run).is_dir() for run in failed["run"]), "to look into it, and to continue"
    assert {path.name for path in (folder / "work").glob("*.log")} == {f"{run}.log" for run in plan.runs}
    monkeypatch.delenv("FAKE_LAUNCH")
    if how != "short":
        again = to_do(plan, tables, retry_failed=True)
        ends = []
        run_all(plan, folder, again, lambda run, end, _: ends.append(end))
        assert set(ends) == {"done"}
        later = Tables.read(folder)
        assert set(later.statuses.values()) == {"done"}
        told = dict(zip(later.runs["run"], later.runs["reason"], strict=True))
        assert all(told[run].startswith("it had failed: ") and reason in told[run] for run in broken), (
            "not dropped silently"
        )


@pytest.mark.parametrize("is_kept", [False, True], ids=["alive", "in an object store"])
def test_a_run_that_lacks_a_score_is_deleted_only_where_it_can_be_made_anew(plan, folder, monkeypatch, is_kept):
    """An earlier launch may still be stopping there; and what an object store has would bring the same run back."""
    monkeypatch.setenv("FAKE_LAUNCH", "hole")
    make(plan, folder, [])
    run = next(iter(plan.runs.values()))
    where = folder / "work" / run.id
    if is_kept:
        monkeypatch.setattr(running, "places_of", lambda *_: {"learner.checkpoint_objects": "s3://bucket/x"})
        run_all(plan, folder, [run], lambda *_: None)
    else:
        monkeypatch.setattr(running, "_LEAVE_S", 0.1 - run.config.run.stall_s)
        with run_folder.hold(where), pytest.raises(RunInUse):
            run_all(plan, folder, [run], lambda *_: None)
    assert len((where / "began").read_text().splitlines()) == 1 + is_kept, "a folder that is made anew begins at 1"


def test_a_run_is_launched_with_its_settings_and_its_starts_outlive_its_folder(plan, folder):
    make(plan, folder, [])
    for run in plan.runs.values():
        assert not (folder / "work" / run.id).exists()
        config_file, *words = json.loads((folder / "starts" / run.id / "words.json").read_text())
        launched = load_config([Path(config_file)], words).model_dump()
        planned = run.config.model_dump()
        for key in OF_A_RUN:
            section, name = key.split(".")
            if key != "run.seed":
                planned[section][name] = launched[section][name]
        assert launched == planned


@pytest.mark.parametrize("how", ["hang", "slow"])
def test_a_study_that_is_killed_continues_with_the_run_that_it_had_begun(plan, folder, tmp_path, how):
    """Also at once, while the launch of the first one is still stopping."""
    command = [sys.executable, "-m", "tests.study.one_study", str(tmp_path / "small.toml"), str(folder)]
    root = Path(__file__).parents[2]
    killed = subprocess.Popen(command, env=os.environ | {"FAKE_LAUNCH": how, "PYTHONPATH": str(root)}, cwd=root)
    first = folder / "work" / next(iter(plan.runs))
    try:
        wait_until(lambda: (first / "began").exists() and (first / "began").read_text().strip(), 30 * SLOW)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    assert Tables.read(folder).statuses == {}
    tables = make(plan, folder, [])
    assert tables.statuses == dict.fromkeys(plan.runs, "done")
    log = first.with_name(f"{first.name}.log").read_text()
    assert [line for line in log.splitlines() if line.startswith("attempt")] == ["attempt 1", "attempt 2"]


def test_a_study_that_is_interrupted_waits_for_its_launch(plan, folder, tmp_path):
    """Which was told a second time when the study had ended, and then kills its learner, which may be saving."""
    command = [sys.executable, "-m", "tests.study.one_study", str(tmp_path / "small.toml"), str(folder)]
    root = Path(__file__).parents[2]
    environment = os.environ | {"FAKE_LAUNCH": "slow", "LEAVE_S": "0.1", "PYTHONPATH": str(root)}
    stopped = subprocess.Popen(command, env=environment, cwd=root)
    log = folder / "work" / f"{next(iter(plan.runs))}.log"
    try:
        wait_until(lambda: log.exists() and "attempt 1" in log.read_text(), 30 * SLOW)
        stopped.send_signal(signal.SIGINT)
        stopped.wait(30 * SLOW)
    finally:
        stopped.kill()
    assert log.read_text().count("told to stop") == 1


def test_the_seconds_of_all_attempts_count(plan, folder, monkeypatch):
    monkeypatch.setenv("FAKE_LAUNCH", "fail")
    tables = make(plan, folder, [])
    (lost,) = tables.runs[tables.runs["status"] == "failed"]["run"].head(1)
    seconds = folder / "work" / f"{lost}.seconds"
    assert float(seconds.read_text()) > 0
    seconds.write_text("1000.0")
    monkeypatch.delenv("FAKE_LAUNCH")
    run_all(plan, folder, [plan.runs[lost]], lambda *_: None)
    runs = Tables.read(folder).runs.set_index("run")
    assert 1000 < runs.loc[lost, "wall_s"] < 2000
    assert not seconds.exists()


def test_a_launch_that_is_killed_has_its_signal_for_a_reason_and_not_an_earlier_line(plan, folder, monkeypatch):
    run = next(iter(plan.runs.values()))
    (folder / "work").mkdir(parents=True)
    (folder / "work" / f"{run.id}.log").write_text("step 23\n")
    monkeypatch.setenv("FAKE_LAUNCH", "die")
    run_all(plan, folder, [run], lambda *_: None)
    assert list(Tables.read(folder).runs["reason"]) == ["killed by signal 9"]


def test_a_launch_that_refuses_its_config_is_quoted_from_its_first_line(plan, folder, monkeypatch):
    run = next(iter(plan.runs.values()))
    monkeypatch.setenv("FAKE_LAUNCH", "refuse")
    run_all(plan, folder, [run], lambda *_: None)
    assert list(Tables.read(folder).runs["reason"]) == ["cusearch: a.b: unknown key (exited with 1)"]


def test_what_a_kill_has_left_of_a_run_that_is_done_is_removed(plan, folder):
    """Killed between the tables and the folder."""
    make(plan, folder, [])
    left = folder / "work" / next(iter(plan.runs))
    left.mkdir()
    (left / "began").touch()
    make(plan, folder, [])
    assert not left.exists()


def test_a_question_may_need_hundreds_of_documents_and_be_one_of_many(plan, monkeypatch):
    """Before, a study of such questions ended after its first run, whenever it was started."""
    count = 40_000
    questions = [SimpleNamespace(evidence=range(200), id="q")] * count
    monkeypatch.setattr(tables, "load_eval_questions", lambda config: questions)
    each = {"em": [1] * count, "depth": [200] * count, "question_id": ["q"] * count}
    answers = tables._answers(next(iter(plan.runs.values())), [{"step": 70_000, "each": each}])
    assert answers["needed"].unique().tolist() == answers["depth"].unique().tolist() == [200]
    assert (answers["question"].max(), answers["version"].max()) == (count - 1, 70_000)


def test_answers_to_other_questions_are_not_taken_for_those_of_the_config(plan, monkeypatch):
    """A suite that grew has another draw of eval.limit: question i was paired with another question i."""
    monkeypatch.setattr(tables, "load_eval_questions", lambda config: [SimpleNamespace(evidence=None, id="new")])
    each = {"em": [1], "depth": [2], "question_id": ["old"]}
    with pytest.raises(ConfigError, match=r"version 4 was scored on other questions than eval\.suite has now"):
        tables._answers(next(iter(plan.runs.values())), [{"step": 4, "each": each}])


def test_a_run_that_is_done_elsewhere_keeps_its_weights(plan, folder, monkeypatch, tmp_path):
    """A report of a study deleted what the same study, running in another folder, had below one weights.folder."""
    monkeypatch.setattr(running, "places_of", lambda *_: {"weights.folder": str(tmp_path / "weights")})
    make(plan, folder, [])
    (tmp_path / "weights").mkdir()
    run_all(plan, folder, [], lambda *_: None)
    assert (tmp_path / "weights").is_dir()
