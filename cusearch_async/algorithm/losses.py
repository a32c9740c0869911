"""The policy loss: decoupled, clipped, token-level GRPO with a k3 KL penalty.

    L = Σ_t a_t ( -w_t min(r_t A_t, clip(r_t, 1-ε_low, 1+ε_high) A_t) + β k3_t )
    r_t = π_θ / π_prox,   w_t = sg(π_prox / μ),   k3 = exp(π_ref - π_θ) - (π_ref - π_θ) - 1  (log-probabilities)

t runs over the sampled tokens of a mini-batch; a_t are the aggregation weights. They are fixed for the whole
mini-batch before it is split over ranks and micro-batches, so the sum does not depend on the split.
Sources: CuSearch Eq. "grpo-cusearch"; decoupled PPO (AReaL); k3 (Schulman); aggregation names as in VERL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cusearch_async.types import Aggregation, Correction

MAX_LOG_RATIO = 20.0
MAX_KL = 10.0


def aggregation_weights(lengths: Sequence[int], mode: Aggregation, max_tokens: int) -> list[float]:
    """a_t for the tokens of each trajectory of a mini-batch: one number per trajectory [M].

    `lengths` are sampled tokens per trajectory. token-mean: 1 / Σ lengths. seq-mean-token-mean:
    1 / (M length). seq-mean-token-sum-norm: 1 / (M max_tokens), `max_tokens` being the most an episode can hold.
    """
    if mode == "token-mean":
        return [1 / sum(lengths)] * len(lengths)
    if mode == "seq-mean-token-mean":
        return [1 / (len(lengths) * length) for length in lengths]
    return [1 / (len(lengths) * max_tokens)] * len(lengths)


def correction_weights(
    log_prox: NDArray[np.float32], log_behaviour: NDArray[np.float32], mode: Correction, low: float, high: float
) -> NDArray[np.float32]:
    """w_t [S] of one trajectory: the importance weight π_prox / μ, bounded.

    tis: min(w, high). icepop: w where low <= w <= high, else 0. mask: w where w <= high, else 0.
    geometric: w (at most `high`) if the geometric mean of the trajectory's w lies in [low, high], else 0.
    none: 1."""
    if mode == "none":
        return np.ones_like(log_prox)
    log_w = np.clip(log_prox - log_behaviour, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    w: NDArray[np.float32] = np.exp(log_w)
    if mode == "tis":
        return np.minimum(w, np.float32(high))
    if mode == "geometric":
        inside = low <= np.exp(log_w.mean()) <= high
        return np.minimum(w, np.float32(high)) if inside else np.zeros_like(w)
    keep = w <= high if mode == "mask" else (w >= low) & (w <= high)
    return np.where(keep, w, np.float32(0))


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Per-token values [T] of the sampled tokens of a micro-batch, detached, for the metrics."""

    clipped: torch.Tensor  # bool
    kl_reference: torch.Tensor
    ratio: torch.Tensor


def policy_loss(
    log_policy: torch.Tensor,
    log_prox: torch.Tensor,
    log_reference: torch.Tensor | None,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    aggregation: torch.Tensor,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
) -> tuple[torch.Tensor, TokenTerms]:
    """The loss summed over the given tokens; all tensors [T], float32. Gradients flow through `log_policy` only."""
    ratio = torch.exp(torch.clamp(log_policy - log_prox, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    unclipped = ratio * advantages
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * advantages
    per_token = -weights * torch.minimum(unclipped, clipped)
    kl = torch.zeros_like(log_policy)
    if log_reference is not None:
        kl = k3_kl(log_policy, log_reference)
        per_token = per_token + kl_coef * kl
    terms = TokenTerms((clipped < unclipped).detach(), kl.detach(), ratio.detach())
    return (aggregation * per_token).sum(), terms


def k3_kl(log_policy: torch.Tensor, log_reference: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(π_θ || π_ref) per token, never negative, at most MAX_KL."""
    delta = torch.clamp(log_reference - log_policy, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.clamp(torch.exp(delta) - delta - 1, max=MAX_KL)
