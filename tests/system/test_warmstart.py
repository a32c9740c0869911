"""A warm start: its gradient is that of cross-entropy, it learns, and a killed one continues bit for bit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from cusearch_async.atlas.questions import WORLDS, chains
from cusearch_async.config import STARTER
from cusearch_async.learner.model import load_causal_lm
from tests.conftest import SLOW, free_port
from tests.system.conftest import ATLAS, finish
from tests.system.forked import Forked
from tests.system.learner_script import fixed_trajectories

pytestmark = pytest.mark.system

COURSE = ("--batch", "4", "--epochs", "3", "--lr", "1e-3", "--held-out", "0.2")
STEPS = 12
"""Of COURSE on 20 demonstrations."""


def demonstrations(path: Path, count: int = 20) -> Path:
    """Right episodes of questions with one link."""
    short = [chain for chain in chains("train", WORLDS["atlas"]) if len(chain.facts) == 1]
    with path.open("w", encoding="utf-8") as file:
        for chain in short[:count]:
            fact = chain.facts[0]
            turns = [
                f"<think>I look it up.</think><search>{fact.query}</search>",
                f"<think>{fact.sentence}</think><answer>{fact.value}</answer>",
            ]
            row = {
                "question": chain.text,
                "golden_answers": [fact.value],
                "turns": turns,
                "documents": [[fact.passage]],
            }
            file.write(json.dumps(row) + "\n")
    return path


def warmstart(folder: Path, name: str, *options: str, ranks: int = 1) -> Forked:
    """`cusearch warmstart` into FOLDER/NAME."""
    file = folder / "demonstrations.jsonl"
    if not file.exists():
        demonstrations(file)
    own = ("--demonstrations", str(file), "--output", str(folder / name), *COURSE)
    settings = ("--learner.cores", "", "--learner.checkpoint_every", "4", "--learner.ranks", str(ranks))
    command = ("cusearch_async.cli.main", "warmstart", str(ATLAS), *own, *settings, *options)
    return Forked(command, folder / f"{name}.log", {"OMP_NUM_THREADS": "1"})


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an uninterrupted warm start in `whole`."""
    folder = tmp_path_factory.mktemp("warmstart")
    status, output = finish(warmstart(folder, "whole"))
    assert status == 0, output
    return folder


def test_several_ranks_do_what_one_does(tmp_path):
    """A rank without a held-out row ended all; and the others refused a batch, or a setting, of an ordinary run."""
    own = ("--held-out", "0.05", "--batch", "10", "--epochs", "1", "--rollout.vllm.quantization", "fp8")
    status, output = finish(warmstart(tmp_path, "two", *own, ranks=2))
    assert status == 0, output
    assert "held-out loss" in output
    assert weights(tmp_path / "two")


def test_the_gradient_is_that_of_plain_cross_entropy(tmp_path):
    """Of the sampled tokens, their mean; the reference is transformers' model and torch's function alone, in float64.
    Where that model in float32 is further from it than 1e-5 (sums that almost cancel), twice as far is allowed."""
    settings = ("--loss.correction", "none", "--loss.minibatch", "16", "--method.budget", "16")
    command = ("tests.system.learner_script", str(tmp_path), "ones", "--ones", "--to-step", "1", *settings)
    shared = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    status, output = finish(Forked(command, tmp_path / "ones.log", shared | {"MASTER_PORT": str(free_port())}))
    assert status == 0, output
    found = load_file(tmp_path / "gradient-ones.safetensors")
    exact, plain = plain_gradient(torch.float64), plain_gradient(torch.float32)
    for name, gradient in found.items():
        one, other = (gradients[name.removeprefix("model.")] for gradients in (exact, plain))
        assert (gradient - one).norm() <= max(1e-5 * one.norm(), 2 * (other - one).norm()), name
    assert len(found) == len(exact)


def plain_gradient(dtype: torch.dtype) -> dict[str, Any]:
    """Of the mean cross-entropy of the sampled tokens of `fixed_trajectories`, by parameter."""
    model = load_causal_lm(str(STARTER), "float32").to(dtype)
    losses = []
    for trajectory in fixed_trajectories()[0]:
        ids = torch.tensor(trajectory.token_ids, dtype=torch.int64)[None]
        of_next = cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")
        losses.append(of_next[torch.tensor(trajectory.sampled[1:])])
    torch.cat(losses).mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_a_warm_start_learns_and_leaves_a_model_that_any_tool_loads(whole):
    found = rows(whole / "whole")
    assert [row["step"] for row in found] == list(range(STEPS))
    assert found[-1]["loss"] < 0.5 * found[0]["loss"]
    log = (whole / "whole.log").read_text()
    before, after = (float(log.split("held-out loss ")[i].split()[0]) for i in (1, 2))
    assert after < 0.5 * before
    assert "16 demonstrations" in log
    assert "4 held out, 0 left out; depth 1.00, EM 1.00, format 1.00" in log
    AutoModelForCausalLM.from_pretrained(whole / "whole" / "model")
    trained, old = weights(whole / "whole"), load_file(STARTER / "model.safetensors")
    assert any(not torch.equal(trained[name].float(), old[name].float()) for name in old)


def test_a_killed_warm_start_continues_bit_for_bit(whole):
    running = warmstart(whole, "killed")
    deadline = time.monotonic() + 120 * SLOW
    while len(rows(whole / "killed")) < 6:
        assert running.poll() is None, running.communicate(timeout=1 * SLOW)
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.kill()
    running.wait(timeout=30 * SLOW)
    assert not (whole / "killed" / "model").exists(), "what is not finished is no model"
    status, output = finish(warmstart(whole, "killed"))
    assert status == 0, output
    assert "continuing from step" in output
    killed, uninterrupted = weights(whole / "killed"), weights(whole / "whole")
    assert killed.keys() == uninterrupted.keys()
    assert all(torch.equal(killed[name], uninterrupted[name]) for name in killed)
    newest = {row["step"]: row["loss"] for row in rows(whole / "killed")}
    assert newest == {row["step"]: row["loss"] for row in rows(whole / "whole")}


def test_two_ranks_learn_the_same(whole):
    status, output = finish(warmstart(whole, "divided", ranks=2))
    assert status == 0, output
    of_one, of_two = ([row["loss"] for row in rows(whole / name)] for name in ("whole", "divided"))
    assert of_two == pytest.approx(of_one, rel=1e-2)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--lr", "2e-3"), "holds a warm start of other settings: --lr was 0.001, and is 0.002; choose another"),
        (("--run.seed", "4"), "run.seed was 0, and is 4, demonstrations was 16 ("),
    ],
)
def test_a_folder_of_another_warm_start_is_refused(whole, options, problem):
    status, output = finish(warmstart(whole, "whole", *options))
    assert status == 1
    assert problem in output
