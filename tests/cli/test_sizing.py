"""Estimates from a model's shape: against real models made here, published totals, and numbers worked by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from cusearch_async.cli.preflight import sizing
from cusearch_async.cli.preflight.sizing import GIB, PUBLISHED, ModelShape
from cusearch_async.config import STARTER
from cusearch_async.training import model as model_module

QWEN_3B = PUBLISHED["Qwen/Qwen2.5-3B"]
QWEN_7B = PUBLISHED["Qwen/Qwen2.5-7B"]
TINY = {
    "hidden_size": 256,
    "intermediate_size": 700,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 300,
    "max_position_embeddings": 640,
}


def written(config, folder: Path) -> ModelShape:
    """The shape that is read back from a config's folder."""
    config.save_pretrained(folder)
    shape = sizing.shape_of(str(folder))
    assert shape is not None
    return shape


def real_model(config, dtype: str = "float32"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa").train()


# Shapes.


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**TINY),
        LlamaConfig(**TINY),
        LlamaConfig(**TINY, head_dim=48),
        LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    ],
    ids=["qwen2", "llama", "llama with wide heads", "llama with biases"],
)
def test_parameters_are_those_of_a_real_model(config, tied, tmp_path):
    config.tie_word_embeddings = tied
    shape = written(config, tmp_path)
    assert (shape.tied, shape.context) == (tied, 640)
    assert shape.parameters == real_model(config).num_parameters()


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen/Qwen2.5-3B", 3.09), ("Qwen/Qwen2.5-7B", 7.62), ("meta-llama/Llama-3.2-3B", 3.21)]
)
def test_parameters_are_the_published_totals(name, billions):
    assert PUBLISHED[name].parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_the_starters_shape_is_read_from_its_folder():
    shape = sizing.shape_of(str(STARTER))
    assert shape is not None
    assert (shape.layers, shape.hidden, shape.kv_heads, shape.head_dim, shape.context) == (4, 128, 4, 32, 1024)


@pytest.mark.parametrize("path", ["nobody/has-this-model", "/no/such/folder", "not a name at all", ""])
def test_a_model_that_is_not_here_has_no_shape(path):
    assert sizing.shape_of(path) is None


def test_a_model_whose_parameters_are_counted_otherwise_has_no_shape(tmp_path):
    MistralConfig(**TINY).save_pretrained(tmp_path)
    assert sizing.shape_of(str(tmp_path)) is None


def test_a_folder_without_a_config_has_no_shape(tmp_path):
    assert sizing.shape_of(str(tmp_path)) is None


# The learner.


def memory(shape=QWEN_3B, dtype="bfloat16", stage=1, ranks=4, has_reference=True, tokens=1000, checkpointing=True):
    return sizing.learner_memory(shape, dtype, stage, ranks, has_reference, tokens, checkpointing)


@pytest.mark.parametrize(
    ("stage", "weights", "optimizer", "gradients"), [(0, 2, 12, 2), (1, 2, 3, 2), (2, 2, 3, 0.5), (3, 0.5, 3, 0.5)]
)
def test_each_zero_stage_divides_one_thing_more(stage, weights, optimizer, gradients):
    """In bytes per parameter, bfloat16 on 4 ranks."""
    found, parameters = memory(stage=stage), QWEN_3B.parameters
    assert found.weights / parameters == pytest.approx(weights)
    assert found.optimizer / parameters == pytest.approx(optimizer)
    assert found.gradients / parameters == pytest.approx(gradients)
    assert found.reference == 2 * parameters


@pytest.mark.parametrize(("stage", "optimizer", "step"), [(0, 8, 4), (1, 12, 8)])
def test_plain_adamw_in_float32_needs_no_masters(stage, optimizer, step):
    found = memory(dtype="float32", stage=stage, ranks=1)
    assert (found.optimizer, found.step) == (optimizer * QWEN_3B.parameters, step * QWEN_3B.parameters)


def test_a_reference_is_there_only_for_a_kl_term():
    assert memory().held - memory(has_reference=False).held == 2 * QWEN_3B.parameters
    assert memory(has_reference=False).reference == 0


def test_the_peak_has_the_step_or_the_activations_but_not_both():
    found = memory(tokens=16384, checkpointing=False)
    assert found.activations > found.step
    assert found.peak == found.held + found.activations + sizing.DEVICE_ALLOWANCE
    found = memory(QWEN_7B, tokens=100)
    assert found.step > found.activations
    assert found.peak == found.held + found.step + sizing.DEVICE_ALLOWANCE


