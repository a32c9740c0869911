"""A run's trackers: every row of it arrives once, whatever fails in between."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cusearch_async.config import Config, load_config, save_config
from cusearch_async.errors import ConfigError, RunInUse, TrackerFailed
from cusearch_async.files import append_row
from cusearch_async.lifecycle.children import start_child
from cusearch_async.metrics import trackers, tracking
from cusearch_async.metrics.trackers import tracker_class
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import record_start, record_stop
from tests.conftest import SLOW, wait_until
from tests.metrics import own_trackers

LINES = "tests.metrics.own_trackers:Lines"
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"}


@pytest.fixture
def config(atlas_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(tracking, "POLL_S", 0.02)
    options = [
        "--run.folder",
        str(tmp_path / "run"),
        "--run.steps",
        "4",
        "--run.trackers",
        LINES,
        "--run.tags",
        '["short", "lr=1e-6"]',
    ]
    made = load_config(atlas_config, options)
    run_folder.mark(made.folder, made.run.name)
    return made


def step(config: Config, number: int, epoch: int = 1) -> None:
    figures = {"reward/em": number / 4, "depth/generated": [0, 3, None]}
    append_row(config.folder / "metrics.jsonl", {"step": number, "epoch": epoch, "time": 1.0, **figures})


def score(config: Config, version: int, epoch: int = 1) -> None:
    scores = {"all": {"em": 0.5, "count": 4}, "musique, 2 hops": {"em": 0.25}}
    row = {"step": version, "epoch": epoch, "seconds": 2.0, **scores, "each": {"em": [1, 0]}}
    append_row(config.folder / "eval.jsonl", row)


def finish(config: Config, epoch: int = 1) -> None:
    record_stop(config.folder, epoch, 4, "finished")


def arrived(config: Config) -> list[list]:
    path = config.folder.parent / "tracked.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def id_of(config: Config) -> str:
    return (config.folder / "tracked" / "id").read_text()


def steps(config: Config) -> list[int]:
    return [row[0] for row in arrived(config) if len(row) == 2 and "reward/em" in row[1]]


def send(config: Config, follow: bool = False, name: str = LINES) -> None:
    tracking.track(config.folder, config.model_dump(mode="json"), [name], follow)


@contextlib.contextmanager
def followed(config: Config, last_scored: int | None = None) -> Iterator[tracking.Sender]:
    """As by `track`, while the test continues."""
    stop, place = threading.Event(), config.folder / "tracked"
    place.mkdir(exist_ok=True)
    run = tracking.TrackedRun("id", "atlas", place, config.model_dump(mode="json"))
    sender = tracking.Sender(config.folder, LINES, tracker_class(LINES), run, last_scored, True, stop)
    sender.start()
    try:
        yield sender
    finally:
        stop.set()
        sender.join(20 * SLOW)
    assert not sender.is_alive()


def test_what_is_there_is_sent_and_not_again(config):
    record_start(config, epoch=1, step=0)
    for number in range(4):
        step(config, number)
    score(config, 4)
    send(config)
    (opened, *rows, closed) = arrived(config)
    assert opened == ["opened", id_of(config), "atlas"]
    assert rows[0] == [0, {"reward/em": 0.0, "depth/generated/0": 0.0, "depth/generated/1": 3.0}]
    assert [row[0] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[4][1] == {"eval/all/em": 0.5, "eval/all/count": 4.0, "eval/musique, 2 hops/em": 0.25}
    assert closed == ["closed"]
    send(config)
    assert steps(config) == [0, 1, 2, 3]


def test_a_run_is_followed_to_its_end_and_continued(config):
    record_start(config, epoch=1, step=0)
    step(config, 0)
    with followed(config):
        wait_until(lambda: steps(config) == [0], 20)
        step(config, 1)
        wait_until(lambda: steps(config) == [0, 1], 20)
    step(config, 2)
    with followed(config) as sender:
        wait_until(lambda: steps(config) == [0, 1, 2], 20)
        assert sender.is_alive()
        step(config, 3)
        finish(config)
        sender.join(20 * SLOW)
    assert steps(config) == [0, 1, 2, 3]


def test_the_steps_of_a_learner_that_went_back_are_sent_again(config):
    record_start(config, epoch=1, step=0)
    for number in range(3):
        step(config, number)
    with followed(config) as sender:
        wait_until(lambda: steps(config) == [0, 1, 2], 20)
        record_start(config, epoch=2, step=1)
        for number in range(1, 4):
            step(config, number, epoch=2)
        finish(config, epoch=2)
        sender.join(20 * SLOW)
    assert steps(config) == [0, 1, 2, 1, 2, 3]


def test_a_tracker_that_is_down_gets_everything_later(config, caplog):
    """Also when it is down from the start."""
    record_start(config, epoch=1, step=0)
    step(config, 0)
    down = config.folder.parent / "down"
    down.touch()
    with followed(config) as sender:
        wait_until(lambda: "the tracker is down" in caplog.text, 20)
        assert f"{LINES} failed: ConnectionError: the tracker is down" in caplog.text
        down.unlink()
        wait_until(lambda: steps(config) == [0], 20)
        down.touch()
        step(config, 1)
        finish(config)
        wait_until(lambda: sender.lacks, 20)
        down.unlink()
        sender.join(20 * SLOW)
    assert steps(config) == [0, 1]


def test_a_row_that_is_refused_holds_up_no_other(config, caplog):
    record_start(config, epoch=1, step=0)
    for number in (0, 1, 2):
        step(config, number)
    (config.folder.parent / "refused").write_text("1")
    with followed(config) as sender:
        wait_until(lambda: steps(config) == [0, 2], 20)
        finish(config)
        sender.join(20 * SLOW)
    assert f"{LINES} refuses step 1 of metrics.jsonl: step 1 is refused" in caplog.text


def test_an_outage_that_ends_before_the_next_row_refuses_none(config, monkeypatch):
    log, calls = own_trackers.Lines.log, itertools.count()

    def back_at_the_fifth_call(self, *given):
        if next(calls) < tracking.TRIES + 1:
            raise ConnectionError("down")
        log(self, *given)

    monkeypatch.setattr(own_trackers.Lines, "log", back_at_the_fifth_call)
    record_start(config, epoch=1, step=0)
    for number in range(3):
        step(config, number)
    finish(config)
    with followed(config) as sender:
        sender.join(20 * SLOW)
    assert sorted(steps(config)) == [0, 1, 2]
    assert not sender.lacks


def test_a_tracker_that_is_down_for_days_gets_everything_later(config, monkeypatch):
    monkeypatch.setattr(tracking, "RETRY_AT_LEAST_EVERY_S", 0.02)
    record_start(config, epoch=1, step=0)
    step(config, 0)
    down = config.folder.parent / "down"
    down.touch()
    with followed(config) as sender:
        wait_until(lambda: sender._failures, 20)
        sender._failures = 2000
        wait_until(lambda: sender._failures > 2002 or not sender.is_alive(), 20)
        down.unlink()
        wait_until(lambda: steps(config) == [0], 20)


def test_what_is_lacking_at_the_end_is_an_error(config):
    step(config, 0)
    (config.folder.parent / "down").touch()
    told = f"{LINES} did not get everything; `cusearch runs track .* --tracker {LINES}` sends it"
    with pytest.raises(TrackerFailed, match=told):
        send(config)


def tracks(config: Config, *words: str) -> list[str]:
    """The command."""
    save_config(config, config.folder / "config.toml")
    return [sys.executable, "-m", "cusearch_async.cli.main", "runs", "track", str(config.folder), "--trust", *words]


def test_a_kill_sends_no_more_than_some_rows_again(config):
    for number in range(60):
        step(config, number)
    (config.folder.parent / "killed").write_text("55")
    done = subprocess.run(tracks(config), check=False, timeout=60 * SLOW, env=ENVIRONMENT)
    assert done.returncode == 9
    kept = json.loads((config.folder / "tracked" / f"{LINES.replace(':', '-')}.json").read_text())
    assert kept["metrics.jsonl"] == [1, 49]


def test_only_one_process_tracks_a_run(config):
    (config.folder / "tracked").mkdir()
    with (
        run_folder.locked(config.folder / "tracked" / "lock", 2, "held"),
        pytest.raises(RunInUse, match="tracks the run"),
    ):
        send(config)


def test_with_an_evaluator_it_waits_for_the_last_score(config):
    record_start(config, epoch=1, step=0)
    step(config, 3)
    finish(config)
    with followed(config, last_scored=4) as sender:
        wait_until(lambda: steps(config) == [3], 20)
        score(config, 2)
        wait_until(lambda: arrived(config)[-1][0] == 2, 20)
        assert sender.is_alive()
        score(config, 4)
        sender.join(20 * SLOW)
    assert arrived(config)[-2][0] == 4


def test_a_process_that_is_asked_to_stop_sends_what_is_there(config, tmp_path):
    save_config(config, config.folder / "config.toml")
    step(config, 0)
    command = [
        sys.executable,
        "-m",
        "cusearch_async.cli.main",
        "runs",
        "track",
        str(config.folder),
        "--follow",
        "--trust",
    ]
    process = start_child(command, ENVIRONMENT, tmp_path / "log")
    try:
        wait_until(lambda: steps(config) == [0], 30)
        step(config, 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
    assert [row[0] for row in arrived(config)] == ["opened", 0, 1, "closed"]


def test_a_tracker_that_hangs_does_not_have_everything(config, monkeypatch):
    """Stopped, the command ended with status 0, and no word of the rows that were not sent."""
    monkeypatch.setattr(tracking, "END_S", 0.1)
    step(config, 0)
    step(config, 1)
    (config.folder.parent / "hangs").write_text("1")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    asks = threading.Thread(
        target=lambda: (wait_until(lambda: steps(config) == [0], 20), signal.raise_signal(signal.SIGTERM))
    )
    asks.start()
    try:
        with pytest.raises(TrackerFailed, match="did not get everything"):
            tracking.track(config.folder, config.model_dump(mode="json"), [LINES], follow=True)
    finally:
        asks.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("wand", "run.trackers 'wand' is unknown; use one of wandb, trackio, mlflow, or your own as"),
        ("tests.metrics.own_trackers:not_a_tracker", "must be a subclass of"),
    ],
)
def test_what_is_no_tracker_is_named(config, name, why):
    with pytest.raises(ConfigError, match=why):
        send(config, name=name)


# --- the real ones, without a network -----------------------------------------------------------------

OFFLINE = {
    "wandb": {"WANDB_MODE": "offline"},
    "trackio": {"TRACKIO_DIR": "{folder}/trackio"},
    "mlflow": {"MLFLOW_TRACKING_URI": "file:{folder}/mlflow", "MLFLOW_ALLOW_FILE_STORE": "true"},
}


def tracked_by(name: str, config: Config, folder: Path) -> None:
    """The process itself, twice, as a launch and its continuation start it."""
    options = {key: value.format(folder=folder) for key, value in OFFLINE[name].items()}
    record_start(config, epoch=1, step=0)
    for number in range(2):
        step(config, 2 * number)
        step(config, 2 * number + 1)
        score(config, 2 * number + 2)
        finish(config)
        process = start_child(tracks(config, "--tracker", name), ENVIRONMENT | options, folder / "log")
        try:
            assert process.wait(100) == 0, (folder / "log").read_text()
        finally:
            process.kill()
    assert "failed" not in (folder / "log").read_text()


@pytest.mark.system
def test_wandb_keeps_a_run_offline(config, tmp_path):
    tracked_by("wandb", config, tmp_path)
    kept = sorted(
        config.folder.glob(f"tracked/wandb/offline-run-*/run-{(config.folder / 'tracked' / 'id').read_text()}.wandb")
    )
    assert len(kept) == 2, "W&B joins them by their id when they are synced"
    for name in (b"reward/em", b"depth/generated/1", b"eval/musique, 2 hops/em", b"max_staleness", b"short"):
        assert name in kept[0].read_bytes()
    assert b"reward/em" in kept[1].read_bytes()


@pytest.mark.system
def test_trackio_keeps_a_run(config, tmp_path):
    tracked_by("trackio", config, tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "cusearch.db")) as kept:
        found = kept.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    rows = [json.loads(metrics) for _, _, metrics in found]
    assert {name for name, _, _ in found} == {f"atlas-{(config.folder / 'tracked' / 'id').read_text()[:8]}"}
    assert [row["reward/em"] for row in rows if "reward/em" in row] == [0, 0.25, 0.5, 0.75]
    assert [row["eval/all/em"] for row in rows if "eval/all/em" in row] == [0.5, 0.5]


@pytest.mark.system
def test_mlflow_keeps_a_run(config, tmp_path, monkeypatch):
    tracked_by("mlflow", config, tmp_path)
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(f"file:{tmp_path}/mlflow")
    (run,) = client.search_runs([client.get_experiment_by_name("cusearch").experiment_id])
    assert run.info.run_name == "atlas"
    assert run.info.status == "FINISHED"
    assert {"short", "lr_1e-6"} <= run.data.tags.keys(), "a tag that MLflow refuses ended the tracker"
    assert run.data.params["pool.max_staleness"] == "2"
    history = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "reward/em")}
    assert history == {0: 0.0, 1: 0.25, 2: 0.5, 3: 0.75}
    assert client.get_metric_history(run.info.run_id, "eval/musique_ 2 hops/em")


def test_mlflow_gets_the_settings_that_an_outage_kept_from_it(config, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    for key, value in OFFLINE["mlflow"].items():
        monkeypatch.setenv(key, value.format(folder=tmp_path))
    run = trackers.TrackedRun("id", "atlas", tmp_path, config.model_dump(mode="json"))
    send_some, calls = mlflow.MlflowClient.log_batch, itertools.count()

    def down_at_the_second(client, *given, **named):
        if next(calls) == 1:
            raise ConnectionError("down")
        send_some(client, *given, **named)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", down_at_the_second)
    with pytest.raises(ConnectionError):
        trackers.MLflow(run)
    trackers.MLflow(run)
    client = mlflow.MlflowClient()
    (kept,) = client.search_runs([client.get_experiment_by_name("cusearch").experiment_id])
    assert kept.data.params.keys() == {key for key, _ in trackers.flat(run.settings)}
