"""GPUs and their memory."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from cusearch_async.cli.preflight import sizing
from cusearch_async.cli.preflight.finding import Finding, Status
from cusearch_async.cli.preflight.sizing import GIB, LearnerMemory, ModelShape
from cusearch_async.config import Config
from cusearch_async.lifecycle.placement import count_gpus

TIGHT = 0.9
"""An estimate above this share of a GPU gives a warning: the real use may be larger."""
MEAN_LENGTH = 0.5
"""Assumed mean length of an episode, as a share of the longest: most end with an answer much earlier."""


def stages(config: Config, shape: ModelShape, gpu_bytes: int) -> Table:
    """A learner rank's memory in GiB, one column per ZeRO stage; the chosen one is marked."""
    shown = Table(title=f"GiB per learner GPU, {config.learner.ranks} ranks", title_justify="left", pad_edge=False)
    parts = ("weights", "reference", "optimizer", "gradients", "buffers", "step", "activations", "peak")
    memories = [_memory(config, shape, stage) for stage in range(4)]
    shown.add_column("ZeRO stage")
    for stage in range(4):
        is_chosen = stage == config.learner.zero_stage
        name = f"{stage} (chosen)" if is_chosen else str(stage)
        shown.add_column(name, justify="right", style="bold" if is_chosen else "")
    for part in parts:
        shown.add_row(part, *(f"{getattr(memory, part) / GIB:.1f}" for memory in memories))
    fits = ("yes" if memory.peak <= gpu_bytes else "no" for memory in memories)
    shown.add_row(f"fits {gpu_bytes / GIB:g}", *fits)
    return shown


def _memory(config: Config, shape: ModelShape, stage: int) -> LearnerMemory:
    learner = config.learner
    tokens = sizing.forward_tokens(
        learner.micro_batch_tokens, config.episode.max_tokens, config.loss.minibatch, learner.ranks
    )
    has_reference = config.loss.kl_coef > 0
    return sizing.learner_memory(
        shape, config.model.dtype, stage, learner.ranks, has_reference, tokens, learner.gradient_checkpointing
    )


def learner_memory(config: Config, shape: ModelShape, gpu_bytes: int) -> Finding:
    """Whether a rank of the learner fits into a GPU."""
    stage = config.learner.zero_stage
    memory = _memory(config, shape, stage)
    text = (
        f"ZeRO stage {stage} of {config.learner.ranks} ranks takes {memory.peak / GIB:.1f} of {gpu_bytes / GIB:g} GiB "
        f"per GPU, {memory.held / GIB:.1f} GiB of it permanently"
    )
    if memory.peak <= TIGHT * gpu_bytes:
        return Finding("ok", "learner memory", text)
    fitting = [s for s in range(4) if _memory(config, shape, s).peak <= TIGHT * gpu_bytes]
    if fitting:
        advice = f"learner.zero_stage = {fitting[0]} fits"
    else:
        advice = "use more learner.ranks, learner.gradient_checkpointing or a smaller learner.micro_batch_tokens"
    status: Status = "error" if memory.peak > gpu_bytes else "warning"
    return Finding(status, "learner memory", f"{text}; {advice}")


def worker_memory(config: Config, shape: ModelShape, gpu_bytes: int) -> Finding:
    """Whether a worker's weights and KV cache fit into a GPU."""
    rollout, dtype, longest = config.rollout, config.model.dtype, config.episode.max_tokens
    weights = shape.parameters * sizing.DTYPE_BYTES[dtype]
    room = sizing.kv_room(shape, dtype, gpu_bytes)
    if rollout.kv_cache_mib is not None:
        room = rollout.kv_cache_mib << 20
        if weights + room > gpu_bytes:
            text = (
                f"weights ({weights / GIB:.1f} GiB) and rollout.kv_cache_mib ({room / GIB:.1f} GiB) are more than a "
                f"GPU of {gpu_bytes / GIB:g} GiB holds"
            )
            return Finding("error", "KV cache", text)
    per_token = sizing.kv_bytes_per_token(shape, dtype)
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
    """Whether no GPU is assigned to two processes."""
    learner = config.learner.gpus[: config.learner.ranks]
    rollout = config.rollout.gpus[: config.rollout.workers]
    evaluator = config.eval.gpus if config.eval.every else ()
    named = [*learner, *rollout, *evaluator]
    twice = sorted({gpu for gpu in named if named.count(gpu) > 1})
    if twice:
        text = (
            f"{', '.join(map(str, twice))} twice in learner.gpus {list(learner)}, rollout.gpus {list(rollout)} and "
            f"eval.gpus {list(evaluator)}; each process needs its own GPU"
        )
        return Finding("error", "GPUs", text)
    if bool(learner) != bool(rollout):
        empty = "rollout.gpus" if learner else "learner.gpus"
        return Finding("warning", "GPUs", f"{empty} is empty, which means all GPUs, also those that the other names")
    if named and config.eval.every and not evaluator:
        return Finding("warning", "GPUs", "eval.gpus is empty, which means all GPUs, also those that the others name")
    if not named:
        return Finding("ok", "GPUs", "none named: every process sees all GPUs of the machine")
    return Finding("ok", "GPUs", f"learner {list(learner)}, rollout {list(rollout)}, evaluator {list(evaluator)}")


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
