"""Estimates the memory of a learner rank and of a rollout worker from a model's shape, and the share of singletons.

Sizes are in bytes. Tensors of known shape are counted exactly, activations by running the module without memory, and
CUDA, NCCL and the allocator get a fixed allowance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from cusearch_async.cli.preflight.shapes import ModelShape
from cusearch_async.config import Config, LearnerConfig

GIB = 1 << 30

FLOAT32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = {"fp32": 4, "bf16": 2}

BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default of reduce_bucket_size."""
LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's default of stage3_max_live_parameters: parameters that ZeRO-3 keeps gathered. Also of sub_group_size:
parameters that its optimizer steps at once."""
DEVICE_ALLOWANCE = 2 * GIB
"""For a learner rank: CUDA context, NCCL buffers, fragmentation of the allocator."""
FP8 = "fp8"
"""How vLLM's names of quantisations to one byte begin."""
ENGINE_SHARE = 0.92
"""vLLM's default share of the device memory (`gpu_memory_utilization`)."""
ENGINE_ALLOWANCE = 4 * GIB
"""The part of that share that is not for weights or KV cache: one full forward pass, the logits of the sampler,
CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    weights: int
    reference: int
    """π_ref; with ZeRO-3 divided as the policy is."""
    optimizer: int
    """float32 masters and Adam's two moments."""
    gradients: int
    """Over a whole mini-batch."""
    buffers: int
    """DeepSpeed's buckets, and ZeRO-3's gathered parameters."""
    step: int
    """During the optimizer's step only: float32 gradients, and the root of Adam's second moment."""
    activations: int
    """During forward and backward only."""
    scoring: int
    """During π_ref's forward pass only: its activations, and π_ref itself where it waits in the host's memory."""
    host: int
    """In the host's memory: π_ref, and DeepSpeed's offload. With the optimizer's state that is a float32 gradient, a
    copy of the stepped weights, and, unless gradients are added up in float32 on the device, their sum."""

    @property
    def held(self) -> int:
        """Permanently."""
        return self.weights + self.reference + self.optimizer + self.gradients + self.buffers

    @property
    def peak(self) -> int:
        """A pass and the optimizer's step never come at the same time."""
        return self.held + max(self.step, self.activations, self.scoring) + DEVICE_ALLOWANCE


def adapter_parameters(shape: ModelShape, rank: int, names: Sequence[str] = ()) -> int:
    """Elements of A [rank, inputs] and B [outputs, rank] of the layers `names`, or of all linear layers."""
    return rank * sum(ins + outs for name, ins, outs in shape.linear if not names or name in names)


