"""What the learner asks of DeepSpeed, in plain torch for one rank: for measurements and tests where it is not
installed."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from cusearch_async.config import Config

REPLACED = "cusearch_async.learner.deepspeed_engine"


class PlainEngine:
    """AdamW with float32 masters; one rank."""

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def __init__(self, module: nn.Module, config: Config) -> None:
        self._module = module.to(self.device)
        self._parameters = list(module.parameters())
        self._masters = [parameter.detach().float() for parameter in self._parameters]  # of float32: the same memory
        self._optimizer = torch.optim.AdamW(self._masters, weight_decay=config.learner.weight_decay)
        self._clip = config.learner.grad_clip
        self.gradient_square = torch.zeros((), device=self.device)
        for parameter in self._parameters:
            parameter.register_hook(self._add_square)

    def _add_square(self, gradient: torch.Tensor) -> None:
        self.gradient_square += torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32).square()

    def __call__(self, *inputs: Any) -> Any:
        return self._module(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, lr: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                parameter.copy_(master)
        self.gradient_square.zero_()
        return float(norm)

    def parameters(self, named: Iterable[tuple[str, nn.Parameter]], keep: bool) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in named if keep}


def learner_module(with_deepspeed: bool) -> Any:
    """`cusearch_async.learner.learner`, on DeepSpeed or on PlainEngine."""
    if find_spec("deepspeed") is None:
        stand_in = types.ModuleType(REPLACED)
        stand_in.DeepSpeedEngine = PlainEngine
        stand_in.divided_forward = None  # of ZeRO-3, which it has not
        sys.modules.setdefault(REPLACED, stand_in)
    from cusearch_async.learner import learner

    if not with_deepspeed:
        learner.DeepSpeedEngine = PlainEngine
    return learner
