"""A run goes on with other ranks and at another ZeRO stage: the same state, and the same next update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cusearch_async.config import STARTER
from cusearch_async.learner.divided_state import KINDS, SavedState
from tests.system.test_learner import train

pytestmark = pytest.mark.system

SAME = ("--learner.lr", "1e-4", "--loss.kl_coef", "0")
NEXT = ("--from-step", "2", "--to-step", "3")


def settings(stage: int, dtype: str) -> tuple[str, ...]:
    options = ("--learner.deepspeed.zero_optimization.round_robin_gradients", "true") if stage == 2 else ()
    return (*SAME, "--learner.zero_stage", str(stage), "--model.dtype", dtype, *options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """(ranks, stage, dtype) -> the folder of a learner that has made two steps, and a third after its checkpoint."""
    made: dict[tuple[int, int, str], Path] = {}

    def make(ranks: int, stage: int, dtype: str) -> Path:
        key = ranks, stage, dtype
        if key not in made:
            made[key] = folder = tmp_path_factory.mktemp("saved")
            own = settings(stage, dtype)
            train(folder, "first", "--to-step", "2", "--save", str(folder / "ck"), ranks=ranks, settings=own)
            train(folder, "next", *NEXT, "--load", str(folder / "ck"), ranks=ranks, settings=own)
        return made[key]

    return make


def state_of(checkpoint: Path) -> SavedState:
    model = AutoModelForCausalLM.from_pretrained(STARTER)
    shapes = {f"model.{name}": parameter.shape for name, parameter in model.named_parameters()}
    return SavedState(checkpoint / "deepspeed", shapes)


@pytest.mark.parametrize(
    ("was", "now", "dtype"),
    [
        pytest.param((2, 1), (1, 1), "float32", marks=pytest.mark.slow),
        ((2, 1), (3, 3), "float32"),
        pytest.param((3, 3), (2, 2), "float32", marks=pytest.mark.slow),
        pytest.param((2, 2), (1, 3), "float32", marks=pytest.mark.slow),
        ((3, 3), (1, 0), "float32"),
        pytest.param((1, 0), (2, 1), "float32", marks=pytest.mark.slow),
        pytest.param((2, 3), (1, 0), "bfloat16", marks=pytest.mark.slow),
        ((1, 0), (2, 3), "bfloat16"),
    ],
)
def test_the_state_is_divided_again_and_the_next_update_is_the_same(tmp_path, saved, was, now, dtype):
    source, (ranks, stage) = saved(*was, dtype), now
    arguments = (*NEXT, "--load", str(source / "ck"), "--save-loaded", str(tmp_path / "ck"))
    after = train(tmp_path, "next", *arguments, ranks=ranks, settings=settings(stage, dtype))

    before, loaded = state_of(source / "ck"), state_of(tmp_path / "ck")
    assert loaded.ranks == (ranks if stage else 1)
    assert loaded.updates == before.updates == 6, "DeepSpeed's empty one at stage 0 in bfloat16 does not count"
    for name in before.shapes:
        for kind in KINDS:
            assert torch.equal(loaded.whole(name, kind), before.whole(name, kind)), (name, kind)
    weights = load_file(source / "ck" / "model" / "model.safetensors")
    assert all(
        torch.equal(t, weights[n]) for n, t in load_file(tmp_path / "ck" / "model" / "model.safetensors").items()
    )

    unchanged = load_file(source / "weights-next.safetensors")
    moved = max(float((unchanged[name].float() - weights[name].float()).abs().max()) for name in unchanged)
    apart = max(float((unchanged[name].float() - after[name].float()).abs().max()) for name in unchanged)
    assert moved > 5e-5, "the learner did make an update"
    if dtype == "float32":
        assert apart < 1e-6
    else:  # gradients are rounded to bfloat16 on each rank before they are added: three updates of at most lr each
        for name, weight in unchanged.items():
            unit = 2**-7 * weight.float().abs()  # in the last place
            assert ((weight.float() - after[name].float()).abs() <= unit + 6e-4).all(), name
