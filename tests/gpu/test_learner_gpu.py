"""The learner's update on a GPU: what it is on a CPU. Needs torch and transformers; the last test needs DeepSpeed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]
DEVICE = "cuda"


@pytest.fixture(scope="module")
def ranks():
    from tests.gpu.learners import ranks

    torch.backends.cuda.matmul.allow_tf32 = False
    made = ranks()
    yield made
    made.close()


@pytest.fixture(scope="module")
def on_cpu(ranks):
    """In float32, padded: what all others are compared with."""
    from tests.gpu.learners import updated

    return updated("cpu", ranks)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative distance."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_in_float32_is_that_of_the_cpu(ranks, on_cpu, packing, checkpointing):
    from tests.gpu.learners import updated

    wanted, wanted_metrics, _ = on_cpu
    found, metrics, _ = updated(DEVICE, ranks, packing=packing, checkpointing=checkpointing)
    assert wanted.norm() > 1e-2
    assert apart(found, wanted) < 1e-4
    assert metrics["train/tokens"] == wanted_metrics["train/tokens"]
    assert metrics["train/loss"] == pytest.approx(wanted_metrics["train/loss"], rel=1e-3, abs=1e-6)


def test_in_bfloat16_packed_rows_are_as_near_to_float32_as_padded_ones(ranks, on_cpu):
    """Packed, attention is the kernel for sequences of varying length; padded, it is sdpa."""
    from tests.gpu.learners import updated

    wanted, _, _ = on_cpu
    padded, packed = (updated(DEVICE, ranks, dtype="bfloat16", packing=p)[0] for p in (False, True))
    assert apart(padded, wanted) < 0.1
    assert apart(packed, wanted) < 1.2 * apart(padded, wanted) + 0.01
    assert apart(packed, padded) < 0.1


def test_in_bfloat16_packed_rows_go_through_the_kernel(ranks, monkeypatch):
    from cusearch_async.learner import attention
    from tests.gpu.learners import updated

    calls = []
    kernel = attention.varlen.varlen_attn

    def counted(*arguments, **named):
        calls.append(arguments[0].shape)
        return kernel(*arguments, **named)

    monkeypatch.setattr(attention.varlen, "varlen_attn", counted)
    updated(DEVICE, ranks, dtype="bfloat16", packing=True)
    assert calls


def test_recomputed_activations_give_the_same_gradient_in_bfloat16(ranks):
    from tests.gpu.learners import updated

    kept, recomputed = (
        updated(DEVICE, ranks, dtype="bfloat16", packing=True, checkpointing=each)[0] for each in (False, True)
    )
    assert apart(recomputed, kept) < 1e-2, "the kernel's backward pass adds up in any order"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_are_those_of_the_device_bit_for_bit(ranks, tmp_path, dtype):
    from safetensors.torch import load_file

    from cusearch_async.weights.folder import WeightStore
    from cusearch_async.weights.interface import TENSORS
    from tests.gpu.learners import updated

    _, _, learner = updated(DEVICE, ranks, dtype=dtype)
    lent = learner.lend().tensors
    store = WeightStore(tmp_path)
    published = load_file(store.directory(store.publish(1, 1, lent, learner.canary())) / TENSORS)
    on_device = dict(learner._module.model.named_parameters())
    assert published.keys() == lent.keys() == on_device.keys() | {"lm_head.weight"}
    for name, parameter in on_device.items():
        assert parameter.device.type == DEVICE
        assert torch.equal(published[name], parameter.detach().cpu()), name


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deepspeed_with_zero_1_makes_the_update_of_plain_adamw(ranks, dtype):
    from cusearch_async.learner.deepspeed_engine import DeepSpeedEngine
    from tests.gpu.learners import config_of, learner_on, selection, tiny, updated

    _, wanted, plain = updated(DEVICE, ranks, dtype=dtype, packing=True)
    learner = learner_on(DEVICE, config_of(dtype, packing=True), ranks, engine=DeepSpeedEngine)
    found = learner.update(*selection(), 0)
    assert learner._device.type == DEVICE
    assert found["train/loss"] == pytest.approx(wanted["train/loss"], rel=1e-2, abs=1e-4)
    assert found["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=1e-2)
    start = dict(tiny(dtype, "varlen").named_parameters())
    moved, moved_plain = (
        torch.cat([(of[name].float().cpu() - start[name].detach().float()).flatten() for name in start])
        for of in (learner.lend().tensors, plain.lend().tensors)
    )
    assert moved_plain.norm() > 0.1
    assert apart(moved, moved_plain) < 0.1, "Adam's first step is about the sign of the gradient"


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_finds_the_gpu():
    from vllm.platforms import current_platform

    assert current_platform.is_cuda()
