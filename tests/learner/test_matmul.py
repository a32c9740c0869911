"""Linear layers by oneDNN give what torch's give, and are used only where nothing is rounded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cusearch_async.config import LearnerConfig
from cusearch_async.learner import matmul
from cusearch_async.learner.model import Head

where_nothing_is_rounded = pytest.mark.skipif(
    matmul.largest_error() > 1e-4, reason="oneDNN rounds factors to bfloat16 on this processor (AMX), so it is not used"
)


def results(layer: nn.Linear, inputs: torch.Tensor, **arguments: Any) -> list[torch.Tensor]:
    """The outputs, and the gradients of their weighted sum: of the inputs, and of what is trained."""
    inputs = inputs.detach().clone().requires_grad_()
    outputs = layer(inputs, **arguments)
    outputs = outputs[0] if arguments else outputs  # an LM head's, beside the entropies
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(outputs.shape, generator=generator).to(outputs.dtype)
    trained = [p for p in layer.parameters() if p.requires_grad]
    return [outputs, *torch.autograd.grad((outputs * weights).sum(), [inputs, *trained])]


@where_nothing_is_rounded
@pytest.mark.parametrize("rows", [1, matmul.PIECE - 1, matmul.PIECE, matmul.PIECE + 1, 3 * matmul.PIECE + 7])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_layer_gives_what_torchs_gives(rows, bias, frozen):
    """Up to float32's rounding, also where the weight is frozen, as under an adapter."""
    torch.manual_seed(0)
    exact = nn.Linear(48, 33, bias=bias, dtype=torch.float64).requires_grad_(not frozen)
    layer = copy.deepcopy(exact).float()
    layer.__class__ = matmul.Linear
    inputs = torch.randn(rows, 48)
    for found, wanted in zip(results(layer, inputs), results(exact, inputs.double()), strict=True):
        assert found.dtype == torch.float32
        assert (found - wanted).norm() <= 2e-6 * wanted.norm()


def test_a_layer_keeps_the_shape_of_a_batch_and_takes_one_that_is_not_contiguous():
    torch.manual_seed(0)
    layer = nn.Linear(8, 5)
    own = copy.deepcopy(layer)
    own.__class__ = matmul.Linear
    inputs = torch.randn(8, 150, 3).permute(2, 1, 0)
    for found, wanted in zip(results(own, inputs), results(layer, inputs), strict=True):
        assert found.shape == wanted.shape
        assert torch.allclose(found, wanted, atol=1e-4, rtol=1e-5)


@where_nothing_is_rounded
def test_products_are_exact_and_torchs_own_setting_is_left_as_it_was():
    before = torch.backends.mkldnn.matmul.fp32_precision
    assert matmul.largest_error() < 1e-6
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_factors_that_are_rounded_to_bfloat16_are_noticed(monkeypatch):
    whole = torch.mm

    def rounded(one, other, out):
        return whole(one.bfloat16().float(), other.bfloat16().float(), out=out)

    monkeypatch.setattr(torch, "mm", rounded)
    monkeypatch.setattr(matmul, "_add_outer", lambda total, slope, rows: slope.T @ rows)
    assert matmul.largest_error() > 1e-4


@pytest.mark.parametrize(
    ("slow", "error", "gpu", "dtype", "learner", "chosen"),
    [
        (True, 4e-7, False, torch.float32, {}, True),
        (True, 1e-3, False, torch.float32, {}, False),
        (False, 4e-7, False, torch.float32, {}, False),
        (True, 4e-7, True, torch.float32, {}, False),
        (True, 4e-7, False, torch.bfloat16, {}, False),
        (True, 4e-7, False, torch.float32, {"compile": True}, False),
        (True, 4e-7, False, torch.float32, {"zero_stage": 3}, False),
    ],
)
def test_onednn_is_chosen_where_mkl_is_slow_and_nothing_is_rounded(
    monkeypatch, slow, error, gpu, dtype, learner, chosen
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(matmul, "_is_slow_with_mkl", lambda: slow)
    monkeypatch.setattr(matmul, "largest_error", lambda: error)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(dtype)
    before = list(model.parameters())
    matmul.use_fastest(model, LearnerConfig(**learner))
    assert isinstance(model[0], matmul.Linear) == chosen
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))


@where_nothing_is_rounded
@pytest.mark.parametrize("bias", [True, False])
def test_the_lm_head_multiplies_as_was_chosen_for_it(monkeypatch, bias):
    """And gives what torch's products give."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(matmul, "_is_slow_with_mkl", lambda: True)
    torch.manual_seed(0)
    chosen = nn.Sequential(nn.Linear(16, 900, bias=bias))
    plain = Head.in_place_of(copy.deepcopy(chosen[0]), 600, entropy_has_gradient=False)
    matmul.use_fastest(chosen, LearnerConfig())
    tuned = Head.in_place_of(chosen[0], 600, entropy_has_gradient=False)
    assert (plain.products, tuned.products) == (matmul.TORCH, matmul.ONEDNN)
    inputs, targets = torch.randn(1500, 16), torch.randint(900, (1500,))
    wanted, found = (results(head, inputs, targets=targets) for head in (plain, tuned))
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 2e-6 * other.norm()
