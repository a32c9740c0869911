"""`learner.attention = "varlen"`: attention of a packed row within each of its trajectories, without flash-attn.

On a GPU in bfloat16 torch's kernel for sequences of varying length, elsewhere one scaled_dot_product_attention per
trajectory. Neither builds a mask over the whole row."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from cusearch_async.errors import ConfigError
from cusearch_async.learner.batching import Packed

VARLEN = "varlen"

_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}
)
"""Lets several query heads share one of keys and values; torch before 2.13 has no such option."""


def refuse_unsuitable(model: Any, path: str) -> None:
    """Raises: ConfigError for a model with layers that `attend` does not compute."""
    config = model.config
    window = getattr(config, "sliding_window", None)  # Phi-4-mini's is longer than any text
    in_all_layers = "sliding_attention" if window and window < config.max_position_embeddings else "full_attention"
    others = sorted(set(getattr(config, "layer_types", None) or [in_all_layers]) - {"full_attention"})
    if getattr(config, "attn_logit_softcapping", None):
        others.append("softcapping of attention scores")
    if not model._supports_attention_backend:
        others.append("attention layers that cannot be replaced")
    if others:
        raise ConfigError(
            f"learner.attention {VARLEN!r} cannot be used with model.path {path!r}, which has {', '.join(others)}; "
            "set learner.attention to 'sdpa' and learner.packing to false"
        )


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packed: Packed | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention [B, L, H, D] of query [B, H, L, D] to key and value [B, H_kv, L, D]; within each trajectory of
    the one row if it is `packed`. transformers calls this in every layer, and builds no mask for it."""
    if packed is not None and _has_kernel(query):
        return _by_kernel(query[0], key[0], value[0], packed, scaling)[None], None
    lengths = [query.shape[2]] if packed is None else list(packed.lengths)
    is_grouped = query.shape[1] != key.shape[1]
    parts = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=is_grouped)
        for q, k, v in zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _has_kernel(query: torch.Tensor) -> bool:
    """Whether the kernel computes it: 16-bit floats, heads of at most 256 numbers, and a GPU since 2020."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    head = query.shape[-1]
    return head <= 256 and head % 8 == 0 and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Packed, scaling: float | None
) -> torch.Tensor:
    """[L, H, D] of query [H, L, D], key and value [H_kv, L, D]."""
    if not _GROUPED and len(query) != len(key):
        key, value = (tensor.repeat_interleave(len(query) // len(tensor), dim=0) for tensor in (key, value))
    longest = max(packed.lengths)
    query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    bounds, options = packed.bounds, {"scale": scaling, "window_size": (-1, 0), **_GROUPED}
    return cast(torch.Tensor, varlen.varlen_attn(query, key, value, bounds, bounds, longest, longest, **options))


AttentionInterface.register(VARLEN, attend)
