"""Settings of the loss and of the learner."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from cusearch_async.config.engines import DeepSpeedConfig
from cusearch_async.config.section import Free, Names, Numbers, Section, Shared
from cusearch_async.types import Aggregation, Correction, Proximal, RatioLevel


class LossConfig(Section):
    minibatch: int = Field(32, ge=1)
    """M, trajectories per optimizer step."""
    objective: str = "clip"
    """The objective per token, which is maximised: `clip` (PPO's clipped surrogate), or your own function of ratios,
    advantages and constants, as package.module:function."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio to the proximal policy is clipped at 1 - clip_low …"""
    clip_high: float = Field(0.2, gt=0)
    """… and at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Upper bound of a token's loss where its advantage is negative, as a multiple of the advantage's size; None for no
    bound."""
    ratio: RatioLevel = "token"
    """Importance ratio per `token` or per `sequence` (GSPO). `sequence` needs a much smaller clip (3e-4) and
    seq-mean-token-mean."""
    proximal: Proximal = "recomputed"
    """How π_prox is computed: `recomputed` by a forward pass; `loglinear` by interpolation, without that pass."""
    kl_coef: float = Field(0.001, ge=0)
    """β, the weight of the KL penalty; with 0 no reference model is loaded."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus: the entropy of the policy at each sampled token. The paper's loss has none;
    ZeroSearch uses 0.001."""
    aggregation: Aggregation = "token-mean"
    """How the losses of tokens become one number, with VERL's names: the mean over all tokens (token-mean), the mean
    over trajectories of their means (seq-mean-token-mean), or of their sums divided by the maximum number of tokens
    that an episode samples (seq-mean-token-sum-norm)."""
    correction: Correction = "tis"
    """How the off-policy weight π_prox/μ is bounded: tis, icepop, mask, geometric or none."""
    correction_low: float = Field(0.5, ge=0)
    """Lower bound of icepop (per token) and geometric (per trajectory)."""
    correction_high: float | None = Field(None, gt=0)
    """Upper bound of all corrections; None for 5 with mask and 2 with the others."""

    @property
    def correction_bound(self) -> float:
        """The upper bound of the off-policy weight: `correction_high`, or the correction's own."""
        if self.correction_high is not None:
            return self.correction_high
        return 5.0 if self.correction == "mask" else 2.0


ALL_LINEAR = "all-linear"


class LoraConfig(Section):
    rank: Shared[int] = Field(0, ge=0, le=512)
    """Rank of the adapter that is trained in place of the model's own weights, which stay as they are (LoRA); 0 trains
    the model itself. The adapter alone is published; the reference policy is the model without it."""
    alpha: Shared[int] = Field(32, ge=1)
    """What the adapter computes is multiplied by alpha / rank."""
    targets: Shared[Names] = Field((ALL_LINEAR,), min_length=1)
    """Layers that have an adapter, by their names in the model, like q_proj; `all-linear` is all but the LM head."""

    @field_validator("targets")
    @classmethod
    def _are_layers(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if ALL_LINEAR in targets and len(targets) > 1:
            raise ValueError(f"{ALL_LINEAR!r} stands alone, got {list(targets)}")
        outside = sorted({"lm_head", "embed_tokens"}.intersection(targets))
        if outside:
            raise ValueError(f"{outside[0]} cannot have an adapter; name layers of the model's blocks, like q_proj")
        return targets

    @property
    def names(self) -> tuple[str, ...]:
        """The targets by name; empty for all linear layers."""
        return () if self.targets == (ALL_LINEAR,) else self.targets


class LearnerConfig(Section):
    lr: float = Field(1e-6, gt=0)
    """Learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Learner steps over which the learning rate grows linearly."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW."""
    grad_clip: float = Field(1.0, gt=0)
    """Maximum 2-norm of the gradient over all parameters; a larger gradient is scaled down to it."""
    micro_batch_tokens: Free[int] = Field(16384, ge=1)
    """Tokens per forward pass and rank, padding included."""
    ranks: Free[int] = Field(1, ge=1)
    """Number of learner processes on all nodes, one GPU each; the trajectories of each step are divided among them. If
    it is not given, a launcher's WORLD_SIZE is used."""
    nodes: Free[int] = Field(1, ge=1)
    """Number of machines that the ranks are on, equally many on each; with more than one a launcher starts them. If it
    is not given, a launcher's WORLD_SIZE / LOCAL_WORLD_SIZE is used."""
    collective_timeout_s: Free[float] = Field(600.0, ge=1)
    """Seconds that a rank waits for the others, when they start and in each collective; then it ends, and says which
    rank did not arrive."""
    zero_stage: Free[int] = Field(1, ge=0, le=3)
    """DeepSpeed's ZeRO stage: 0 divides nothing among the ranks, 1 the optimizer state, 2 also gradients, 3 also
    weights."""
    packing: Free[bool] = False
    """Concatenate the trajectories of a forward pass instead of padding them. Use it with attention `varlen`: `sdpa`
    computes the attention between trajectories too, and then masks it. A model in which a trajectory would see the one
    before it, as recurrent and convolutional layers do, is refused."""
    attention: Free[Literal["sdpa", "varlen", "flash_attention_2"]] = "sdpa"
    """Attention kernel of the learner. `varlen` is torch's own for packed trajectories (in bfloat16 on a GPU; elsewhere
    one call of sdpa for each trajectory); flash_attention_2 needs the flash-attn package and a GPU."""
    gradient_checkpointing: Free[bool] = False
    """Recompute activations in the backward pass instead of keeping them: less memory, a third more time."""
    compile: Free[bool] = False
    """Compile the model's layers with torch.compile: faster passes, after one to two minutes of compiling in the first
    step, which later starts find in torch's cache. On a CPU it needs a C++ compiler. Not with ZeRO stage 3, an
    adapter, gradient checkpointing or attention other than sdpa."""
    logits_at_once: Free[int] = Field(1024, ge=1)
    """Sampled tokens whose logits are held at a time, two float32 numbers for each token of the vocabulary: with
    150,000 of them logits dwarf the model."""
    reference: Free[Literal["device", "cpu"]] = "device"
    """Where the reference policy waits for its forward pass: on the learner's GPU, or in the host's memory. With ZeRO
    stage 3 it is divided among the ranks, as the policy is."""
    checkpoint_every: Free[int] = Field(10, ge=1)
    """Learner steps between checkpoints; a run that was killed continues from the newest checkpoint."""
    keep_checkpoints: Free[int] = Field(2, ge=1)
    """Number of checkpoints that are kept; older ones are deleted."""
    publish_every: int = Field(1, ge=1)
    """Learner steps between published weight versions."""
    cores: Free[Numbers] = ()
    """CPU cores of the learner on each node, divided among its ranks; empty for all."""
    gpus: Free[Numbers] = ()
    """CUDA devices of the learner on each node, one per rank; empty: the last ones of the machine."""
    lora: LoraConfig = LoraConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes
