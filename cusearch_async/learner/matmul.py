"""Linear layers in float32 on processors of AMD, on Zen 5 about twice as fast as torch's.

torch's MKL uses no AVX-512 there: 114 GFLOP/s on a core of Zen 5, where torch's oneDNN reaches 249. On Zen 4, whose
units are half as wide, it is 95 and 105, and a layer of 128 outputs gains nothing. torch gives oneDNN
float32 products only where it may round factors to bfloat16, which oneDNN does only with Intel's AMX instructions;
`largest_error` checks that nothing is rounded. oneDNN compiles code for every new shape (0.7 ms, as many MB), and
micro-batches rarely have the same, so it multiplies PIECE rows at a time, and MKL the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cusearch_async.config import LearnerConfig

PIECE = 256
_SHAPES = ((128, 384), (384, 128), (1000, 33), (64, 512))
"""Inputs and outputs of the layers that are tried."""
_FLOAT32_ERROR = 1e-5
"""Of a product, relative: float32 has 4e-7 at most, factors that are rounded to bfloat16 have 1e-3."""


def use_fastest(model: nn.Module, learner: LearnerConfig) -> None:
    """Let oneDNN compute the linear layers of a float32 `model` on the CPU, where it is faster and as exact. Its
    parameters stay. Compiled layers and ZeRO-3 take torch's."""
    if learner.compile or learner.zero_stage == 3:
        return
    if torch.cuda.is_available() or not _is_slow_with_mkl() or largest_error() > _FLOAT32_ERROR:
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32:
            module.__class__ = Linear


class Linear(nn.Linear):
    """A linear layer whose products are `Product`'s."""

    def forward(self, inputs: torch.Tensor) -> Any:
        return Product.apply(inputs, self.weight, self.bias)  # type: ignore[no-untyped-call]


class Product(torch.autograd.Function):
    """x Wᵀ + b [..., out] of x [..., in], W [out, in] and b [out] or None, in float32."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        ctx.save_for_backward(rows, weight)
        ctx.shape = inputs.shape
        return _linear(rows, weight, bias).view(*inputs.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        slope = slope.reshape(len(rows), -1)
        return (
            _product(slope, weight).view(ctx.shape) if needs_inputs else None,
            _add_outer(torch.zeros_like(weight), slope, rows) if needs_weight else None,
            slope.sum(0) if needs_bias else None,
        )


def _linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """rows [M, I] times weightᵀ [I, O], plus the bias [O]."""
    outputs = _product(rows, weight.T)
    if bias is not None:
        outputs += bias
    return outputs


def _product(rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """rows [M, I] times other [I, O]."""
    product = rows.new_empty(len(rows), other.shape[1])
    pieces, rest = _pieces(len(rows))
    with _onednn():
        for piece in pieces:
            torch.mm(rows[piece], other, out=product[piece])
    torch.mm(rows[rest], other, out=product[rest])
    return product


def _add_outer(total: torch.Tensor, slope: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Add slopeᵀ [O, M] times rows [M, I] to `total` [O, I], and return it."""
    pieces, rest = _pieces(len(rows))
    total.addmm_(slope[rest].T, rows[rest])
    with _onednn():
        for piece in pieces:
            total.addmm_(slope[piece].T, rows[piece])
    return total


def _pieces(count: int) -> tuple[list[slice], slice]:
    """Those of PIECE rows, and the rest."""
    whole = count - count % PIECE
    return [slice(start, start + PIECE) for start in range(0, whole, PIECE)], slice(whole, count)


@contextmanager
def _onednn() -> Iterator[None]:
    """Products within go to oneDNN."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # what torch puts in place of the module
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


@dataclass(frozen=True, slots=True)
class Products:
    """What multiplies matrices [M, I] where one layer is computed in parts, as the LM head is."""

    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    add_outer: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


TORCH = Products(functional.linear, torch.mm, lambda total, slope, rows: total.addmm_(slope.T, rows))
ONEDNN = Products(_linear, _product, _add_outer)


def products_of(layer: nn.Linear) -> Products:
    """What `use_fastest` has chosen for it."""
    return ONEDNN if isinstance(layer, Linear) else TORCH


def largest_error() -> float:
    """Largest relative error of `Product`, forward and backward, against float64."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for size, out in _SHAPES:
        shapes = (PIECE, size), (out, size), (PIECE, out)
        rows, weight, slope = (torch.randn(shape, generator=generator) for shape in shapes)
        for found, one, other in (
            (_product(rows, weight.T), rows, weight.T),
            (_product(slope, weight), slope, weight),
            (_add_outer(torch.zeros(out, size), slope, rows), slope.T, rows),
        ):
            exact = one.double() @ other.double()
            errors.append(float((found - exact).norm() / exact.norm()))
    return max(errors)


def _is_slow_with_mkl() -> bool:
    """Whether the processor has AVX-512 instructions that MKL does not use."""
    try:
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "AuthenticAMD" in processor and torch.backends.cpu.get_cpu_capability() == "AVX512"
