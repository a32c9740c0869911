"""The tracker process: every row of a run arrives once, whatever fails in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sqlite3
import sys
from pathlib import Path

import pytest

from cusearch_async.config import Config, load_config, save_config
from cusearch_async.errors import ConfigError, TrackerFailed
from cusearch_async.files import append_row
from cusearch_async.lifecycle.children import start_child
from cusearch_async.processes import tracker
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import record_start, record_stop
from tests.conftest import wait_until

LINES = "tests.metrics.own_trackers:Lines"


@pytest.fixture
def config(atlas_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(tracker, "POLL_S", 0.02)
    options = [
        "--run.folder",
        str(tmp_path / "run"),
        "--run.steps",
        "4",
        "--run.trackers",
        LINES,
        "--run.tags",
        "short",
    ]
    made = load_config(atlas_config, options)
    run_folder.mark(made.folder, made.run.name)
    return made


def step(config: Config, number: int, epoch: int = 1) -> None:
    figures = {"reward/em": number / 4, "depth/generated": [0, 3, None]}
    append_row(config.folder / "metrics.jsonl", {"step": number, "epoch": epoch, "time": 1.0, **figures})


def score(config: Config, version: int, epoch: int = 1) -> None:
    row = {"step": version, "epoch": epoch, "seconds": 2.0, "all": {"em": 0.5, "count": 4}, "2": {"em": 0.25}}
    append_row(config.folder / "eval.jsonl", row | {"each": {"em": [1, 0]}})


def arrived(config: Config) -> list[list]:
    path = config.folder.parent / "tracked.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps(config: Config) -> list[int]:
    return [row[0] for row in arrived(config) if len(row) == 2 and "reward/em" in row[1]]


async def until(is_true) -> None:
    await asyncio.to_thread(wait_until, is_true, 20)


async def test_all_rows_of_a_finished_run_are_sent_and_it_ends(config):
    record_start(config, epoch=1, step=0)
    for number in range(4):
        step(config, number)
    score(config, 4)
    record_stop(config.folder, 1, 4, "finished")
    await tracker.run(config)
    (opened, *rows, closed) = arrived(config)
    assert opened == ["opened", run_folder.read_marker(config.folder).id, "atlas"]
    assert rows[0] == [0, {"reward/em": 0.0, "depth/generated/0": 0.0, "depth/generated/1": 3.0}]
    assert [row[0] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[4][1] == {"eval/em": 0.5, "eval/count": 4.0, "eval/2/em": 0.25}
    assert closed == ["closed"]


async def test_a_run_is_followed_and_continued_without_a_row_twice(config):
    record_start(config, epoch=1, step=0)
    step(config, 0)
    following = asyncio.create_task(tracker.run(config))
    await until(lambda: steps(config) == [0])
    step(config, 1)
    await until(lambda: steps(config) == [0, 1])
    following.cancel()  # killed
    await asyncio.gather(following, return_exceptions=True)
    step(config, 2)
    record_stop(config.folder, 1, 3, "finished")
    await tracker.run(config)
    assert steps(config) == [0, 1, 2]


async def test_the_steps_of_a_learner_that_went_back_are_sent_again(config):
    record_start(config, epoch=1, step=0)
    for number in range(3):
        step(config, number)
    following = asyncio.create_task(tracker.run(config))
    await until(lambda: steps(config) == [0, 1, 2])
    record_start(config, epoch=2, step=1)
    for number in range(1, 4):
        step(config, number, epoch=2)
    record_stop(config.folder, 2, 4, "finished")
    await following
    assert steps(config) == [0, 1, 2, 1, 2, 3]


async def test_a_tracker_that_is_down_gets_everything_later(config, caplog):
    record_start(config, epoch=1, step=0)
    step(config, 0)
    following = asyncio.create_task(tracker.run(config))
    await until(lambda: steps(config) == [0])
    down = config.folder.parent / "down"
    down.touch()
    step(config, 1)
    await until(lambda: "the tracker is down" in caplog.text)
    assert f"{LINES} failed, and gets what it lacks in 0 s: ConnectionError" in caplog.text
    down.unlink()
    step(config, 2)
    record_stop(config.folder, 1, 3, "finished")
    await following
    assert steps(config) == [0, 1, 2]


async def test_with_an_evaluator_it_waits_for_the_last_score(config):
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 2})})
    record_start(config, epoch=1, step=0)
    step(config, 3)
    record_stop(config.folder, 1, 4, "finished")
    following = asyncio.create_task(tracker.run(config))
    await until(lambda: steps(config) == [3])
    score(config, 2)
    await until(lambda: arrived(config)[-1][0] == 2)
    assert not following.done()
    score(config, 4)
    await following
    assert arrived(config)[-2][0] == 4


def test_a_process_that_is_asked_to_stop_sends_what_is_there(config, tmp_path):
    save_config(config, tmp_path / "mine.toml")
    step(config, 0)
    command = [sys.executable, "-m", "workers.tracker", str(tmp_path / "mine.toml")]
    process = start_child(command, {"PYTHONPATH": str(Path(__file__).parents[2])}, tmp_path / "log")
    try:
        wait_until(lambda: steps(config) == [0], 30)
        step(config, 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
    assert [row[0] for row in arrived(config)] == ["opened", 0, 1, "closed"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("wand", "run.trackers 'wand' is unknown; use one of wandb, trackio, mlflow, or your own as"),
        ("tests.metrics.own_trackers:not_a_tracker", "must be a subclass of"),
    ],
)
async def test_what_is_no_tracker_is_named(config, name, why):
    run = config.run.model_copy(update={"trackers": (name,)})
    with pytest.raises(ConfigError, match=why):
        await tracker.run(config.model_copy(update={"run": run}))


async def test_a_tracker_that_cannot_begin_is_named(config):
    (config.folder.parent / "down").touch()
    with pytest.raises(TrackerFailed, match=f"{LINES} cannot begin: ConnectionError: the tracker is down"):
        await tracker.run(config)


# --- the real ones, without a network -----------------------------------------------------------------

OFFLINE = {
    "wandb": {"WANDB_MODE": "offline"},
    "trackio": {"TRACKIO_DIR": "{folder}/trackio"},
    "mlflow": {"MLFLOW_TRACKING_URI": "file:{folder}/mlflow", "MLFLOW_ALLOW_FILE_STORE": "true"},
}


def tracked_by(name: str, config: Config, folder: Path) -> None:
    """The process itself, twice, as a launch and its continuation start it."""
    options = {key: value.format(folder=folder) for key, value in OFFLINE[name].items()}
    own = config.run.model_copy(update={"trackers": (name,)})
    save_config(config.model_copy(update={"run": own}), folder / "mine.toml")
    record_start(config, epoch=1, step=0)
    for number in range(2):
        step(config, 2 * number)
        step(config, 2 * number + 1)
        score(config, 2 * number + 2)
        record_stop(config.folder, 1, 4, "finished")
        command = [sys.executable, "-m", "workers.tracker", str(folder / "mine.toml")]
        process = start_child(command, {"PYTHONPATH": str(Path(__file__).parents[2])} | options, folder / "log")
        try:
            assert process.wait(100) == 0, (folder / "log").read_text()
        finally:
            process.kill()
    assert "failed" not in (folder / "log").read_text()


@pytest.mark.system
def test_wandb_keeps_a_run_offline(config, tmp_path):
    tracked_by("wandb", config, tmp_path)
    kept = sorted(
        config.folder.glob(f"tracked/wandb/offline-run-*/run-{run_folder.read_marker(config.folder).id}.wandb")
    )
    assert len(kept) == 2, "W&B joins them by their id when they are synced"
    for name in (b"reward/em", b"depth/generated/1", b"eval/2/em", b"max_staleness", b"short"):
        assert name in kept[0].read_bytes()
    assert b"reward/em" in kept[1].read_bytes()


@pytest.mark.system
def test_trackio_keeps_a_run(config, tmp_path):
    tracked_by("trackio", config, tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "cusearch.db")) as kept:
        found = kept.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    rows = [json.loads(metrics) for _, _, metrics in found]
    assert {name for name, _, _ in found} == {f"atlas-{run_folder.read_marker(config.folder).id[:8]}"}
    assert [row["reward/em"] for row in rows if "reward/em" in row] == [0, 0.25, 0.5, 0.75]
    assert [row["eval/em"] for row in rows if "eval/em" in row] == [0.5, 0.5]


@pytest.mark.system
def test_mlflow_keeps_a_run(config, tmp_path, monkeypatch):
    tracked_by("mlflow", config, tmp_path)
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(f"file:{tmp_path}/mlflow")
    (run,) = client.search_runs([client.get_experiment_by_name("cusearch").experiment_id])
    assert run.info.run_name == "atlas"
    assert run.info.status == "FINISHED"
    assert "short" in run.data.tags
    assert run.data.params["pool.max_staleness"] == "2"
    history = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "reward/em")}
    assert history == {0: 0.0, 1: 0.25, 2: 0.5, 3: 0.75}
    assert client.get_metric_history(run.info.run_id, "eval/2/em")
