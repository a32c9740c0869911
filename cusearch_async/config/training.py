"""Settings of the loss and of the learner."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from cusearch_async.config.engines import DeepSpeedConfig
from cusearch_async.config.section import Free, Numbers, ObjectsUrl, Section, Shared
from cusearch_async.extensions import Names
from cusearch_async.types import Aggregation, Correction, Proximal, RatioLevel


class LossConfig(Section):
    minibatch: int = Field(32, ge=1)
    """M, trajectories per optimizer step."""
    objective: str = "clip"
    """Objective per token, maximised: `clip` (PPO's clipped surrogate), or your own, as package.module:function."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio to the proximal policy is clipped at 1 - clip_low …"""
    clip_high: float = Field(0.2, gt=0)
    """… and at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Upper bound of a token's loss where its advantage is negative, as a multiple of the advantage's size; None: no
    bound."""
    ratio: RatioLevel = "token"
    """Importance ratio per `token` or `sequence` (GSPO); `sequence` needs a much smaller clip (3e-4) and
    seq-mean-token-mean."""
    proximal: Proximal = "recomputed"
    """π_prox of all mini-batches but the first, for which it is the policy: `recomputed` by a forward pass, or
    `loglinear`, interpolated without one."""
    kl_coef: float = Field(0.001, ge=0)
    """β, weight of the KL penalty; 0 loads no reference model."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus per sampled token. The paper's loss has none; ZeroSearch uses 0.001."""
    aggregation: Aggregation = "token-mean"
    """Mean over all tokens (token-mean), over trajectories of their means (seq-mean-token-mean), or of their sums
    divided by the most tokens that an episode can sample (seq-mean-token-sum-norm); VERL's names."""
    correction: Correction = "tis"
    """Bound of the off-policy weight π_prox/μ: tis, icepop, mask, geometric or none."""
    correction_low: float = Field(0.5, ge=0)
    """Lower bound of icepop (per token) and geometric (per trajectory, or row of an agent)."""
    correction_high: float | None = Field(None, gt=0, allow_inf_nan=True)
    """Upper bound of all corrections; None: 5 with mask, 2 with the others."""

    @property
    def correction_bound(self) -> float:
        """The upper bound of the off-policy weight: `correction_high`, or the correction's own."""
        if self.correction_high is not None:
            return self.correction_high
        return 5.0 if self.correction == "mask" else 2.0


ALL_LINEAR = "all-linear"


class LoraConfig(Section):
    rank: Shared[int] = Field(0, ge=0, le=512)
    """Rank of the trained adapter (LoRA); 0 trains the model itself."""
    alpha: Shared[int] = Field(32, ge=1)
    """The adapter's output is multiplied by alpha / rank."""
    targets: Shared[Names] = Field((ALL_LINEAR,), min_length=1)
    """Layers with an adapter, by their names in the model, like q_proj; `all-linear`: all but the LM head."""

    @field_validator("targets")
    @classmethod
    def _are_layers(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if ALL_LINEAR in targets and len(targets) > 1:
            raise ValueError(f"{ALL_LINEAR!r} cannot be combined with other targets, got {list(targets)}")
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
    """Learning rate of AdamW, whose betas are 0.9 and 0.999."""
    warmup_steps: int = Field(0, ge=0)
    """Learner steps of linear warm-up."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """The learning rate after the warm-up: `constant`, or falling linearly to 0 at run.steps."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW."""
    grad_clip: float = Field(1.0, gt=0, allow_inf_nan=True)
    """Maximum 2-norm of the whole gradient; a larger one is scaled down. inf: none is."""
    micro_batch_tokens: Free[int] = Field(16384, ge=1)
    """Tokens per forward pass and rank, padding included."""
    ranks: Free[int] = Field(1, ge=1)
    """Learner processes on all nodes together, one GPU each; unset: a launcher's WORLD_SIZE."""
    nodes: Free[int] = Field(1, ge=1)
    """Machines of the ranks, equally many on each; more than one needs a launcher. Unset: its WORLD_SIZE /
    LOCAL_WORLD_SIZE."""
    collective_timeout_s: Free[float] = Field(600.0, ge=1)
    """How long a rank waits for the others, at the start and in each collective, before it ends and names the missing
    one."""
    zero_stage: Free[int] = Field(1, ge=0, le=3)
    """DeepSpeed's ZeRO stage: 0 shards nothing over the ranks, 1 the optimizer state, 2 also gradients, 3 also
    weights."""
    trained_layers: int | None = Field(None, ge=1)
    """How many of the uppermost layers are trained, with the final norm; the layers below, the embedding and the LM
    head stay as they are, which takes less time and memory. None: the whole model. Not with an adapter."""
    packing: Free[bool] = False
    """Concatenate the trajectories of a forward pass instead of padding them; with attention `varlen`, as `sdpa` also
    computes, then masks, attention between them. Models that mix neighbours otherwise (recurrent or convolutional
    layers) are refused."""
    attention: Free[Literal["sdpa", "varlen", "flash_attention_2"]] = "sdpa"
    """Attention kernel. `varlen` is torch's for packed trajectories (bfloat16 on a GPU; elsewhere one sdpa call per
    trajectory); flash_attention_2 needs the flash-attn package and a GPU."""
    gradient_checkpointing: Free[bool] = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    compile: Free[bool] = False
    """Compile the layers with torch.compile: faster passes after one to two minutes of compiling, cached for later
    starts. Needs a C++ compiler on a CPU. Not with ZeRO stage 3, an adapter, gradient checkpointing or attention other
    than sdpa."""
    logits_chunk_tokens: Free[int] = Field(1024, ge=1)
    """Sampled tokens whose logits are held at a time, in the model's dtype: for each of them as many as the vocabulary
    has tokens."""
    reference: Free[Literal["device", "cpu"]] = "device"
    """Where the reference policy waits for its forward pass: on the learner's GPU, or in host memory. ZeRO stage 3
    shards it, too."""
    checkpoint_every: Free[int] = Field(10, ge=1)
    """Learner steps between checkpoints; a killed run continues from the newest."""
    keep_checkpoints: Free[int] = Field(2, ge=1)
    """Checkpoints to keep, besides the best one of those that were scored (eval.in_order); older ones are deleted.
    Redis keeps the pools of all steps since the oldest of them."""
    checkpoint_objects: Free[ObjectsUrl | None] = None
    """An object store that keeps the checkpoints, too, and what a learner on another machine needs to continue; for
    this run only. May be weights.objects."""
    publish_every: int = Field(1, ge=1)
    """Learner steps between published weight versions."""
    cores: Free[Numbers] = ()
    """CPU cores of the learner on each node, divided among its ranks; empty: all."""
    gpus: Free[Numbers] = ()
    """CUDA devices of the learner on each node, one per rank, by their number among the visible ones, as torch's
    cuda:N: with CUDA_VISIBLE_DEVICES=4,5 number 0 is 4. Empty: the last ones."""
    lora: LoraConfig = LoraConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes
