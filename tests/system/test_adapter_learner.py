"""LoRA on DeepSpeed: the gradient is peft's at every ZeRO stage, a resume is bit-identical, what it saves loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cusearch_async.config import STARTER
from cusearch_async.learner.batching import micro_batches, shares
from cusearch_async.learner.model import load_causal_lm
from tests.system.learner_script import SHAKEN, fixed_trajectories
from tests.system.test_learner import train

pytestmark = pytest.mark.system

LORA = ("--learner.lora.rank", "4", "--learner.lora.alpha", "16")
WHOLE = ("--loss.minibatch", "16", "--method.budget", "16", "--loss.correction", "none")
KL = 0.5
"""The weight of the KL penalty."""


@pytest.fixture(scope="module")
def by_hand() -> torch.Tensor:
    """The gradient of -1/T Σ (A log π - β k3) in float64, by autograd of a model that peft has wrapped; the reference
    is the model without an adapter."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = peft.get_peft_model(load_causal_lm(str(STARTER), "float32"), config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * SHAKEN)
    policy, reference = policy.double().eval(), load_causal_lm(str(STARTER), "float32").double().eval()
    selected, advantages = fixed_trajectories()
    total = sum(len(t.logprobs) for t in selected)
    for trajectory, advantage in zip(selected, advantages, strict=True):
        ids = torch.tensor(trajectory.token_ids[None].astype(np.int64))
        sampled = torch.tensor(trajectory.sampled[1:])

        def logprobs(model: Any, ids: torch.Tensor = ids, sampled: torch.Tensor = sampled) -> torch.Tensor:
            log_all = torch.log_softmax(model(ids).logits[0, :-1], -1)
            return log_all.gather(-1, ids[0, 1:, None]).squeeze(-1)[sampled]

        chosen = logprobs(policy)
        with torch.no_grad():
            from_reference = logprobs(reference)
        difference = from_reference - chosen
        k3 = difference.exp() - difference - 1
        assert 0.001 < float(k3.detach().max()) < 10, "the penalty is there, and not clamped"
        (-(advantage * chosen.sum() - KL * k3.sum()) / total).backward()
    found = {
        name.removeprefix("base_model."): parameter.grad
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None
    }
    assert all("lora_" in name for name in found)
    return torch.cat([found[name].flatten() for name in sorted(found)])


@pytest.mark.parametrize(
    ("ranks", "passes", "settings"),
    [
        (1, 2, ("--learner.zero_stage", "0")),
        (1, 3, ("--learner.zero_stage", "1", "--learner.gradient_checkpointing", "true")),
        (2, 2, ("--learner.zero_stage", "2", "--learner.packing", "true", "--learner.attention", "varlen")),
        (2, 3, ("--learner.zero_stage", "3", "--learner.gradient_checkpointing", "true")),
    ],
)
def test_the_gradient_is_that_of_peft_by_hand(ranks, passes, settings, by_hand, tmp_path):
    arguments = ("--to-step", "1", "--shake")
    settings = (*LORA, *WHOLE, "--loss.kl_coef", str(KL), *settings)
    weights = train(tmp_path, "learner", *arguments, ranks=ranks, settings=settings)
    tensors = load_file(tmp_path / "gradient-learner.safetensors")
    assert all(".lora_" in name for name in tensors), "nothing else has a gradient"
    found = torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])
    assert found.shape == by_hand.shape
    assert by_hand.abs().max() > 0.01
    assert (found - by_hand).norm() < 2e-5 * by_hand.norm(), "float32 against float64"
    assert all(name.startswith("base_model.model.model.layers.") for name in weights)
    forwards = json.loads((tmp_path / "forwards-learner.json").read_text())
    selected, _ = fixed_trajectories()
    lengths, packs = [len(t.token_ids) for t in selected], "varlen" in settings
    each = [micro_batches([lengths[i] for i in own], 1024, packs) for own in shares(lengths, ranks)]
    wanted = passes * max(map(len, each))
    assert forwards == [wanted] * 4, "for π_ref, π_θ, and again in the backward pass with checkpointing"


