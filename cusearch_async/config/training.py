"""The loss, and the learner that minimises it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cusearch_async.config.section import Section
from cusearch_async.types import Aggregation, Correction, Proximal, RatioLevel


class LossConfig(Section):
    minibatch: int = Field(32, ge=1)
    """M, trajectories per optimizer step."""
    objective: str = "clip"
    """What is maximised of a token: `clip`, PPO's clipped surrogate, or a function of your own of ratios, advantages
    and constants, as package.module:function."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio to the proximal policy is clipped at 1 - clip_low …"""
    clip_high: float = Field(0.2, gt=0)
    """… and at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Where the advantage is negative, the loss of a token is at most this many times its size; None for no bound."""
    ratio: RatioLevel = "token"
    """`sequence` (GSPO) wants a much smaller clip (3e-4) and seq-mean-token-mean."""
    proximal: Proximal = "recomputed"
    """Where π_prox comes from; `loglinear` saves its forward pass."""
    kl_coef: float = Field(0.001, ge=0)
    """β; 0 loads no reference model."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus, the entropy of the policy where it sampled a token; the paper's loss has none,
    ZeroSearch's is 0.001."""
    aggregation: Aggregation = "token-mean"
    """How the losses of tokens become one number, by VERL's names: the mean over all tokens (token-mean), the mean over
    trajectories of their means (seq-mean-token-mean), or of their sums divided by the most tokens of an episode
    (seq-mean-token-sum-norm)."""
    correction: Correction = "tis"
    """How the off-policy weight π_prox/μ is bounded: tis, icepop, mask, geometric or none."""
    correction_low: float = Field(0.5, ge=0)
    """Lower bound of icepop (per token) and geometric (per trajectory)."""
    correction_high: float | None = Field(None, gt=0)
    """Upper bound of all of them; None for 5 with mask and 2 with the others."""

    @property
    def correction_bound(self) -> float:
        """The upper bound of the off-policy weight: `correction_high`, or the correction's own."""
        if self.correction_high is not None:
            return self.correction_high
        return 5.0 if self.correction == "mask" else 2.0


class LearnerConfig(Section):
    lr: float = Field(1e-6, gt=0)
    """Learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Learner steps over which the learning rate grows linearly."""
    weight_decay: float = Field(0.0, ge=0)
    """Of AdamW."""
    grad_clip: float = Field(1.0, gt=0)
    """Longest gradient, as a 2-norm over all parameters; a longer one is scaled down to it."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Tokens per forward pass and rank, padding included."""
    ranks: int = Field(1, ge=1)
    """Processes of the learner, one GPU each; they share every step's trajectories."""
    zero_stage: int = Field(1, ge=0, le=3)
    """DeepSpeed's ZeRO: 0 divides nothing among the ranks, 1 the optimizer state, 2 also gradients, 3 also weights."""
    packing: bool = False
    """Lay the trajectories of a forward pass end to end instead of padding them. Meant for flash_attention_2, which
    skips what lies between them; `sdpa` builds the whole mask (0.66 times as fast as padding on a CPU)."""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """Attention kernel of the learner; flash_attention_2 needs the flash-attn package and a GPU."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more time."""
    checkpoint_every: int = Field(10, ge=1)
    """Learner steps between checkpoints; a run that was killed goes on from the newest."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints that are kept; older ones are deleted."""
    publish_every: int = Field(1, ge=1)
    """Learner steps between published weight versions."""
    cores: tuple[int, ...] = ()
    """CPU cores of the learner; empty for all. Rank r takes its share of them in order."""
    gpus: tuple[int, ...] = ()
    """CUDA devices of the learner, one per rank; empty for all."""
