"""GPUs and their memory."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from cusearch_async.cli.preflight import adapters, sizing
from cusearch_async.cli.preflight.finding import Finding, Status
from cusearch_async.cli.preflight.shapes import ModelShape
from cusearch_async.cli.preflight.sizing import GIB, LearnerMemory
from cusearch_async.config import Config
from cusearch_async.lifecycle.cuda import count_gpus

TIGHT = 0.9
"""An estimate above this share of a GPU gives a warning: the real use may be larger."""
ASLEEP = int(1.5 * GIB)
"""Assumed for a process that waits for its turn on a GPU: CUDA's context and compiled kernels. Not measured."""
MEAN_LENGTH = 0.5
"""Assumed mean length of an episode, as a share of the longest: most end with an answer much earlier."""


def stages(config: Config, shape: ModelShape, gpu_bytes: int) -> Table:
    """A learner rank's memory in GiB, one column per ZeRO stage; the chosen one is marked."""
    shown = Table(title=f"GiB per learner GPU, {_ranks(config)}", title_justify="left", pad_edge=False)
    parts = ("weights", "reference", "optimizer", "gradients", "buffers", "step", "activations", "scoring", "peak")
    memories = [_memory(config, shape, stage) for stage in range(4)]
    shown.add_column("ZeRO stage")
    for stage in range(4):
        is_chosen = stage == config.learner.zero_stage
        name = f"{stage} (chosen)" if is_chosen else str(stage)
        shown.add_column(name, justify="right", style="bold" if is_chosen else "")
    for part in parts:
        shown.add_row(part, *(f"{getattr(memory, part) / GIB:.1f}" for memory in memories))
    room = learner_room(config, gpu_bytes)
    fits = ("yes" if memory.peak <= room else "no" for memory in memories)
    shown.add_row(f"fits {room / GIB:.4g}", *fits)
    return shown


def _ranks(config: Config) -> str:
    return f"{config.learner.ranks} rank" + "s" * (config.learner.ranks > 1)


def _memory(config: Config, shape: ModelShape, stage: int) -> LearnerMemory:
    learner = config.learner
    memory = sizing.learner_memory(shape, config, sizing.forward_tokens(config), stage)
    if not learner.lora.rank:
        return memory
    trained = adapters.adapter_parameters(shape, learner.lora.rank, learner.lora.names)
    return adapters.with_adapter(memory, config.model.dtype, stage, learner.ranks, trained)


def shared_gpus(config: Config) -> list[int]:
    """GPUs that the learner and a worker both use."""
    return sorted({*_of_learner(config)} & {*_of_rollout(config)})


def _of_learner(config: Config) -> tuple[int, ...]:
    return config.learner.gpus[: config.learner.ranks_per_node]


def _of_rollout(config: Config) -> tuple[int, ...]:
    return config.rollout.gpus[: config.rollout.workers * config.rollout.vllm.tensor_parallel_size]


def learner_room(config: Config, gpu_bytes: int) -> int:
    """What an engine on the same GPU leaves to the learner."""
    if config.run.take_turns:
        return gpu_bytes - ASLEEP
    share = config.rollout.vllm.gpu_memory_utilization or sizing.ENGINE_SHARE
    return gpu_bytes - int(share * gpu_bytes) if shared_gpus(config) else gpu_bytes


def learner_memory(config: Config, shape: ModelShape, gpu_bytes: int) -> Finding:
    """Whether a rank of the learner fits into a GPU."""
    stage, room = config.learner.zero_stage, learner_room(config, gpu_bytes)
    memory = _memory(config, shape, stage)
    text = (
        f"ZeRO-{stage} on {_ranks(config)} needs {memory.peak / GIB:.1f} of {room / GIB:.4g} GiB per GPU, "
        f"{memory.held / GIB:.1f} GiB of it permanently"
    )
    if config.run.take_turns:
        text += f"; a sleeping engine is assumed to keep {ASLEEP / GIB:.1f} GiB (run.take_turns)"
    elif room < gpu_bytes:
        text += f"; an engine has the other {(gpu_bytes - room) / GIB:.1f} GiB (rollout.vllm.gpu_memory_utilization)"
    if memory.peak <= TIGHT * room:
        return Finding("ok", "learner memory", text)
    adds_in_float32 = config.model.dtype == "bfloat16" and config.learner.deepspeed.grad_accum_dtype == "fp32"
    possible = range(2 if adds_in_float32 else 0, 4)
    fitting = [s for s in possible if _memory(config, shape, s).peak <= TIGHT * room]
    if fitting:
        advice = f"learner.zero_stage = {fitting[0]} fits"
    else:
        advice = (
            "use more learner.ranks, learner.gradient_checkpointing, a smaller learner.micro_batch_tokens, "
            "learner.reference = 'cpu' or learner.deepspeed.zero_optimization.offload_optimizer"
        )
    status: Status = "error" if memory.peak > room else "warning"
    return Finding(status, "learner memory", f"{text}; {advice}")


def adapter(config: Config, shape: ModelShape) -> Finding:
    """What of the model is trained and published where learner.lora is set."""
    lora = config.learner.lora
    trained = adapters.adapter_parameters(shape, lora.rank, lora.names)
    unknown = [name for name in lora.names if name not in adapters.linear_layers(shape)]
    if unknown:
        known = ", ".join(adapters.linear_layers(shape))
        return Finding("error", "adapter", f"learner.lora.targets: {unknown[0]!r} is none of the layers {known}")
    megabytes = trained * sizing.DTYPE_BYTES[config.model.dtype] / 1e6
    text = (
        f"of rank {lora.rank}: {trained:,} parameters are trained; a version is {megabytes:.1f} MB, "
        f"{adapters.version_share(shape, trained):.2%} of the whole model"
    )
    return Finding("ok", "adapter", text)


