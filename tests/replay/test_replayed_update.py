"""An update that is made again is compared with what its own run has kept of it, or refused."""

from __future__ import annotations

import shutil

import pytest
import torch

from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError
from cusearch_async.files import append_row
from cusearch_async.replay.selection import RecordedStep
from cusearch_async.replay.update import replay_update
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import record_start
from cusearch_async.training.recorder import Recorder
from cusearch_async.training.selector import Selector, initial_method_state
from cusearch_async.types import Pool
from cusearch_async.weights.folder import WeightStore
from cusearch_async.weights.interface import Canary
from tests.strategies import make_trajectory
from tests.training.learners import QUESTIONS, Learner

SMALL = ("--pool.questions", "2", "--pool.rollouts", "2", "--method.budget", "2", "--loss.minibatch", "2")


@pytest.fixture
async def run(atlas_config, tmp_path):
    """A run whose learner of epoch 2 has made step 0. The learner of the tests makes weights of 1 and a loss of 0.5."""
    config = load_config(atlas_config, [*SMALL, "--run.folder", str(tmp_path / "run")])
    run_folder.mark(config.folder, config.run.name)
    record_start(config, 2, 0)
    pool = Pool(0, tuple(make_trajectory(i // 2, i % 2, depth=i, reward=i / 4) for i in range(4)))
    async with Recorder(config.folder, config.run.records_mib, 2) as recorder:
        recorder.write(
            Selector(config, QUESTIONS, initial_method_state(config.method, config.episode.s_max)).choose(pool)
        )
        await recorder.finish()
    return config


def publish(folder, value, epoch=2):
    WeightStore(folder / "weights").publish(1, epoch, {"w": torch.full((2,), float(value))}, Canary([1], [], 0.1))


def replay(folder):
    return replay_update(RecordedStep.read(folder, 0), folder, None, Learner([]))


async def test_metrics_and_weights_are_compared_bit_for_bit(run):
    append_row(run.folder / "metrics.jsonl", {"step": 0, "epoch": 2, "train/loss": 0.5})
    publish(run.folder, 1)
    found = replay(run.folder)
    assert (found.is_same, found.metrics, found.differing_tensors) == (True, {"train/loss": (0.5, 0.5)}, [])


async def test_an_update_that_cannot_be_verified_is_refused(run):
    """Also where another learner, which the run did not go on from, has left a row and weights of that step."""
    with pytest.raises(ConfigError, match=r"cannot be verified: no metrics row from epoch 2 .* version 1 is not kept"):
        replay(run.folder)
    append_row(run.folder / "metrics.jsonl", {"step": 0, "epoch": 1, "train/loss": 0.5})
    publish(run.folder, 1, epoch=1)
    with pytest.raises(ConfigError, match="cannot be verified"):
        replay(run.folder)


async def test_the_weights_are_those_of_the_folder_that_is_given(run, tmp_path):
    """Another run has the folder's earlier name meanwhile."""
    publish(run.folder, 1)
    moved = tmp_path / "moved"
    run.folder.rename(moved)
    publish(run.folder, 7)
    assert replay(moved).differing_tensors == []
    shutil.rmtree(moved / "weights")
    publish(moved, 3)
    assert replay(moved).differing_tensors == ["w"]


async def test_weights_in_a_folder_of_their_own_are_found_there(run, tmp_path):
    settings = run.folder / "starts" / "0002.toml"
    settings.write_text(settings.read_text().replace("[weights]", f'[weights]\nfolder = "{tmp_path / "shm"}"'))
    publish(tmp_path / "shm", 1)
    publish(run.folder, 7)
    assert replay(run.folder).differing_tensors == []
