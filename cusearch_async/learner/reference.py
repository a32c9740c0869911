"""π_ref, the policy that the run starts from. Whole on every rank, or divided among the ranks with ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cusearch_async.learner.adapter import Adapter


class WholeReference:
    """`module` on the device, or in the host's memory until it is `present`."""

    def __init__(self, module: nn.Module, device: torch.device, waits_on_host: bool) -> None:
        self._module = module.requires_grad_(False).eval()
        self._device = device
        if waits_on_host:
            for buffer in module.buffers():
                buffer.data = buffer.data.to(device)
        else:
            module.to(device)
        self._waiting = [(p, _pinned(p.data)) for p in module.parameters()] if waits_on_host else []

    @contextmanager
    def present(self) -> Iterator[Callable[..., Any]]:
        """Its forward pass, with all parameters on the device."""
        for parameter, waiting in self._waiting:
            parameter.data = waiting.to(self._device, non_blocking=True)
        try:
            yield self._module
        finally:
            for parameter, waiting in self._waiting:
                parameter.data = waiting


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """In memory that a GPU can copy from directly, where there is one."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


class DividedReference:
    """A forward pass that gathers layer by layer."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    @contextmanager
    def present(self) -> Iterator[Callable[..., Any]]:
        yield self._forward


class AdapterOff:
    """`forward` of the policy, whose adapter is switched off meanwhile: no second model."""

    def __init__(self, forward: Callable[..., Any], adapter: Adapter) -> None:
        self._forward = forward
        self._adapter = adapter

    @contextmanager
    def present(self) -> Iterator[Callable[..., Any]]:
        with self._adapter.switched_off():
            yield self._forward
