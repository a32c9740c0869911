"""π_ref, the policy that the run starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from cusearch_async.learner.adapter import Adapter

Reference = Callable[[], AbstractContextManager[Callable[..., Any]]]
"""Its forward pass, inside the context only."""


def whole_reference(module: nn.Module, device: torch.device, waits_on_host: bool) -> Reference:
    """`module` on the device, or in the host's memory until it is used."""
    module.requires_grad_(False).eval()
    if waits_on_host:
        for buffer in module.buffers():
            buffer.data = buffer.data.to(device)
    else:
        module.to(device)
    pins = torch.cuda.is_available()  # page-locked memory, from which a GPU copies directly
    waiting = [(p, p.data.pin_memory() if pins else p.data) for p in module.parameters()] if waits_on_host else []

    @contextmanager
    def present() -> Iterator[nn.Module]:
        for parameter, on_host in waiting:
            parameter.data = on_host.to(device, non_blocking=True)
        try:
            yield module
        finally:
            for parameter, on_host in waiting:
                parameter.data = on_host

    return present


@contextmanager
def without_adapter(forward: Callable[..., Any], adapter: Adapter) -> Iterator[Callable[..., Any]]:
    """`forward` of the policy, whose adapter is off inside: no second model."""
    with adapter.switched_off():
        yield forward
