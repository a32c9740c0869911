"""Estimates the memory of a learner rank and of a rollout worker, and the staleness of trajectories.

Only the shape of a model is needed, not its weights. Sizes are in bytes. Tensors of known shape are counted exactly,
activations are estimated, and CUDA, NCCL and the allocator get a fixed allowance.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Any

GIB = 1 << 30

FLOAT32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

LOGITS_AT_ONCE = 4096
"""Tokens whose logits the learner holds at a time (`training.model`)."""
LOGIT_COPIES = 4
"""float32 tensors of tokens x vocabulary at the peak of the LM head: logits, their log-softmax, its exponential and the
product of the two for the entropy."""
BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's reduce_bucket_size."""
LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's stage3_max_live_parameters: parameters that ZeRO-3 keeps gathered. Also its sub_group_size: parameters
that the optimizer steps at once."""
DEVICE_ALLOWANCE = 2 * GIB
"""For a learner rank: CUDA context, NCCL buffers, fragmentation of the allocator."""
ENGINE_SHARE = 0.92
"""vLLM's default share of the device memory (`gpu_memory_utilization`)."""
ENGINE_ALLOWANCE = 4 * GIB
"""The part of that share that is not for weights or KV cache: one full forward pass, the logits of the sampler,
CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder of the Qwen2 or Llama kind."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    context: int
    """Longest sequence, in tokens."""
    tied: bool
    """Whether the LM head is the embedding."""
    attention_biases: int = 0
    """Biases of one layer's attention, in elements."""
    mlp_biases: int = 0

    @property
    def parameters(self) -> int:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (query + key) + self.attention_biases
        mlp = 3 * self.hidden * self.intermediate + self.mlp_biases
        norms = 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * (attention + mlp + norms) + self.hidden + embeddings


PUBLISHED = {
    "Qwen/Qwen2.5-3B": ModelShape(
        layers=36,
        heads=16,
        kv_heads=2,
        head_dim=128,
        hidden=2048,
        intermediate=11008,
        vocab=151936,
        context=32768,
        tied=True,
        attention_biases=2048 + 2 * 256,
    ),
    "Qwen/Qwen2.5-7B": ModelShape(
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        hidden=3584,
        intermediate=18944,
        vocab=152064,
        context=131072,
        tied=False,
        attention_biases=3584 + 2 * 512,
    ),
    "meta-llama/Llama-3.2-3B": ModelShape(
        layers=28,
        heads=24,
        kv_heads=8,
        head_dim=128,
        hidden=3072,
        intermediate=8192,
        vocab=128256,
        context=131072,
        tied=True,
    ),
}
"""The paper's models, used when their config.json cannot be read. Source: those files on the Hugging Face Hub."""


def shape_of(path: str) -> ModelShape | None:
    """The shape of a model in a local folder, or of a Hub id in the local cache. Uses no network.

    None when no config can be read, or when the parameters of this kind of model cannot be counted here."""
    from transformers import AutoConfig  # noqa: PLC0415  (takes seconds to import)

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError):
        return None
    return _shape(config) if config.model_type in ("qwen2", "llama") else None


def _shape(config: Any) -> ModelShape:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    query, key = heads * head_dim, kv_heads * head_dim
    if config.model_type == "qwen2":  # always biases of q, k and v, without a setting
        attention_biases, mlp_biases = query + 2 * key, 0
    else:
        attention_biases = (query + 2 * key + config.hidden_size) * config.attention_bias
        mlp_biases = (2 * config.intermediate_size + config.hidden_size) * config.mlp_bias
    return ModelShape(
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        tied=config.tie_word_embeddings,
        attention_biases=attention_biases,
        mlp_biases=mlp_biases,
    )


# --- learner ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    """Memory of one rank, by use."""

    weights: int
    reference: int
    """π_ref, complete on every rank at every stage."""
    optimizer: int
    """float32 masters and Adam's two moments."""
    gradients: int
    """In the model's dtype, over a whole mini-batch."""
    buffers: int
    """DeepSpeed's buckets, and ZeRO-3's gathered parameters."""
    step: int
    """During the optimizer's step only: float32 gradients, and the root of Adam's second moment."""
    activations: int
    """During forward and backward only."""

    @property
    def held(self) -> int:
        """Memory that is in use permanently."""
        return self.weights + self.reference + self.optimizer + self.gradients + self.buffers

    @property
    def peak(self) -> int:
        """Peak memory. Activations and the tensors of the optimizer's step never exist at the same time."""
        return self.held + max(self.step, self.activations) + DEVICE_ALLOWANCE


