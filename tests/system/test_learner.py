"""The learner on DeepSpeed: resuming is bit-identical, and how a batch is divided does not matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cusearch_async import host
from cusearch_async.config import STARTER

pytestmark = pytest.mark.system

SETTINGS = ("--loss.minibatch", "4", "--method.budget", "8", "--learner.lr", "1e-3")


def train(
    folder: Path, name: str, *arguments: str, ranks: int = 1, settings: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """Run learner_script.py; returns the weights it ends with."""
    script = [sys.executable, "-m", "tests.system.learner_script", str(folder), name, *arguments]
    command = [*script, *SETTINGS, "--learner.ranks", str(ranks), *settings]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(host.free_port())}
    running = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in running:
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output
    return load_file(folder / f"weights-{name}.safetensors")


def test_a_resumed_learner_makes_the_same_updates_bit_for_bit(tmp_path):
    whole = train(tmp_path, "whole", "--to-step", "4")
    train(tmp_path, "first", "--to-step", "2", "--save", str(tmp_path / "checkpoint"))
    resumed = train(tmp_path, "resumed", "--from-step", "2", "--to-step", "4", "--load", str(tmp_path / "checkpoint"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """One rank, whole mini-batches: the update that every division must reproduce, and its report."""
    folder = tmp_path_factory.mktemp("plain")
    weights = train(folder, "plain")
    return weights, json.loads((folder / "report-plain.json").read_text())


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, ("--learner.micro_batch_tokens", "1")),
        (1, ("--learner.zero_stage", "0")),
        (2, ("--learner.zero_stage", "0")),
        (2, ("--learner.zero_stage", "1")),
        (2, ("--learner.zero_stage", "2", "--learner.micro_batch_tokens", "64")),
        (2, ("--learner.zero_stage", "3")),
    ],
)
def test_the_update_does_not_depend_on_how_the_batch_is_divided(tmp_path, plain, ranks, settings):
    weights, report = plain
    divided = train(tmp_path, "divided", ranks=ranks, settings=settings)
    divided_report = json.loads((tmp_path / "report-divided.json").read_text())
    start = load_file(STARTER / "model.safetensors")
    moved = torch.cat([(weights[name] - start[name].float()).flatten() for name in weights])
    moved_divided = torch.cat([(divided[name] - start[name].float()).flatten() for name in weights])
    assert moved.norm() > 0.1
    # Adam divides by the gradient's size, so rounding shows only where the gradient is next to nothing.
    assert (moved - moved_divided).norm() < 5e-3 * moved.norm()
    for name in report.keys() & divided_report.keys():
        assert divided_report[name] == pytest.approx(report[name], rel=2e-3, abs=1e-5), name
    if "--learner.zero_stage" not in settings or settings[1] != "0":
        assert divided_report["train/grad_norm"] == pytest.approx(report["train/grad_norm"], rel=1e-3)
