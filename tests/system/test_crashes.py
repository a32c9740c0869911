"""A learner that dies at any point goes on as if it had not: bit for bit, and with a ledger that closes."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis
import torch
from safetensors.torch import load_file

from cusearch_async.cli import reset
from cusearch_async.config import load_config
from cusearch_async.errors import RunInUse
from cusearch_async.lifecycle.children import start_child
from cusearch_async.metrics.files import read_metrics
from cusearch_async.run.history import read_starts, read_stop
from cusearch_async.run.identity import DATA
from cusearch_async.transport.server import is_listening, server_command
from tests.conftest import SLOW, free_port, wait_until
from tests.system.forked import Forked
from tests.system.learner_crashes import POINTS, feed

pytestmark = pytest.mark.system

ATLAS = Path(__file__).parents[2] / "configs" / "atlas.toml"
STEPS = 4
EVERY_TIME = {"after claim", "mid-update, publishing", "after commit", "mid-publish", "mid-checkpoint"}
SETTINGS = {
    "run.steps": STEPS,
    "pool.questions": 4,
    "pool.rollouts": 2,
    "pool.max_staleness": STEPS,
    "method.budget": 4,
    "loss.minibatch": 2,
    "learner.lr": 1e-4,
    "learner.checkpoint_every": 2,
    "redis.lease_s": 600,
    "environment.search.name": "tests.environments.echo:Echo",  # there is no retriever
}


class Lives:
    """The lives of one learner on a Redis of its own, fed with the same pools."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._started = 0
        url = f"redis://127.0.0.1:{self.port}/0"
        self.folder = folder / "run"
        settings = SETTINGS | {"run.folder": self.folder, "redis.url": url}
        self.overrides = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        self.server = start_child(server_command(url, folder / "redis", None), log_file=folder / "redis.log")
        wait_until(lambda: is_listening(url), 20)

    def start(self, point: str, step: int, *overrides: str) -> Forked:
        self._started += 1
        script = ["tests.system.learner_crashes", point, str(step)]
        log = self.folder.parent / f"life-{self._started}.log"
        return Forked([*script, str(ATLAS), *self.overrides, *overrides], log, {})

    def feed(self, steps: int = STEPS, most: int = 10_000) -> None:
        asyncio.run(feed(load_config(ATLAS, self.overrides), steps, most))

    def weights(self) -> dict[str, torch.Tensor]:
        newest = max((self.folder / "checkpoints").glob(f"step{STEPS:06d}-e*"))
        return load_file(newest / "model" / "model.safetensors")

    def ledger(self) -> dict[str, int]:
        client = redis.Redis(port=self.port, decode_responses=True)
        return {name: int(count) for name, count in client.hgetall("cusearch:{atlas}:ledger").items()}

    def end(self) -> None:
        self.server.kill()
        self.server.wait()


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    lives = Lives(tmp_path)
    yield lives
    lives.end()


def finish(process: Forked, status: int) -> str:
    output, _ = process.communicate(timeout=120 * SLOW)
    assert process.returncode == status, output
    return output


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    """Its learner was not interrupted."""
    lives = Lives(tmp_path_factory.mktemp("uninterrupted"))
    try:
        learner = lives.start("none", 0)
        lives.feed()
        finish(learner, 0)
    finally:
        lives.end()
    return lives


@pytest.fixture(scope="module")
def uninterrupted(whole_run: Lives) -> dict[str, torch.Tensor]:
    return whole_run.weights()


def replay(folder: Path, step: int, log: Path) -> tuple[int, str]:
    """Exit status and output of `cusearch replay --update`."""
    process = Forked(
        ["cusearch_async.cli.main", "replay", str(folder), "--step", str(step), "--update", "--trust"], log, {}
    )
    output, _ = process.communicate(timeout=120 * SLOW)
    return process.returncode, output


@pytest.mark.parametrize(("step", "weights"), [(0, "version 1 is not kept"), (2, "the weights are identical")])
def test_a_recorded_update_is_made_again_bit_for_bit(whole_run: Lives, tmp_path: Path, step: int, weights: str) -> None:
    status, output = replay(whole_run.folder, step, tmp_path / "replay.log")
    assert status == 0, output
    stop = read_stop(whole_run.folder, 1)
    assert stop is not None
    assert (stop.step, stop.outcome) == (STEPS, "finished")
    assert "the selection and its advantages are identical, bit for bit" in output
    found = re.search(rf"update: (\d+) of (\d+) metrics are identical; {weights}", output)
    assert found, output
    assert int(found[1]) == int(found[2]) > 20


