"""A learner whose ranks a launcher starts: torchrun, which also starts them again, and DeepSpeed's own."""

from __future__ import annotations

import base64
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import SLOW, free_port, wait_until
from tests.system.test_crashes import ATLAS, STEPS, Lives, finish

pytestmark = pytest.mark.system

LEARNER = [str(Path(sys.executable).with_name("cusearch")), "worker", "learner", str(ATLAS)]
POOL = 8
"""Trajectories of a pool of `Lives`."""


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    lives = Lives(tmp_path)
    yield lives
    lives.end()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(command: list[str], **env: str) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | env
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=environment,
            stdout=(tmp_path / f"log{len(started)}").open("w"),
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for one in (*left, process):
            one.kill()
        process.wait()


def rank_of(launcher: subprocess.Popen[str], rank: int) -> psutil.Process:
    ranks = {p.environ().get("RANK"): p for p in psutil.Process(launcher.pid).children(recursive=True)}
    return ranks[str(rank)]


def ended(process: subprocess.Popen[str], log: Path) -> str:
    """What it said. It has ended with status 0."""
    wait_until(lambda: process.poll() is not None, 240)
    said = log.read_text()
    assert process.returncode == 0, said
    return said


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_go_on_from_the_checkpoint(lives: Lives, start, tmp_path: Path):
    """Torchrun's store is the same: before, they hung there on what the ranks before had written."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1", "--no-python"]
    launcher = start([*torchrun, *LEARNER, *lives.overrides])
    lives.feed(2, 2 * POOL)
    checkpoints = lives.folder / "checkpoints"
    wait_until((checkpoints / "step000002-e1" / "state.json").exists, 240)
    rank_of(launcher, 0).send_signal(signal.SIGKILL)
    wait_until(lambda: (lives.folder / "starts" / "0002.json").exists() or launcher.poll() is not None, 240)
    lives.feed(STEPS - 2, (STEPS - 2) * POOL)
    said = ended(launcher, tmp_path / "log0")
    assert "resuming from step 2 (checkpoint" in said
    state = json.loads((checkpoints / "step000004-e2" / "state.json").read_text())["state"]
    assert (state["step"], state["ranks"]) == (STEPS, 2), "the number comes from WORLD_SIZE"
    assert lives.ledger()["trained"] == STEPS * 4


def test_a_signal_to_another_rank_stops_the_run_with_a_checkpoint_and_no_rank_ends_as_if_it_were_finished(
    lives: Lives, start, tmp_path: Path
):
    """A node that is drained: its ranks ignored that, and were killed after an hour; and where rank 0 was stopped the
    others ended with status 0, so that torchrun, and Kubernetes, took their work for done."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ["cusearch_async.cli.main", *LEARNER[1:], *lives.overrides]
    ranks = [start(command, **shared, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    lives.feed(1, POOL)
    wait_until(lambda: lives.ledger().get("trained") == 4 or ranks[0].poll() is not None, 240)
    ranks[1].send_signal(signal.SIGTERM)
    for rank in ranks:
        wait_until(lambda rank=rank: rank.poll() is not None, 120)
    said = (tmp_path / "log0").read_text()
    assert "stopping: another rank was asked to" in said
    assert "stopped at step 1; checkpoint saved" in said
    assert [rank.returncode for rank in ranks] == [143, 143]


@pytest.mark.slow
def test_deepspeeds_launcher_starts_the_learner(lives: Lives, start, tmp_path: Path):
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    launch = ["deepspeed.launcher.launch", f"--world_info={world}", f"--master_port={free_port()}"]
    launch += ["--no_python", "--no_local_rank"]
    settings = dict(zip(lives.overrides[::2], lives.overrides[1::2], strict=True)) | {"--run.steps": "1"}
    launcher = start([*launch, *LEARNER, *itertools.chain(*settings.items())])
    lives.feed(1, POOL)
    ended(launcher, tmp_path / "log0")
    state = json.loads((lives.folder / "checkpoints" / "step000001-e1" / "state.json").read_text())["state"]
    assert state["ranks"] == 2


def test_another_number_of_ranks_than_the_launchers_is_refused_in_one_line(lives: Lives):
    command = [*LEARNER, *lives.overrides, "--learner.ranks", "3"]
    env = os.environ | {"WORLD_SIZE": "2", "RANK": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120 * SLOW, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "learner: learner.ranks = 3, but WORLD_SIZE is 2; set both to the same number, or leave learner.ranks out"
    )


def test_a_run_goes_on_with_other_ranks_and_another_zero_stage(lives: Lives):
    """The whole learner, from its own checkpoint; tests/system/test_divided_state.py compares the numbers."""
    first = lives.start("after checkpoint", 1, "--learner.zero_stage", "3")
    lives.feed()
    finish(first, -signal.SIGKILL)
    command = [*LEARNER, *lives.overrides, "--learner.ranks", "2", "--learner.zero_stage", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240 * SLOW, check=False)
    assert done.returncode == 0, done.stderr
    assert "was saved by 1 ranks, ZeRO-3; resharding the optimizer state to 2 ranks, ZeRO-1" in done.stderr
    assert (lives.folder / "checkpoints" / "step000004-e2").exists()