def test_each_zero_stage_takes_less_than_the_one_before():
    peaks = [memory(QWEN_7B, stage=stage).peak for stage in range(4)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


def saved_bytes(model, tokens: int) -> int:
    """What autograd really keeps of the decoder's forward pass, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # held, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=torch.zeros(2, tokens // 2, dtype=torch.long), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("config", [Qwen2Config(**TINY), LlamaConfig(**TINY)], ids=["qwen2", "llama"])
def test_a_layers_activations_are_what_autograd_keeps(config, dtype, tmp_path):
    shape = written(config, tmp_path)
    measured = saved_bytes(real_model(config, dtype), tokens=512)
    assert shape.layers * 512 * sizing.layer_bytes_per_token(shape, dtype) == pytest.approx(measured, rel=0.1)


def test_with_checkpointing_only_the_layers_inputs_wait(tmp_path):
    config = Qwen2Config(**TINY)
    shape = written(config, tmp_path)
    model = real_model(config, "bfloat16")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = 512 * 2 * shape.hidden
    measured = saved_bytes(model, tokens=512) - inputs * 3  # the last norm's: float32 input, normalised value
    assert shape.layers * inputs == pytest.approx(measured, rel=0.1)
    head = 16 * shape.vocab * 512
    layer = 512 * sizing.layer_bytes_per_token(shape, "bfloat16")
    assert sizing.activation_bytes(shape, "bfloat16", 512, True) == shape.layers * inputs + max(head, 2 * layer)


def test_logits_are_counted_as_the_learner_holds_them():
    assert sizing.LOGITS_AT_ONCE == model_module.LOGITS_AT_ONCE
    few, many = (sizing.activation_bytes(QWEN_3B, "bfloat16", n, True) for n in (4096, 5096))
    assert few - 4096 * 36 * 2048 * 2 == 4 * 4 * 151936 * 4096
    assert many - few == 1000 * 36 * 2048 * 2


@pytest.mark.parametrize(
    ("micro", "longest", "minibatch", "ranks", "expected"),
    [(16384, 7548, 32, 4, 16384), (1024, 7548, 32, 4, 7548), (10**6, 100, 32, 4, 800), (10**6, 100, 5, 4, 200)],
    ids=["full micro-batch", "one long trajectory", "a rank's share", "an uneven share"],
)
def test_the_largest_forward_pass(micro, longest, minibatch, ranks, expected):
    assert sizing.forward_tokens(micro, longest, minibatch, ranks) == expected


# Rollout workers.


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Qwen/Qwen2.5-3B", 36864), ("Qwen/Qwen2.5-7B", 57344), ("meta-llama/Llama-3.2-3B", 114688)],
)
def test_kv_bytes_per_token(name, expected):
    """Keys and values x layers x kv heads x 128 x 2 bytes, as 2 x 36 x 2 x 128 x 2."""
    assert sizing.kv_bytes_per_token(PUBLISHED[name], "bfloat16") == expected
    assert sizing.kv_bytes_per_token(PUBLISHED[name], "float32") == 2 * expected


def test_the_kv_cache_gets_what_weights_leave_of_vllms_share():
    room = sizing.kv_room(QWEN_7B, "bfloat16", 80 * GIB)
    assert room == pytest.approx((0.92 * 80 - 4) * GIB - 2 * 7_615_616_512)
    assert sizing.kv_room(QWEN_7B, "bfloat16", 16 * GIB) < 0


# Staleness and the batch.


@pytest.mark.parametrize(
    ("workers", "episodes", "bound", "expected"),
    [(1, 192, 2, (1.0, 2.0)), (4, 192, 2, (2.0, 2.0)), (1, 96, 8, (0.5, 8.0)), (4, 192, 0, (0.0, 0.0))],
)
def test_staleness_goes_with_what_is_in_flight_up_to_the_bound(workers, episodes, bound, expected):
    assert sizing.expected_staleness(workers, episodes, 192, bound) == expected


def test_the_papers_batch_leaves_a_quarter_alone():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(64), 3)
    chosen = [np.bincount(rng.permutation(groups)[:96]) for _ in range(2000)]
    measured = np.mean([(counts == 1).sum() / 96 for counts in chosen])
    assert sizing.singleton_share(64, 3, 96) == pytest.approx(measured, abs=0.005)
    assert sizing.singleton_share(64, 3, 96) == pytest.approx(0.2513, abs=1e-4)


@pytest.mark.parametrize(("rollouts", "budget", "expected"), [(3, 192, 0.0), (1, 10, 1.0), (3, 1, 1.0)])
def test_singletons_at_the_ends(rollouts, budget, expected):
    assert sizing.singleton_share(64, rollouts, budget) == expected