def test_an_update_that_is_another_one_is_told(whole_run: Lives, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(whole_run.folder, copy)
    settings = copy / "starts" / "0001.toml"
    settings.write_text(settings.read_text().replace("lr = 0.0001", "lr = 0.0002"))
    status, output = replay(copy, 2, tmp_path / "replay.log")
    assert status == 1
    assert "the update of step 2 is not what it was: train/" in output
    assert "computing." not in output, "it has the threads, ranks and device that its learner had"
    status, output = replay(copy, 1, tmp_path / "replay.log")
    assert status == 1
    assert "the update of step 1 needs the checkpoint of that step" in output


@pytest.mark.parametrize(
    "point", [point if point in EVERY_TIME else pytest.param(point, marks=pytest.mark.slow) for point in POINTS]
)
def test_a_learner_that_is_killed_anywhere_ends_with_the_same_weights_bit_for_bit(
    lives: Lives, uninterrupted: dict[str, torch.Tensor], point: str
):
    """It dies in step 3, the last. There is a checkpoint of step 2 or later, because the one of step 3 is only begun
    when that is complete; or, where the first one is never written, none."""
    every = "2" if point == "mid-update, saving" else "1"
    first = lives.start(point, 3, "--learner.checkpoint_every", every)
    lives.feed()
    finish(first, -signal.SIGKILL)
    complete = {int(path.name[4:10]) for path in (lives.folder / "checkpoints").glob("step*")}
    assert complete & {2, 3, 4} if every == "1" else not complete
    finish(lives.start("none", 0), 0)
    weights = lives.weights()
    assert weights.keys() == uninterrupted.keys()
    assert all(torch.equal(weights[name], uninterrupted[name]) for name in weights)
    ledger = lives.ledger()
    assert ledger["finished"] == ledger["buffered"] + ledger["trained"] + ledger["unselected"]
    assert ledger["claimed"] == 0
    assert (ledger["trained"], ledger["unselected"]) == (STEPS * 4, STEPS * 4)
    assert [row["step"] for row in read_metrics(lives.folder / "metrics.jsonl")] == [*range(STEPS)]


def test_a_torn_checkpoint_is_skipped_and_the_run_goes_on_from_the_one_before(
    lives: Lives, uninterrupted: dict[str, torch.Tensor]
):
    learner = lives.start("none", 0)
    lives.feed()
    finish(learner, 0)
    torn = lives.folder / "checkpoints" / "step000004-e1" / "model" / "model.safetensors"
    content = bytearray(torn.read_bytes())
    content[-100] ^= 1
    torn.write_bytes(content)
    output = finish(lives.start("none", 0), 0)
    assert "step000004-e1 is damaged (model/model.safetensors); it is skipped" in output
    assert all(torch.equal(tensor, uninterrupted[name]) for name, tensor in lives.weights().items())


def test_a_second_run_of_the_same_name_takes_nothing_from_the_first(lives: Lives, tmp_path: Path):
    first = lives.start("none", 0)
    client = redis.Redis(port=lives.port, decode_responses=True)
    wait_until(lambda: client.hget("cusearch:{atlas}:state", "epoch") == "1", 60)
    second = lives.start("none", 0, "--run.folder", str(tmp_path / "other"), "--learner.lr", "1e-5")
    output = finish(second, 1)
    places = rf"run\.folder is {tmp_path}/other on \S+ here and {lives.folder} on \S+ in the run; use the"
    assert re.search(rf"does not match run 'atlas': {places}", output)
    lives.feed()
    finish(first, 0)
    assert client.hget("cusearch:{atlas}:state", "epoch") == "1"


def test_a_living_learners_folder_is_kept_though_its_redis_is_down(lives: Lives):
    learner = lives.start("none", 0)
    client = redis.Redis(port=lives.port, decode_responses=True)
    wait_until(lambda: client.hget("cusearch:{atlas}:state", "epoch") == "1", 60)
    (lives.folder / "redis").mkdir()  # as if its Redis were the run's own
    lives.end()
    arguments = Namespace(config=ATLAS, yes=True)
    with pytest.raises(RunInUse, match="a learner runs in it; stop that first"):
        reset.run(arguments, lives.overrides)
    learner.send_signal(signal.SIGKILL)
    learner.communicate(60)
    reset.run(arguments, lives.overrides)
    assert not lives.folder.exists()


def test_the_newer_of_two_learners_wins_and_the_older_ends_by_name(lives: Lives):
    older = lives.start("none", 0)
    client = redis.Redis(port=lives.port, decode_responses=True)
    wait_until(lambda: client.hget("cusearch:{atlas}:state", "epoch") == "1", 60)
    newer = lives.start("none", 0)
    output = finish(older, 1)
    assert re.search(r"taken over run 'atlas'; this one stops \(it is epoch 2 on \S+, process \d+\)", output)
    lives.feed()
    output = finish(newer, 0)
    assert re.search(r"epoch 2 takes over from a learner that may be alive \(epoch 1 on \S+, process \d+, last", output)
    assert client.hget("cusearch:{atlas}:state", "epoch") == "2"


def same(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_learner_that_wakes_between_its_last_question_and_the_renaming_harms_nothing(
    lives: Lives, uninterrupted: dict[str, torch.Tensor]
):
    """Its successor has finished the same checkpoint meanwhile, and it is the only one that is kept."""
    keep = ("--learner.keep_checkpoints", "1")
    sleeper = lives.start("frozen", 3, *keep)
    lives.feed()
    wait_until(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_STOPPED, 120)
    output = finish(lives.start("none", 0, *keep), 0)
    assert "resuming from step 2 (checkpoint" in output
    os.kill(sleeper.pid, signal.SIGCONT)
    output = finish(sleeper, 1)
    assert output.splitlines()[-1].startswith("learner: another learner has taken over run 'atlas'; this one stops")
    assert [path.name for path in (lives.folder / "checkpoints").iterdir()] == ["step000004-e2"]
    assert [row["step"] for row in read_metrics(lives.folder / "metrics.jsonl")] == list(range(STEPS))
    output = finish(lives.start("none", 0, *keep), 0)
    assert "resuming from step 4 (checkpoint" in output
    assert same(lives.weights(), uninterrupted)


def test_a_learner_that_is_asked_to_stop_finishes_its_step_and_saves(
    lives: Lives, uninterrupted: dict[str, torch.Tensor]
):
    seldom = ("--learner.checkpoint_every", "100")
    stopped = lives.start("asked", 1, *seldom)
    lives.feed()
    output = finish(stopped, 0)
    assert "no checkpoint, starting at step 0" in output
    assert "waiting for the pool of step 0: " in output
    assert "stopped at step 2; checkpoint saved" in output
    output = finish(lives.start("none", 0), 0)
    assert "since the last start: learner.checkpoint_every: 100 -> 2" in output
    assert f"resuming from step 2 (checkpoint {lives.folder}/checkpoints/step000002-e1)" in output
    assert "finished at step 4; checkpoint saved" in output
    assert same(lives.weights(), uninterrupted)
    first, second = read_starts(lives.folder)
    assert first.contract == second.contract
    settings = lives.folder / "starts" / "0002.json"
    settings.write_text(settings.read_text().replace(f'"{DATA}": "', f'"{DATA}": "1'))
    output = finish(lives.start("none", 0), 1)
    known = first.contract[DATA]
    assert f"does not match run 'atlas': {DATA} is {known} here and 1{known} in the run; use the" in output


def test_a_disk_that_takes_no_more_ends_the_learner_in_one_line_and_the_run_goes_on(
    lives: Lives, uninterrupted: dict[str, torch.Tensor]
):
    first = lives.start("full", 0)
    lives.feed()
    output = finish(first, 1)
    # weights and checkpoint are written at the same time; either of them may be the first that does not fit
    unfinished = rf"{lives.folder}/(checkpoints/\.unfinished-step000002|weights/\.unfinished-v00000[23])-e1"
    assert re.match(f"learner: cannot write {unfinished}: .*File too large", output.splitlines()[-1]), output
    assert "Traceback" not in output
    assert list((lives.folder / "checkpoints").glob("step*")) == []
    finish(lives.start("none", 0), 0)
    assert same(lives.weights(), uninterrupted)
    assert not any((lives.folder / "checkpoints").glob(".unfinished*")), "what is left of it is cleared away"
    assert read_starts(lives.folder)[-1].epoch == 2


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_ends_the_learner(lives: Lives):
    """In a paused run, where nothing else moves and nothing has to."""
    settings = [*lives.overrides, "--learner.ranks", "2", "--run.stall_s", "6"]
    command = [sys.executable, "-m", "workers.learner", str(ATLAS), *settings]
    learner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    client = redis.Redis(port=lives.port, decode_responses=True)
    client.hset("cusearch:{atlas}:state", "paused", 1)
    wait_until(lambda: client.hget("cusearch:{atlas}:state", "published") == "0", 120)
    [hung] = [
        p
        for p in psutil.Process(learner.pid).children(recursive=True)
        if "workers.learner" in " ".join(p.cmdline()) or "worker learner" in " ".join(p.cmdline())
    ]
    hung.suspend()
    output = finish(learner, 1)
    assert "rank 1 has not reported for 3 s or more in step 0" in output
    assert "rank 1 has not reported for 6 s (run.stall_s) in step 0; the learner ends" in output
