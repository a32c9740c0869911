"""Whole optimizer steps against torch's own AdamW: later mini-batches, clipping, weight decay, warm-up, reference."""

from __future__ import annotations

import copy
import time

import numpy as np
import pytest
import torch

from cusearch_async.config import STARTER, load_config
from cusearch_async.learner.model import load_causal_lm
from cusearch_async.learner.plan import plan_update
from tests.system.learner_script import fixed_trajectories, with_copies
from tests.system.test_learner import train

pytestmark = pytest.mark.system

STEPS = 3
SETTINGS = (
    *("--method.budget", "18", "--loss.minibatch", "6", "--loss.kl_coef", "0.01", "--learner.lr", "1e-3"),
    *("--learner.grad_clip", "0.05", "--learner.weight_decay", "0.5", "--learner.warmup_steps", "2"),
)


def log_probs(model, trajectory):
    return torch.cat([log_probs_of_row(model, row) for row in trajectory.rows])


def log_probs_of_row(model, row):
    ids = torch.tensor(row.token_ids[None].astype(np.int64))
    log_p = torch.log_softmax(model(ids).logits[0, :-1], -1)
    return log_p.gather(-1, ids[0, 1:, None]).squeeze(-1)[torch.tensor(row.sampled[1:])]


def loss_of(trajectory, advantage, log_p, proximal, reference, loss):
    """Of one trajectory, summed over its sampled tokens."""
    weight = (proximal - torch.tensor(trajectory.logprobs)).exp().clamp(max=loss.correction_bound)
    ratio = (log_p - proximal).exp()
    clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    surrogate = weight * torch.minimum(ratio * advantage, clipped * advantage)
    apart = reference - log_p
    return (loss.kl_coef * (apart.exp() - apart - 1).clamp(max=10) - surrogate).sum()


def trained(config):
    """The parameters after STEPS learner steps, and how many gradients were clipped."""
    selected, advantages = with_copies(*fixed_trajectories())
    model = load_causal_lm(str(STARTER), "float32").double().eval()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=config.learner.weight_decay)
    clipped = 0
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = config.learner.lr * min(1.0, (step + 1) / config.learner.warmup_steps)
        with torch.no_grad():
            proximal, of_reference = ([log_probs(one, t) for t in selected] for one in (model, reference))
        for parts in plan_update(selected, advantages, step, config).minibatches:
            trained_on = sorted({i for part in parts if not part.is_filler for i in part.trajectory.tolist()})
            optimizer.zero_grad()
            total = sum(len(selected[i].logprobs) for i in trained_on)
            for i in trained_on:
                log_p = log_probs(model, selected[i])
                loss = loss_of(selected[i], advantages[i], log_p, proximal[i], of_reference[i], config.loss)
                (loss / total).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.learner.grad_clip)
            clipped += bool(norm > config.learner.grad_clip)
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, clipped


OFFLOADED = ("--learner.deepspeed.zero_optimization.offload_optimizer.device", "cpu")
MANY_PASSES = ("--learner.micro_batch_tokens", "100")


@pytest.mark.parametrize(("stage", "options"), [("0", ()), ("2", ()), ("2", (*OFFLOADED, *MANY_PASSES))])
def test_whole_steps_are_those_of_torchs_own_optimizer(tmp_path, atlas_config, stage, options):
    config = load_config(atlas_config, list(SETTINGS))
    assert (config.loss.proximal, config.loss.correction, config.episode.temperature) == ("recomputed", "tis", 1.0)
    expected, clipped = trained(config)
    assert clipped == 3 * STEPS, "every mini-batch"
    arguments = ("--copies", "--to-step", str(STEPS))
    found = train(tmp_path, "learner", *arguments, settings=(*SETTINGS, "--learner.zero_stage", stage, *options))
    start = load_causal_lm(str(STARTER), "float32").double()
    moved = {name: parameter.detach() for name, parameter in start.named_parameters()}
    off = sum(float((found[name].double() - expected[name]).square().sum()) for name in expected)
    whole = sum(float((expected[name] - moved[name]).square().sum()) for name in expected)
    assert off < (1e-3) ** 2 * whole, "float32 against float64"


@pytest.mark.parametrize("stage", ["1", "2"])
def test_gradients_are_summed_over_ranks_in_the_data_type_that_is_set(tmp_path, stage):
    """Float32 for a float32 model; bfloat16 rounds them."""
    key = "--learner.deepspeed.communication_data_type"
    options = {"unset": (), "fp32": (key, "fp32"), "bf16": (key, "bf16")}
    settings = (*SETTINGS, "--learner.zero_stage", stage)
    unset, float32, bfloat16 = (
        train(tmp_path, name, "--to-step", "1", ranks=2, settings=(*settings, *option))
        for name, option in options.items()
    )
    assert all(torch.equal(unset[name], float32[name]) for name in unset)
    assert not all(torch.equal(unset[name], bfloat16[name]) for name in unset)


def test_only_an_offloaded_optimizer_is_fused(atlas_config):
    """Its rounding is another: what is trained on a CPU stays as it was."""
    from cusearch_async.learner.deepspeed_engine import settings_of

    configs = (load_config(atlas_config, list(options)).learner for options in ((), OFFLOADED))
    plain, offloaded = (settings_of(learner, "float32") for learner in configs)
    assert "fused" not in plain["optimizer"]["params"]
    assert offloaded["optimizer"]["params"]["fused"] is True


@pytest.mark.slow
def test_a_fused_step_on_a_cpu_takes_less_than_a_third():
    """CPU seconds of one thread; docs/benchmarks.md has the figures."""
    seconds = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for fused in (False, True):
        parameter = torch.nn.Parameter(torch.randn(5_000_000))
        parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=fused)
        optimizer.step()
        seconds[fused] = min(timed(optimizer.step) for _ in range(5))
    torch.set_num_threads(threads)
    assert seconds[True] < seconds[False] / 3


def timed(call) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began