def worker_memory(config: Config, shape: ModelShape, gpu_bytes: int) -> Finding:
    """Whether a worker's weights and KV cache fit into its GPUs."""
    rollout, dtype, longest = config.rollout, config.model.dtype, config.episode.max_tokens
    split, share = rollout.vllm.tensor_parallel_size, rollout.vllm.gpu_memory_utilization or sizing.ENGINE_SHARE
    if not sizing.splits_evenly(shape, split):
        text = (
            f"rollout.vllm.tensor_parallel_size = {split} does not divide the {shape.heads} attention heads and "
            f"{shape.kv_heads} key heads of {config.model.path!r}"
        )
        return Finding("error", "KV cache", text)
    weights = shape.parameters * sizing.DTYPE_BYTES[dtype] // split
    room = sizing.kv_room(shape, dtype, gpu_bytes, share, split)
    if rollout.vllm.kv_cache_memory_bytes is not None:
        room = rollout.vllm.kv_cache_memory_bytes
        is_shared = bool(shared_gpus(config)) and not config.run.take_turns
        whole, beside = (int(share * gpu_bytes), sizing.ENGINE_ALLOWANCE) if is_shared else (gpu_bytes, 0)
        if weights + room + beside > whole:  # vLLM takes what it is told, whatever its share is
            more = f", and {beside / GIB:g} GiB beside," if beside else ""
            key = f"{share:.0%} (rollout.vllm.gpu_memory_utilization) of " if is_shared else ""
            text = (
                f"weights ({weights / GIB:.1f} GiB) and rollout.vllm.kv_cache_memory_bytes ({room / GIB:.1f} GiB)"
                f"{more} are more than {key}a GPU of {gpu_bytes / GIB:g} GiB holds"
            )
            return Finding("error" if weights + room > whole else "warning", "KV cache", text)
    per_token = sizing.kv_bytes_per_token(shape, dtype, split)
    fitting = max(0, room) // (per_token * longest)
    at_once = min(rollout.max_sequences, rollout.max_episodes)
    text = (
        f"{max(0, room) / GIB:.1f} GiB beside {weights / GIB:.1f} GiB of weights hold {fitting} episodes of {longest} "
        f"tokens ({per_token} bytes per token); {at_once} are decoded at once"
    )
    if not fitting:
        return Finding("error", "KV cache", f"{text}; vLLM does not start without room for one")
    if fitting < MEAN_LENGTH * at_once:
        return Finding("warning", "KV cache", f"{text}; vLLM will evict and recompute: lower rollout.max_sequences")
    return Finding("ok", "KV cache", text)


def named_gpus(config: Config) -> Finding:
    """Whether no GPU is two processes', except the learner's and a worker's whose engine has a share of it."""
    learner, rollout = _of_learner(config), _of_rollout(config)
    evaluator = config.eval.gpus if config.eval.every else ()
    named, shared = [*learner, *rollout, *evaluator], shared_gpus(config)
    twice = sorted({gpu for gpu in named if named.count(gpu) > (2 if gpu in shared else 1)})
    both = f"learner.gpus {list(learner)}, rollout.gpus {list(rollout)} and eval.gpus {list(evaluator)}"
    if twice:
        text = f"{', '.join(map(str, twice))} more than once in {both}; give each process its own GPU"
        return Finding("error", "GPUs", text)
    has_share = config.run.take_turns or config.rollout.vllm.gpu_memory_utilization is not None
    if shared and not has_share:
        text = (
            f"{', '.join(map(str, shared))} twice in {both}; set rollout.vllm.gpu_memory_utilization to the share of "
            "the GPU that the engine may take, or give each process its own GPU"
        )
        return Finding("error", "GPUs", text)
    if not named:
        return Finding("ok", "GPUs", "not set: learner gets the last GPUs, then evaluator, workers the rest")
    needed = config.rollout.workers * config.rollout.vllm.tensor_parallel_size
    if rollout and len(rollout) < needed:
        text = (
            f"rollout.gpus {list(rollout)} are too few for rollout.workers = {config.rollout.workers} on one machine: "
            f"`cusearch launch` needs {needed}; on several machines each takes its own"
        )
        return Finding("warning", "GPUs", text)
    text = ", ".join(
        f"{name} {list(gpus) or 'some of those that the others leave'}"
        for name, gpus in (("learner", learner), ("rollout", rollout), ("evaluator", evaluator))
        if gpus or name != "evaluator" or config.eval.every
    )
    if shared and config.run.take_turns:
        text += f"; {', '.join(map(str, shared))} in turn"
    elif shared:
        share = config.rollout.vllm.gpu_memory_utilization
        text += f"; {', '.join(map(str, shared))} shared, {share:.0%} for the engine"
    return Finding("ok", "GPUs", text)


def gpus_here(config: Config) -> Iterator[Finding]:
    """Whether the named GPUs exist on this machine. Not an error: a config may be checked on another machine."""
    retriever = config.retriever
    named = [*config.learner.gpus, *config.rollout.gpus, *config.eval.gpus]
    if retriever.dense.device.startswith("cuda") and (retriever.backend == "dense" or retriever.rerank.model):
        named.append(int(retriever.dense.device.partition(":")[2] or 0))
    there = count_gpus() if named else 0
    missing = sorted({gpu for gpu in named if gpu >= there})
    if missing:
        text = (
            f"{', '.join(map(str, missing))} of learner.gpus, rollout.gpus, eval.gpus and retriever.dense.device are "
            f"missing: CUDA finds {there} GPUs on this machine"
        )
        yield Finding("not reachable", "GPUs here", text)