@pytest.mark.parametrize(
    ("stage", "dtype", "ranks"),
    [
        pytest.param("0", "float32", 1, marks=pytest.mark.slow),
        ("2", "float32", 2),
        pytest.param("3", "bfloat16", 2, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_adapter_makes_the_same_updates_bit_for_bit(stage, dtype, ranks, tmp_path):
    settings = (*LORA, "--learner.zero_stage", stage, "--model.dtype", dtype)
    checkpoint = tmp_path / "checkpoint"
    whole = train(tmp_path, "whole", "--to-step", "2", ranks=ranks, settings=settings)
    train(tmp_path, "first", "--to-step", "1", "--save", str(checkpoint), ranks=ranks, settings=settings)
    arguments = ("--from-step", "1", "--to-step", "2", "--load", str(checkpoint))
    resumed = train(tmp_path, "resumed", *arguments, ranks=ranks, settings=settings)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert any(tensor.any() for name, tensor in whole.items() if "lora_B" in name)
    states = sum(path.stat().st_size for path in (checkpoint / "deepspeed").iterdir())
    adapter = sum(tensor.numel() for tensor in whole.values())
    assert states < 4 * 5 * adapter + 400_000, "the base is in no state of DeepSpeed"


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ((2, "1"), (1, "3")),
        pytest.param((1, "3"), (2, "0"), marks=pytest.mark.slow),
        pytest.param((1, "0"), (2, "2"), marks=pytest.mark.slow),
    ],
)
def test_an_adapter_goes_on_with_other_ranks_and_at_another_stage(was, now, tmp_path):
    """As the whole model does (test_divided_state): the same next update, up to the rounding of sums."""
    same = (*LORA, "--loss.kl_coef", "0", "--learner.lr", "1e-4", "--learner.zero_stage")
    checkpoint, following = tmp_path / "checkpoint", ("--from-step", "2", "--to-step", "3")
    start = train(
        tmp_path, "first", "--to-step", "2", "--save", str(checkpoint), ranks=was[0], settings=(*same, was[1])
    )
    arguments = (*following, "--load", str(checkpoint))
    unchanged = train(tmp_path, "unchanged", *arguments, ranks=was[0], settings=(*same, was[1]))
    after = train(tmp_path, "changed", *arguments, ranks=now[0], settings=(*same, now[1]))
    assert max(float((unchanged[name] - start[name]).abs().max()) for name in start) > 5e-5, "an update was made"
    assert max(float((unchanged[name] - after[name]).abs().max()) for name in start) < 1e-6


@pytest.mark.parametrize("stage", ["1", "3"])
def test_what_a_checkpoint_holds_is_the_same_policy_for_peft_and_for_any_tool(stage, tmp_path):
    import peft

    checkpoint = tmp_path / "checkpoint"
    settings = (*LORA, "--learner.zero_stage", stage)
    published = train(tmp_path, "learner", "--to-step", "2", "--save", str(checkpoint), settings=settings)
    adapter = load_file(checkpoint / "adapter" / "adapter_model.safetensors")
    assert adapter.keys() == published.keys()
    assert all(torch.equal(adapter[name], published[name]) for name in adapter)
    ids = torch.randint(0, 370, (1, 50), generator=torch.Generator().manual_seed(0))
    start = AutoModelForCausalLM.from_pretrained(STARTER, dtype=torch.float32)
    with torch.no_grad():
        before = start(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(checkpoint / "model", dtype=torch.float32)(ids).logits
        policy = peft.PeftModel.from_pretrained(start, checkpoint / "adapter").merge_and_unload()
        wrapped = policy(ids).logits
    assert (merged - wrapped).abs().max() < 1e-4
    assert (merged - before).abs().max() > 0.1
    assert len(AutoTokenizer.from_pretrained(checkpoint / "model")) == len(AutoTokenizer.from_pretrained(STARTER))


def test_an_adapter_begins_as_the_run_s_seed_says(tmp_path: Path):
    def start(name: str, seed: str) -> dict[str, torch.Tensor]:
        saved = ("--to-step", "0", "--save", str(tmp_path / name))
        return train(tmp_path, name, *saved, settings=(*LORA, "--run.seed", seed))

    one, same, other = start("one", "7"), start("same", "7"), start("other", "8")
    assert all(torch.equal(one[name], same[name]) for name in one)
    for name, tensor in one.items():
        assert bool(tensor.any()) == ("lora_A" in name)
        assert "lora_B" in name or not torch.equal(tensor, other[name])
    start, merged = (load_file(path / "model.safetensors") for path in (STARTER, tmp_path / "one" / "model"))
    assert all(torch.equal(merged[name], start[name].float()) for name in merged), "B = 0: the model itself"
