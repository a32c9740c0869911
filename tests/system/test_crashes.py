"""A learner that dies at any point goes on as if it had not: bit for bit, and with a ledger that closes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import torch
from safetensors.torch import load_file

from cusearch_async import host
from cusearch_async.config import load_config
from cusearch_async.transport.server import is_listening, server_command
from tests.conftest import SLOW, wait_until
from tests.system.learner_crashes import POINTS, feed

pytestmark = pytest.mark.system

ATLAS = Path(__file__).parents[2] / "configs" / "atlas.toml"
STEPS = 4
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
}


class Lives:
    """The lives of one learner on a Redis of its own, fed with the same pools."""

    def __init__(self, folder: Path) -> None:
        self.port = host.free_port()
        url = f"redis://127.0.0.1:{self.port}/0"
        self.folder = folder / "run"
        settings = SETTINGS | {"run.folder": self.folder, "redis.url": url}
        self.overrides = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        self.server = host.start_child(server_command(url, folder / "redis", None), log_file=folder / "redis.log")
        wait_until(lambda: is_listening(url), 20)

    def start(self, point: str, step: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.system.learner_crashes", point, str(step), str(ATLAS), *self.overrides]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)

    def feed(self) -> None:
        asyncio.run(feed(load_config(ATLAS, self.overrides), STEPS))

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


def finish(process: subprocess.Popen[str], status: int) -> str:
    output, _ = process.communicate(timeout=120 * SLOW)
    assert process.returncode == status, output
    return output


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    lives = Lives(tmp_path_factory.mktemp("uninterrupted"))
    try:
        learner = lives.start("none", 0)
        lives.feed()
        finish(learner, 0)
        return lives.weights()
    finally:
        lives.end()


@pytest.mark.parametrize("point", POINTS)
def test_a_learner_that_is_killed_anywhere_ends_with_the_same_weights_bit_for_bit(
    lives: Lives, uninterrupted: dict[str, torch.Tensor], point: str
):
    """It dies in step 3, the last; the checkpoint is of step 2, or of the dying step where that one is complete."""
    first = lives.start(point, 3)
    lives.feed()
    finish(first, -signal.SIGKILL)
    assert [path.name for path in (lives.folder / "checkpoints").glob("step*")] != []
    finish(lives.start("none", 0), 0)
    weights = lives.weights()
    assert weights.keys() == uninterrupted.keys()
    assert all(torch.equal(weights[name], uninterrupted[name]) for name in weights)
    ledger = lives.ledger()
    assert ledger["finished"] == ledger["buffered"] + ledger["trained"] + ledger["unselected"]
    assert ledger["claimed"] == 0
    assert (ledger["trained"], ledger["unselected"]) == (STEPS * 4, STEPS * 4)


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
    assert "step000004-e1 is torn (model/model.safetensors); it is skipped" in output
    assert all(torch.equal(tensor, uninterrupted[name]) for name, tensor in lives.weights().items())


def test_the_newer_of_two_learners_wins_and_the_older_ends_by_name(lives: Lives):
    older = lives.start("none", 0)
    client = redis.Redis(port=lives.port, decode_responses=True)
    wait_until(lambda: client.hget("cusearch:{atlas}:state", "epoch") == "1", 60)
    newer = lives.start("none", 0)
    output = finish(older, 1)
    assert re.search(r"taken over run 'atlas'; this one stops \(it is epoch 2 on \S+, process \d+\)", output)
    lives.feed()
    finish(newer, 0)
    assert client.hget("cusearch:{atlas}:state", "epoch") == "2"