def learner_memory(
    shape: ModelShape, dtype: str, stage: int, ranks: int, has_reference: bool, tokens: int, checkpointing: bool
) -> LearnerMemory:
    """A rank's memory at ZeRO stage 0-3 with `tokens` in a forward pass, padding included.

    Stage 1 divides masters and moments among the ranks, 2 also the gradients, 3 also the weights. Stage 0 in float32
    runs plain AdamW, whose masters are the weights themselves."""
    parameters, size = shape.parameters, DTYPE_BYTES[dtype]
    share = -(-parameters // ranks)
    stepped = share if stage else parameters
    is_plain = stage == 0 and dtype == "float32"
    stepped_at_once = min(stepped, LIVE_ELEMENTS) if stage == 3 else stepped
    bucket = min(parameters, BUCKET_ELEMENTS)
    gathered = bucket + min(parameters, LIVE_ELEMENTS) if stage == 3 else 0  # ZeRO-3 overlaps: a second bucket
    return LearnerMemory(
        weights=size * (share if stage == 3 else parameters),
        reference=size * parameters if has_reference else 0,
        optimizer=FLOAT32 * stepped * (2 if is_plain else 3),
        gradients=size * (share if stage >= 2 else parameters),
        buffers=size * (bucket + gathered) if stage or ranks > 1 else 0,
        step=FLOAT32 * stepped_at_once * (1 if is_plain else 2),
        activations=activation_bytes(shape, dtype, tokens, checkpointing),
    )


def activation_bytes(shape: ModelShape, dtype: str, tokens: int, checkpointing: bool) -> int:
    """The peak of forward and backward over `tokens`, all of which may be sampled tokens.

    Without checkpointing, the tensors of all layers are kept for the backward pass, and those of the LM head are added.
    With it only the input of each layer is kept; added are those of the head, and later the tensors of one layer and
    their gradients."""
    layer = tokens * layer_bytes_per_token(shape, dtype)
    head = FLOAT32 * LOGIT_COPIES * shape.vocab * min(tokens, LOGITS_AT_ONCE)
    if checkpointing:
        return tokens * shape.layers * shape.hidden * DTYPE_BYTES[dtype] + max(head, 2 * layer)
    return shape.layers * layer + max(head, layer)


def layer_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """Bytes that one layer keeps per token for its backward pass.

    Two norms: input in float32, normalised value, output. Attention: rotated query, key, value, output. MLP: gate, its
    SiLU, up, their product."""
    size = DTYPE_BYTES[dtype]
    norms = 2 * shape.hidden * (FLOAT32 + 2 * size)
    attention = size * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    mlp = 4 * size * shape.intermediate
    return norms + attention + mlp


def forward_tokens(micro_batch_tokens: int, longest: int, minibatch: int, ranks: int) -> int:
    """Most tokens of one forward pass. A trajectory longer than a micro-batch gets its own pass, and a rank never has
    more than its share of a mini-batch."""
    return max(longest, min(micro_batch_tokens, -(-minibatch // ranks) * longest))


# --- rollout ------------------------------------------------------------------------------------------


def kv_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """Keys and values of all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * DTYPE_BYTES[dtype]


def kv_room(shape: ModelShape, dtype: str, gpu_bytes: int) -> int:
    """Bytes that vLLM's share of a GPU leaves for the KV cache; 0 or less when the weights do not fit."""
    return int(ENGINE_SHARE * gpu_bytes) - shape.parameters * DTYPE_BYTES[dtype] - ENGINE_ALLOWANCE


# --- staleness ----------------------------------------------------------------------------------------


def steps_in_flight(workers: int, max_episodes: int, generated: int) -> float:
    """Learner steps' worth of trajectories that the workers can play at once; `generated` are those of one step."""
    return workers * max_episodes / generated


def expected_staleness(workers: int, max_episodes: int, generated: int, max_staleness: int) -> tuple[float, float]:
    """Mean staleness (when the workers are the slower side, when the learner is).

    Little's law: a trajectory that starts while F others are in flight or buffered is trained on F / (N G) steps later.
    Slow workers leave nothing buffered, so F is what they have in flight. Fast workers fill the buffer until admission
    stops them, max_staleness steps ahead of the weights; staleness never gets higher."""
    ahead = steps_in_flight(workers, max_episodes, generated)
    return min(float(max_staleness), ahead), float(max_staleness)


# --- batch --------------------------------------------------------------------------------------------


def singleton_share(questions: int, rollouts: int, budget: int) -> float:
    """Expected share of K trajectories that are alone in their group, if they are chosen from N G at random.

    A given one is alone when the K - 1 others all come from the N G - G of the other groups."""
    size = questions * rollouts
    return comb(size - rollouts, budget - 1) / comb(size - 1, budget - 1)
