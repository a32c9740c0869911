"""The policy loss: decoupled, clipped, token-level GRPO with a k3 KL penalty.

    L = Σ_t a_t ( -w_t min(r_t A_t, clip(r_t, 1-ε_low, 1+ε_high) A_t) + β k3_t - η H_t )
    r_t = π_θ / π_prox,   w_t = sg(π_prox / μ),   k3 = exp(π_ref - π_θ) - (π_ref - π_θ) - 1  (log-probabilities)

t runs over the sampled tokens of a mini-batch; a_t are the aggregation weights. They are fixed for the whole
mini-batch before it is split over ranks and micro-batches, so the sum does not depend on the split.
Sources: CuSearch Eq. "grpo-cusearch"; decoupled PPO and the log-linear π_prox (AReaL); dual clip (Ye et al. 2020);
sequence ratio (GSPO, Zheng et al. 2025); k3 (Schulman); entropy bonus η H_t, off by default, and the names of the
aggregations as in VERL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cusearch_async.algorithm.shapes import require_mode, require_vectors
from cusearch_async.extensions import load_function
from cusearch_async.types import Aggregation, Correction, RatioLevel

MAX_LOG_RATIO = 20.0
MAX_KL = 10.0


def aggregation_weights(lengths: Sequence[int], mode: Aggregation, max_tokens: int) -> list[float]:
    """a_t for the tokens of each trajectory of a mini-batch: one number per trajectory [M].

    `lengths` are sampled tokens per trajectory. token-mean: 1 / Σ lengths. seq-mean-token-mean:
    1 / (M length). seq-mean-token-sum-norm: 1 / (M max_tokens), `max_tokens` being the most tokens that an episode can
    sample (TRL's dr_grpo). VERL divides by the padded length of a response instead, and older versions of it do not
    divide by M: their loss is M times as large.

    Raises: ValueError for another mode, and for a trajectory without sampled tokens."""
    require_mode("the aggregation", mode, Aggregation)
    if lengths and min(lengths) < 1:
        raise ValueError(f"every trajectory must have a sampled token, got lengths {list(lengths)}")
    if mode == "token-mean":
        return [1 / sum(lengths)] * len(lengths)
    if mode == "seq-mean-token-mean":
        return [1 / (len(lengths) * length) for length in lengths]
    return [1 / (len(lengths) * max_tokens)] * len(lengths)


def correction_weights(
    log_prox: torch.Tensor,
    log_behaviour: torch.Tensor,
    lengths: Sequence[int],
    mode: Correction,
    low: float,
    high: float,
) -> torch.Tensor:
    """w_t [T]: the importance weight π_prox / μ of each token, bounded. `lengths` are the tokens of each row: a
    trajectory has one, or those of an agent's episode.

    tis: min(w, high). icepop: w where low <= w <= high, else 0. mask: w where w <= high, else 0.
    geometric: w (at most `high`) if the geometric mean of the row's w lies in [low, high], else 0.
    none: 1.

    Raises: ValueError for another mode, and for log-probabilities that are not both [T], T being the sum of lengths."""
    require_mode("the correction", mode, Correction)
    require_vectors(sum(lengths), log_prox=log_prox, log_behaviour=log_behaviour)
    if mode == "none":
        return torch.ones_like(log_prox)
    log_w = torch.clamp(log_prox - log_behaviour, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    w = torch.exp(log_w)
    if mode == "tis":
        return torch.clamp(w, max=high)
    if mode == "geometric":
        mean = torch.exp(sequence_mean(log_w, lengths))
        return torch.where((mean >= low) & (mean <= high), torch.clamp(w, max=high), 0.0)
    keep = w <= high if mode == "mask" else (w >= low) & (w <= high)
    return torch.where(keep, w, 0.0)


def loglinear_proximal(
    log_policy: torch.Tensor, log_behaviour: torch.Tensor, versions: torch.Tensor, step: int
) -> torch.Tensor:
    """log π_prox [T] without a forward pass, once optimizer steps have been made: between sampling and current policy,
    by their versions.

    log π_prox ≈ log μ + α (log π_θ - log μ),  α = (v_prox - v_μ) / (v_θ - v_μ),  v_prox = `step`, v_θ = step + 1.
    `versions` [T] are integers, the v_μ of each token. Source: AReaL, proximal log-probability approximation. It grows
    crude with staleness (AReaL warns above 10).
    Raises: ValueError for arguments that are not all [T]."""
    require_vectors(len(log_policy), log_policy=log_policy, log_behaviour=log_behaviour, versions=versions)
    age = torch.clamp(step - versions, min=0)
    return log_behaviour + (age / (age + 1)) * (log_policy - log_behaviour)


def clipped(ratio: torch.Tensor, advantages: torch.Tensor, settings: Surrogate) -> torch.Tensor:
    """min(r A, clip(r, 1-ε_low, 1+ε_high) A) [T], with a bound below where A < 0 if `dual_clip` is set."""
    held = torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high) * advantages
    surrogate = torch.minimum(ratio * advantages, held)
    if settings.dual_clip is None:
        return surrogate
    return torch.where(advantages < 0, torch.maximum(surrogate, settings.dual_clip * advantages), surrogate)


Objective = Callable[[torch.Tensor, torch.Tensor, "Surrogate"], torch.Tensor]
"""What is maximised: of the ratios r_t [T], the advantages [T] and the constants of the loss, a value per token [T]."""
OBJECTIVES: dict[str, Objective] = {"clip": clipped}


def objective_of(name: str) -> Objective:
    """One of OBJECTIVES, or a user's own as `package.module:function`. Raises: ConfigError when there is none."""
    return OBJECTIVES.get(name) or load_function("loss.objective", name, OBJECTIVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """The constants of the policy loss."""

    objective: Objective = clipped
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """c > 1: where A < 0, the loss of a token is at most c |A|, however likely it has become; None: no bound."""
    ratio: RatioLevel = "token"
    kl_coef: float = 0.0
    """β."""
    entropy_coef: float = 0.0
    """η."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The T sampled tokens of a micro-batch, its rows (`types.Row`) laid end to end. All tensors [T], float32, without
    gradient."""

    lengths: Sequence[int]
    """Tokens of each row; they sum to T."""
    log_behaviour: torch.Tensor
    """log μ, recorded when the token was sampled."""
    log_prox: torch.Tensor
    log_reference: torch.Tensor | None
    """None without a KL penalty."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """w_t, from `correction_weights`."""
    aggregation: torch.Tensor
    """a_t, from `aggregation_weights` over the whole mini-batch."""


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Per-token values [T] of the sampled tokens of a micro-batch, detached, for the metrics."""

    loss: torch.Tensor
    """Sums to the loss."""
    clipped: torch.Tensor
    """bool: the objective is not r A itself; with `clip` the token has no gradient, its ratio has gone far enough."""
    kl_reference: torch.Tensor


def policy_loss(
    log_policy: torch.Tensor, tokens: Tokens, settings: Surrogate, entropy: torch.Tensor | None = None
) -> tuple[torch.Tensor, TokenTerms]:
    """The loss summed over the given tokens, whose current log-probabilities are `log_policy` [T], float32.

    `entropy` [T], H_t of the policy where it sampled each token, is needed for an entropy bonus only. Gradients flow
    through these two. The bonus has no weight w_t: it is of the policy, whichever token was sampled (as in VERL).

    Raises: ValueError for an entropy bonus without entropies, for what is not [T], and for another ratio."""
    require_mode("the ratio", settings.ratio, RatioLevel)
    # broadcasting would make a loss of anything: advantages [T, 1] make one of T² terms
    vectors = {name: getattr(tokens, name) for name in Tokens.__slots__ if name != "lengths"}
    require_vectors(sum(tokens.lengths), log_policy=log_policy, entropy=entropy, **vectors)
    advantages = tokens.advantages
    log_ratio = log_policy - tokens.log_prox
    if settings.ratio == "sequence":
        log_ratio = sequence_mean(log_ratio, tokens.lengths)
    ratio = torch.exp(torch.clamp(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    surrogate = settings.objective(ratio, advantages, settings)
    require_vectors(len(advantages), objective=surrogate)
    per_token = -tokens.weights * surrogate
    kl = torch.zeros_like(log_policy)
    if tokens.log_reference is not None:
        kl = k3_kl(log_policy, tokens.log_reference)
        per_token = per_token + settings.kl_coef * kl
    if settings.entropy_coef:
        if entropy is None:
            raise ValueError("an entropy bonus needs the entropy of every token")
        per_token = per_token - settings.entropy_coef * entropy
    weighted = tokens.aggregation * per_token
    terms = TokenTerms(weighted.detach(), (surrogate != ratio * advantages).detach(), kl.detach())
    return weighted.sum(), terms


def sequence_mean(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The mean over each row's tokens, at each of its tokens [T]."""
    parts = torch.split(values, list(lengths))
    return torch.cat([part.mean().expand(len(part)) for part in parts])


def k3_kl(log_policy: torch.Tensor, log_reference: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(π_θ || π_ref) per token, never negative, at most MAX_KL."""
    delta = torch.clamp(log_reference - log_policy, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.clamp(torch.exp(delta) - delta - 1, max=MAX_KL)
