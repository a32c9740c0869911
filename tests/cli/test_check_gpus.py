"""`cusearch check`: who has which GPU. Nothing is there: `count_gpus` is told how many CUDA finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from cusearch_async.cli.preflight import gpus, memory
from cusearch_async.cli.preflight.finding import Finding
from cusearch_async.config import load_config

BASE, ONE = Path("paper/base"), Path("one-gpu-80gb")
SEVEN_AND_ONE = (
    *("--learner.gpus", "[7]", "--rollout.gpus", "[0, 1, 2, 3, 4, 5, 6]", "--rollout.workers", "7"),
    *("--eval.every", "10"),
)


@pytest.fixture
def found(monkeypatch):
    """The finding about who has which GPU, on a machine with so many."""

    def find(there: int, *overrides: str, path: Path) -> Finding:
        monkeypatch.setattr(gpus, "count_gpus", lambda: there)
        return gpus.named_gpus(load_config(path, overrides))

    return find


@pytest.fixture
def minimal(tmp_path):
    path = tmp_path / "minimal.toml"
    path.write_text('[run]\nname = "minimal"', encoding="utf-8")
    return path


def test_what_is_not_named_is_shown_as_launch_divides_it(found, minimal):
    assert found(2, path=minimal) == Finding("ok", "GPUs", "learner [1], rollout [0]")
    all_used = ("--learner.ranks", "2", "--rollout.workers", "5", "--eval.every", "10")
    assert found(8, *all_used, path=minimal).text == "learner [6, 7], rollout [0, 1, 2, 3, 4], evaluator [5]"
    assert found(8, "--rollout.gpus", "[]", path=BASE).text == "learner [4, 5, 6, 7], rollout [0, 1, 2, 3]"
    assert found(0, path=minimal).text == "not set: learner gets the last GPUs, then evaluator, workers the rest"


def test_gpus_that_nobody_uses_are_a_warning(found, minimal):
    """Six of eight were left idle, and the check said that the workers had the rest."""
    text = "learner [7], rollout [0]; 6 of 8 GPUs are not used: rollout.workers, learner.ranks"
    assert found(8, path=minimal) == Finding("warning", "GPUs", text)
    encodes = ("--retriever.backend", "dense", "--retriever.dense.device", "cuda:2")
    assert "5 of 8 GPUs are not used" in found(8, *encodes, path=minimal).text
    assert found(8, path=ONE).status == "ok", "who names them all may leave some to others"


@pytest.mark.parametrize(
    ("there", "overrides", "said"),
    [
        (1, (), "1 GPUs (on this machine) are too few for 1 of the learner and 1 for each engine (1 for rollout.w"),
        (8, ("--rollout.workers", "8"), "8 GPUs (on this machine) are too few"),
        (0, ("--learner.gpus", "[1]", "--rollout.gpus", "[0]", "--eval.every", "10"), "2 GPUs (no more are named) are"),
    ],
)
def test_too_few_for_launch_are_a_warning(found, minimal, there, overrides, said):
    finding = found(there, *overrides, path=minimal)
    assert (finding.status, said in finding.text) == ("warning", True), finding.text


@pytest.mark.parametrize("there", [0, 8])
def test_an_evaluator_that_gets_the_learners_gpu_takes_its_share_of_it(found, there):
    """It was said to take some of those that the others leave, which were none, and its memory was not counted."""
    finding = found(there, *SEVEN_AND_ONE, path=ONE)
    assert finding.status == "ok"
    assert finding.text.endswith("evaluator [7]; 7 shared, 50% for the engine")
    assert memory.learner_room(load_config(ONE, SEVEN_AND_ONE), 80 << 30) == 40 << 30
    assert memory.learner_room(load_config(ONE, SEVEN_AND_ONE[:-2]), 80 << 30) == 80 << 30
    alone = found(there, *SEVEN_AND_ONE, "--eval.gpus", "[8]", path=ONE)
    assert (alone.status, alone.text[-13:]) == ("ok", "evaluator [8]")
    named = found(there, *SEVEN_AND_ONE, "--eval.gpus", "[7]", path=ONE)
    assert named.text == finding.text


def test_visible_gpus_are_counted_from_0(monkeypatch):
    monkeypatch.setattr(gpus, "count_gpus", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    (finding,) = gpus.gpus_here(load_config(BASE, ["--rollout.gpus", "[0, 1, 2, 3]"]))
    assert finding.text.startswith("2, 3, 4, 5, 6, 7 of learner.gpus")
    assert finding.text.endswith("2 GPUs on this machine, which are counted from 0 (CUDA_VISIBLE_DEVICES=4,5)")
