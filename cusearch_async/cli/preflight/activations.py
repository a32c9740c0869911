"""The memory of a pass besides the parameters, for any model: the learner's own module is run on torch's meta device,
whose tensors have shapes and no memory, and the bytes that live at a time are counted."""

from __future__ import annotations

import copy
import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface

from cusearch_async.cli.preflight.shapes import ModelShape, on_meta
from cusearch_async.learner.model import SampledLogprobs, recompute_layers

COUNTED = "counted"
ROWS = 2


@dataclass(frozen=True, slots=True)
class Passes:
    """Peaks in bytes, without the parameters and their gradients."""

    training: int
    """Of forward and backward, with the gradient of one parameter."""
    scoring: int


@functools.cache
def passes(
    shape: ModelShape, dtype: str, tokens: int, checkpointing: bool, logits_chunk_tokens: int, bonus: bool = False
) -> Passes:
    """Of `tokens` in a forward pass, all of which may be sampled. `bonus`: the entropy has a gradient.

    Raises whatever the model's code raises without memory, as where it looks at what is in a tensor."""
    config = _with_fixed_rope(shape.config)
    model = on_meta(config, dtype=getattr(torch, dtype), attn_implementation=COUNTED).eval()
    if checkpointing:
        recompute_layers(model)
    module = SampledLogprobs(model, logits_chunk_tokens, bonus)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
    token_ids = torch.zeros(ROWS, -(-tokens // ROWS), dtype=torch.long, device="meta")
    sampled = torch.zeros(tokens, dtype=torch.long, device="meta")
    with LiveBytes() as scoring, torch.no_grad():
        module(token_ids, sampled, 1.0, wants_entropy=False)
    with LiveBytes() as training:
        log_policy, entropy = module(token_ids, sampled, 1.0)
        (log_policy + entropy if bonus else log_policy).sum().backward()
    return Passes(training.peak, scoring.peak)


def _with_fixed_rope(config: Any) -> Any:
    """The config with frequencies that do not depend on how long a text is, for which a pass would ask its tensors."""
    fixed = copy.deepcopy(config)
    rope = getattr(fixed, "rope_parameters", None) or {}
    for layers in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if layers.get("rope_type") in ("dynamic", "longrope"):
            layers["rope_type"] = "default"
    return fixed


def _drop_gradient(parameter: torch.Tensor) -> None:
    """It is counted with all gradients, which wait for the optimizer."""
    parameter.grad = None


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors that operations have made and that still live: now, and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_address(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        made = function(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor) and _address(tensor) not in given | self._known:
                self._add(tensor.untyped_storage())
        if function is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
            # autograd adds up gradients in place, but not under a dispatch mode: there the sum replaces the first later
            self.peak = max(self.peak, self.live)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        self._known.add(address)
        self.live += size
        weakref.finalize(storage, self._remove, address, size)

    def _remove(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.live -= size


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Attended(torch.autograd.Function):
    """Keeps what attention kernels keep: query, key, value, the result and one float32 per head and token."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        result = query.new_empty(*query.shape[:3], value.shape[-1])
        ctx.save_for_backward(query, key, value, result, query.new_empty(query.shape[:3], dtype=torch.float32))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """[B, L, H, D]; transformers builds no mask for it."""
    return _Attended.apply(query, key, value).transpose(1, 2).contiguous(), None  # type: ignore[no-untyped-call]


AttentionInterface.register(COUNTED, _attend)
