"""The report of an update: sums over the trained tokens, by search depth, and the metrics made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cusearch_async.algorithm.losses import MAX_LOG_RATIO, Tokens, TokenTerms
from cusearch_async.metrics.table import Metrics

SUMMED = (
    "tokens",
    "loss",
    "clipped",
    "kl_reference",
    "entropy",
    "advantage",  # a_t A_t
    "advantage_mass",  # a_t |A_t|
    "weight",  # w_t
    "weight_squared",
    "weight_bounded",  # whether w_t is not π_prox / μ itself
    "mismatch",  # k3 of learner against sampling policy
    "difference",  # |log π_prox - log μ|
)


class UpdateReport:
    """Adds up over micro-batches, on the device; `sums` and `largest` are then reduced over ranks before they are
    read."""

    def __init__(self, s_max: int, device: torch.device) -> None:
        self.sums = torch.zeros(len(SUMMED), s_max + 1, dtype=torch.float64, device=device)
        self.largest = torch.zeros((), dtype=torch.float64, device=device)
        """Largest |log π_prox - log μ|."""

    def add(self, depth: torch.Tensor, tokens: Tokens, terms: TokenTerms, entropy: torch.Tensor) -> None:
        """One micro-batch: the `depth` [T] of each token's trajectory, the tokens and what the loss made of them."""
        difference = tokens.log_prox - tokens.log_behaviour
        ratio = torch.exp(torch.clamp(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        values = {
            "tokens": torch.ones_like(entropy),
            "loss": terms.loss,
            "clipped": terms.clipped,
            "kl_reference": terms.kl_reference,
            "entropy": entropy,
            "advantage": tokens.aggregation * tokens.advantages,
            "advantage_mass": tokens.aggregation * tokens.advantages.abs(),
            "weight": tokens.weights,
            "weight_squared": tokens.weights.square(),
            "weight_bounded": (tokens.weights - ratio).abs() > 1e-5 * ratio,
            "mismatch": ratio - difference - 1,
            "difference": difference.abs(),
        }
        self.sums.index_add_(1, depth, torch.stack([values[name].double() for name in SUMMED]))
        self.largest = torch.maximum(self.largest, values["difference"].double().max())

    def metrics(self, optimizer_steps: int) -> Metrics:
        """Averages over all trained tokens, none where there are none, and by depth what SDGA does to the gradient."""
        by_depth = {name: self.sums[row].tolist() for row, name in enumerate(SUMMED)}
        total = {name: sum(values) for name, values in by_depth.items()}
        return self._averages(total, optimizer_steps) | {
            "train/tokens": total["tokens"],
            "train/optimizer_steps": float(optimizer_steps),
            "by_depth/token_share": _shares(by_depth["tokens"]),
            "by_depth/advantage_mass": _shares(by_depth["advantage_mass"]),
            "by_depth/advantage": _ratios(by_depth["advantage"], by_depth["advantage_mass"]),
            "by_depth/mismatch_kl": _ratios(by_depth["mismatch"], by_depth["tokens"]),
            "by_depth/weight_bounded_share": _ratios(by_depth["weight_bounded"], by_depth["tokens"]),
            "by_depth/ess": [
                effective_share(*of_one)
                for of_one in zip(by_depth["weight"], by_depth["weight_squared"], by_depth["tokens"], strict=True)
            ],
        }

    def _averages(self, total: Mapping[str, float], optimizer_steps: int) -> Metrics:
        tokens = total["tokens"]
        if not tokens:
            return {}
        found: Metrics = {
            "train/loss": total["loss"] / max(optimizer_steps, 1),
            "train/clip_fraction": total["clipped"] / tokens,
            "train/kl_reference": total["kl_reference"] / tokens,
            "train/entropy": total["entropy"] / tokens,
            "off_policy/mismatch_kl": total["mismatch"] / tokens,
            "off_policy/logprob_difference_mean": total["difference"] / tokens,
            "off_policy/logprob_difference_max": float(self.largest),
            "off_policy/weight_mean": total["weight"] / tokens,
            "off_policy/weight_bounded_share": total["weight_bounded"] / tokens,
        }
        ess = effective_share(total["weight"], total["weight_squared"], tokens)
        return found | ({} if ess is None else {"off_policy/ess": ess})


def effective_share(weight: float, weight_squared: float, count: float) -> float | None:
    """Effective sample size over sample size, (Σ w)² / (n Σ w²); None without any token or weight."""
    return weight**2 / (count * weight_squared) if weight_squared else None


def _shares(values: Sequence[float]) -> list[float | None]:
    total = sum(values)
    return [value / total if total else 0.0 for value in values]


def _ratios(values: Sequence[float], counts: Sequence[float]) -> list[float | None]:
    return [value / count if count else None for value, count in zip(values, counts, strict=True)]