def trained_parameters(shape: ModelShape, learner: LearnerConfig) -> int:
    """Elements that have a gradient, a master and moments."""
    if learner.lora.rank:
        return adapter_parameters(shape, learner.lora.rank, learner.lora.names)
    if learner.trained_layers is None:
        return shape.parameters
    layers = shape.parameters - shape.vocab * shape.hidden * (1 if shape.tied else 2)
    return -(-layers * min(learner.trained_layers, shape.layers) // shape.layers)


def learner_memory(shape: ModelShape, config: Config, tokens: int, stage: int | None = None) -> LearnerMemory:
    """A rank's memory at ZeRO stage 0-3 (the config's by default) with `tokens` in a forward pass, padding included.

    Stage 1 divides masters and moments among the ranks, 2 also the gradients, 3 also the weights. Stage 0 in float32
    runs plain AdamW, whose masters are the weights themselves. Gradients count on the device even where the optimizer
    is offloaded: DeepSpeed moves them at different times in different stages. An adapter (learner.lora) is what is
    trained then: the model's weights are held too, and are the reference; activations stay, too, since the adapter's
    A needs the input of each layer for its gradient."""
    from cusearch_async.cli.preflight.activations import passes  # noqa: PLC0415  (imports torch)

    learner, dtype = config.learner, config.model.dtype
    given, stage = learner.deepspeed, learner.zero_stage if stage is None else stage
    parameters, size, lora = shape.parameters, DTYPE_BYTES[dtype], learner.lora
    trained = trained_parameters(shape, learner)
    share = -(-trained // learner.ranks)
    weights = size * (-(-parameters // learner.ranks) if stage == 3 else parameters)
    stepped, added = share if stage else trained, size * (share if stage == 3 else trained) if lora.rank else 0
    is_plain = stage == 0 and dtype == "float32"
    optimizer = FLOAT32 * stepped * (2 if is_plain else 3)
    options = given.zero_optimization
    stepped_at_once = min(stepped, int(options.get("sub_group_size", LIVE_ELEMENTS))) if stage == 3 else stepped
    steps_on_host = stage > 0 and given.offload("offload_optimizer") is not None
    adds_on_device = dtype == "bfloat16" and given.grad_accum_dtype == "fp32" and stage in (1, 2)
    rests_on_host = stage == 3 and given.offload("offload_param") is not None
    bucket = min(trained, int(options.get("reduce_bucket_size", BUCKET_ELEMENTS)))
    gathered = min(parameters, int(options.get("stage3_max_live_parameters", LIVE_ELEMENTS)))
    collected = bucket + gathered if stage == 3 else 0  # ZeRO-3 overlaps: a second bucket
    reference = weights if config.loss.kl_coef > 0 and not lora.rank else 0
    waits = learner.reference == "cpu" and reference > 0
    of = passes(
        shape, dtype, tokens, learner.gradient_checkpointing, learner.logits_chunk_tokens, config.loss.entropy_coef > 0
    )
    return LearnerMemory(
        weights=added + (0 if rests_on_host else weights),
        reference=0 if waits else reference,
        optimizer=0 if steps_on_host else optimizer,
        gradients=GRADIENT_BYTES.get(given.grad_accum_dtype or "", size) * (share if stage >= 2 else trained),
        buffers=size * (bucket + collected) if stage or learner.ranks > 1 else 0,
        step=0 if steps_on_host else FLOAT32 * stepped_at_once * (1 if is_plain else 2),
        activations=of.training,
        scoring=of.scoring + (reference if waits and stage < 3 else 0),
        host=(optimizer + stepped * (FLOAT32 + size * (1 if adds_on_device else 2))) * steps_on_host
        + weights * rests_on_host
        + reference * waits,
    )


def forward_tokens(config: Config) -> int:
    """Most tokens of one forward pass. A trajectory longer than a micro-batch gets its own pass, and a rank never has
    more than its share of a mini-batch."""
    longest, share = config.episode.max_tokens, -(-config.loss.minibatch // config.learner.ranks)
    return max(longest, min(config.learner.micro_batch_tokens, share * longest))


def checkpoint_bytes(shape: ModelShape, config: Config) -> int:
    """The model in Hugging Face's format, an adapter beside it, and float32 masters and moments of what is trained. All
    ranks together."""
    trained = trained_parameters(shape, config.learner)
    adapter = trained if config.learner.lora.rank else 0
    return (shape.parameters + adapter) * DTYPE_BYTES[config.model.dtype] + trained * 3 * FLOAT32


def copied_bytes(shape: ModelShape, config: Config) -> int:
    """What the ranks of the first node copy of a checkpoint before they write it: the model, and their parts of masters
    and moments."""
    learner = config.learner
    parts = trained_parameters(shape, learner) * 3 * FLOAT32
    elsewhere = parts - parts // learner.nodes if learner.zero_stage else 0
    return checkpoint_bytes(shape, config) - elsewhere


def version_bytes(shape: ModelShape, config: Config) -> int:
    """A published weight version: an adapter, or all parameters, and the LM head also where it is the embedding."""
    dtype = config.model.dtype
    if config.learner.lora.rank:
        return DTYPE_BYTES[dtype] * trained_parameters(shape, config.learner)
    head = shape.vocab * shape.hidden if shape.tied else 0
    return DTYPE_BYTES[dtype] * (shape.parameters + head)


def host_bytes(shape: ModelShape, config: Config) -> tuple[int, int, int]:
    """Host memory of a node's ranks: while they load, permanently, and while a checkpoint is copied and written.

    Each rank loads the model, and then copies it for π_ref (not beside an adapter); with ZeRO-3 it loads its share, and
    one parameter more.
    Where learner and engines take turns, what waits there counts as permanent, the engines' weights too."""
    ranks, stage, dtype = config.learner.ranks_per_node, config.learner.zero_stage, config.model.dtype
    memory = learner_memory(shape, config, forward_tokens(config))
    copies = 2 if config.loss.kl_coef > 0 and not config.learner.lora.rank else 1
    share = -(-shape.parameters // config.learner.ranks) + shape.largest_layer
    elements = ranks * (share if stage == 3 else shape.parameters)
    held = ranks * memory.host
    if config.run.colocate:
        held += ranks * memory.held + engines(config) * shape.parameters * DTYPE_BYTES[dtype]
    collected = version_bytes(shape, config) if stage == 3 else 0  # a version is published at the same time
    return copies * DTYPE_BYTES[dtype] * elements, held, held + copied_bytes(shape, config) + collected


def engines(config: Config) -> int:
    """Of the workers, and of the evaluator."""
    return config.rollout.workers + bool(config.eval.every)


def staged_bytes(shape: ModelShape, config: Config) -> int:
    """Host memory that all engines on GPUs keep for new weights: each of their processes a page-locked block for the
    whole model, which torch rounds up to a power of two."""
    if config.learner.lora.rank:
        return 0
    processes = engines(config) * config.rollout.vllm.tensor_parallel_size
    return processes * (1 << (version_bytes(shape, config) - 1).bit_length())


def kv_bytes_per_token(shape: ModelShape, config: Config) -> int:
    """Keys and values of all layers on one of an engine's GPUs; a head that cannot be divided is on several."""
    vllm = config.rollout.vllm
    size = 1 if vllm.kv_cache_dtype.startswith(FP8) else DTYPE_BYTES[config.model.dtype]
    return 2 * shape.layers * -(-shape.kv_heads // vllm.tensor_parallel_size) * shape.head_dim * size


def engine_weights(shape: ModelShape, config: Config) -> int:
    """On one of an engine's GPUs. fp8 leaves the embedding and the LM head as they are; what other names do is not
    known here."""
    vllm, size = config.rollout.vllm, DTYPE_BYTES[config.model.dtype]
    whole = shape.parameters
    if (vllm.quantization or "").startswith(FP8):
        whole = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    return (shape.parameters - whole + size * whole) // vllm.tensor_parallel_size


def kv_room(shape: ModelShape, config: Config, gpu_bytes: int) -> int:
    """Bytes that vLLM's share of each of an engine's GPUs leaves for the KV cache; 0 or less when the weights do not
    fit."""
    share = config.rollout.vllm.gpu_memory_utilization or ENGINE_SHARE
    return int(share * gpu_bytes) - engine_weights(shape, config) - ENGINE_ALLOWANCE


def splits_evenly(shape: ModelShape, split: int) -> bool:
    """Whether vLLM can divide the model's heads over `split` GPUs: key heads are divided, or repeated."""
    return shape.heads % split == 0 and (shape.kv_heads % split == 0 or split % shape.kv_heads == 0)


def singleton_share(questions: int, rollouts: int, budget: int) -> float:
    """Expected share of K trajectories that are alone in their group, if they are chosen from N G at random.

    A given one is alone when the K - 1 others all come from the N G - G of the other groups."""
    size = questions * rollouts
    return comb(size - rollouts, budget - 1) / comb(size - 1, budget - 1)
