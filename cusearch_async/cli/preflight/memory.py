"""Whether a run fits: a learner rank and an engine into a GPU or the machine, its files onto the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from cusearch_async.cli.preflight import sizing
from cusearch_async.cli.preflight.finding import Finding, Status
from cusearch_async.cli.preflight.gpus import shared_gpus
from cusearch_async.cli.preflight.shapes import ModelShape, on_meta, shape_of
from cusearch_async.cli.preflight.sizing import GIB
from cusearch_async.config import Config
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.cuda import count_gpus
from cusearch_async.machine import usable_memory

TIGHT = 0.9
"""An estimate above this share of a GPU gives a warning: the real use may be larger."""
ASLEEP = int(1.5 * GIB)
"""Assumed for a process that waits for its turn on a GPU: CUDA's context and compiled kernels. Not measured."""
MEAN_LENGTH = 0.5
"""Assumed mean length of an episode, as a share of the longest: most end with an answer much earlier."""


def stages(config: Config, shape: ModelShape, gpu_bytes: int) -> Table:
    """A learner rank's memory in GiB, one column per ZeRO stage; the chosen one is marked."""
    shown = Table(title=f"GiB per learner GPU, {_ranks(config.learner.ranks)}", title_justify="left", pad_edge=False)
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
    shown.add_row(f"fits {room / GIB:.4g}", *("yes" if memory.peak <= room else "no" for memory in memories))
    return shown


def _ranks(count: int) -> str:
    return f"{count} rank" + "s" * (count > 1)


def _memory(config: Config, shape: ModelShape, stage: int | None = None) -> sizing.LearnerMemory:
    return sizing.learner_memory(shape, config, sizing.forward_tokens(config), stage)


def learner_room(config: Config, gpu_bytes: int) -> int:
    """What an engine on the same GPU leaves to the learner."""
    if config.run.colocate:
        return gpu_bytes - ASLEEP
    share = config.rollout.vllm.gpu_memory_utilization or sizing.ENGINE_SHARE
    return gpu_bytes - int(share * gpu_bytes) if shared_gpus(config) else gpu_bytes


def learner_memory(config: Config, shape: ModelShape, gpu_bytes: int) -> Finding:
    stage, room = config.learner.zero_stage, learner_room(config, gpu_bytes)
    memory = _memory(config, shape)
    text = (
        f"ZeRO-{stage} on {_ranks(config.learner.ranks)} needs {memory.peak / GIB:.1f} of {room / GIB:.4g} GiB per "
        f"GPU, {memory.held / GIB:.1f} GiB of it permanently"
    )
    if config.run.colocate:
        text += f"; a sleeping engine is assumed to keep {ASLEEP / GIB:.1f} GiB (run.colocate)"
    elif room < gpu_bytes:
        text += f"; an engine has the other {(gpu_bytes - room) / GIB:.1f} GiB (rollout.vllm.gpu_memory_utilization)"
    if memory.peak <= TIGHT * room:
        return Finding("ok", "learner memory", text)
    adds_in_float32 = config.model.dtype == "bfloat16" and config.learner.deepspeed.grad_accum_dtype == "fp32"
    possible = range(2 if adds_in_float32 else 0, 4)
    fitting = [s for s in possible if _memory(config, shape, s).peak <= TIGHT * room]
    advice = f"learner.zero_stage = {fitting[0]} fits" if fitting else f"use {_savings(config)}"
    status: Status = "error" if memory.peak > room else "warning"
    return Finding(status, "learner memory", f"{text}; {advice}")


def _savings(config: Config) -> str:
    """What would take less memory than it does, in words."""
    learner = config.learner
    is_set = {
        "learner.gradient_checkpointing": learner.gradient_checkpointing,
        "learner.reference = 'cpu'": learner.reference == "cpu" or learner.lora.rank or not config.loss.kl_coef,
        "learner.deepspeed.zero_optimization.offload_optimizer": learner.deepspeed.offload("offload_optimizer"),
        "learner.lora.rank": learner.lora.rank,
    }
    lower = ("more learner.ranks", "a smaller learner.micro_batch_tokens")
    *others, last = *lower, *(setting for setting, given in is_set.items() if not given)
    return f"{', '.join(others)} or {last}"


def adapter(config: Config, shape: ModelShape, on_gpu: bool = False) -> Finding:
    """What of the model is trained and published where learner.lora is set."""
    from cusearch_async.learner.adapter import Adapter  # noqa: PLC0415  (imports torch)

    lora = config.learner.lora
    try:
        Adapter.into(on_meta(shape.config), lora, config.model.path, config.run.seed)
    except ConfigError as error:
        return Finding("error", "adapter", str(error))
    if on_gpu and config.model.dtype == "float32":
        return Finding("error", "adapter", "model.dtype must be bfloat16 on a GPU: vLLM's LoRA kernels have no float32")
    trained = sizing.adapter_parameters(shape, lora.rank, lora.names)
    megabytes = trained * sizing.DTYPE_BYTES[config.model.dtype] / 1e6
    text = (
        f"of rank {lora.rank}: {trained:,} parameters are trained; a version is {megabytes:.1f} MB, "
        f"{trained / shape.parameters:.2%} of the whole model"
    )
    if "lr" not in config.learner.model_fields_set:
        more = f"learner.lr is {config.learner.lr:g}, for full fine-tuning; an adapter needs about ten times that"
        return Finding("warning", "adapter", f"{text}; {more}")
    return Finding("ok", "adapter", text)


def worker_memory(config: Config, shape: ModelShape, gpu_bytes: int) -> Finding:
    rollout = config.rollout
    split, share = rollout.vllm.tensor_parallel_size, rollout.vllm.gpu_memory_utilization or sizing.ENGINE_SHARE
    if not sizing.splits_evenly(shape, split):
        heads = f"the {shape.heads} attention heads and {shape.kv_heads} key heads of {config.model.path!r}"
        return Finding("error", "KV cache", f"rollout.vllm.tensor_parallel_size = {split} does not divide {heads}")
    weights, room = sizing.engine_weights(shape, config), sizing.kv_room(shape, config, gpu_bytes)
    if rollout.vllm.kv_cache_memory_bytes is not None:
        room = rollout.vllm.kv_cache_memory_bytes
        is_shared = bool(shared_gpus(config)) and not config.run.colocate
        whole, passes = (int(share * gpu_bytes), sizing.ENGINE_ALLOWANCE) if is_shared else (gpu_bytes, 0)
        if weights + room + passes > whole:  # vLLM takes it, whatever its share is
            more = f", and {passes / GIB:g} GiB for its passes," if passes else ""
            key = f"{share:.0%} (rollout.vllm.gpu_memory_utilization) of " if is_shared else ""
            text = (
                f"weights ({weights / GIB:.1f} GiB) and rollout.vllm.kv_cache_memory_bytes ({room / GIB:.1f} GiB)"
                f"{more} are more than {key}a GPU of {gpu_bytes / GIB:g} GiB holds"
            )
            return Finding("error" if weights + room > whole else "warning", "KV cache", text)
    at_once = min(rollout.max_num_seqs, rollout.max_episodes)
    text = f"{max(0, room) / GIB:.1f} GiB with {weights / GIB:.1f} GiB of weights"
    found = _episodes(config, shape, room, text, f"; {at_once} are decoded at once")
    if found.status == "ok" and _fitting(config, shape, room) < MEAN_LENGTH * at_once:
        return Finding(
            "warning", "KV cache", f"{found.text}; vLLM will evict and recompute: lower rollout.max_num_seqs"
        )
    return found


def kv_cache_on_cpu(config: Config, shape: ModelShape) -> Finding:
    """Whether an engine's KV cache holds an episode. Without a size, vLLM takes a share of the machine's memory."""
    vllm = config.rollout.vllm
    room, share = vllm.kv_cache_memory_bytes, vllm.gpu_memory_utilization or sizing.ENGINE_SHARE
    if room is not None:
        return _episodes(config, shape, room, f"{room / GIB:.1f} GiB (rollout.vllm.kv_cache_memory_bytes)")
    text = f"rollout.vllm.kv_cache_memory_bytes is not set: an engine takes {share:.0%} of this machine's memory"
    return Finding("warning", "KV cache", f"{text} (rollout.vllm.gpu_memory_utilization), whatever else runs")


def _fitting(config: Config, shape: ModelShape, room: int) -> int:
    """Of the longest episodes, in a KV cache of `room` bytes."""
    return max(0, room) // (sizing.kv_bytes_per_token(shape, config) * config.episode.max_tokens)


def _episodes(config: Config, shape: ModelShape, room: int, cache: str, more: str = "") -> Finding:
    fitting, per_token = _fitting(config, shape, room), sizing.kv_bytes_per_token(shape, config)
    longest = config.episode.max_tokens
    text = f"{cache} hold {fitting} episodes of {longest} tokens ({per_token} bytes per token){more}"
    if not fitting:
        return Finding("error", "KV cache", f"{text}; vLLM does not start without room for one")
    return Finding("ok", "KV cache", text)


def host_memory(config: Config, shape: ModelShape) -> Finding:
    """Whether this machine has the memory that a node's ranks of the learner take, and the engines."""
    (loading, held, writing), staged = sizing.host_bytes(shape, config), sizing.staged_bytes(shape, config)
    text = (
        f"{_ranks(config.learner.ranks_per_node)} on one machine: {loading / GIB:.1f} GiB while loading, "
        f"{held / GIB:.1f} GiB permanently, {writing / GIB:.1f} GiB while a checkpoint is written; engines "
        f"{staged / GIB:.1f} GiB for new weights"
    )
    return _in_memory("host memory", text, max(loading, writing) + staged)


def memory_on_cpu(config: Config, shape: ModelShape) -> Finding:
    """Whether this machine has the memory that learner and engines take on its CPU."""
    learner, rollout, engines = config.learner, config.rollout, sizing.engines(config)
    memory = _memory(config, shape)
    of_rank = memory.peak - sizing.DEVICE_ALLOWANCE + memory.host
    weights, cache = shape.parameters * sizing.DTYPE_BYTES[config.model.dtype], rollout.vllm.kv_cache_memory_bytes or 0
    copied = sizing.copied_bytes(shape, config)
    loaded = 0 if learner.lora.rank else sizing.version_bytes(shape, config)  # beside the old weights
    text = (
        f"on the CPU: ZeRO-{learner.zero_stage} on {_ranks(learner.ranks_per_node)} needs {of_rank / GIB:.1f} GiB "
        f"each, {copied / GIB:.1f} GiB more while a checkpoint is written, an engine {(weights + cache) / GIB:.1f} GiB"
        f"{'' if cache else ' and its KV cache'}, {loaded / GIB:.1f} GiB more while it loads; libraries not counted"
    )
    needed = learner.ranks_per_node * of_rank + copied + engines * (weights + cache + loaded)
    return _in_memory("memory", text, needed)


def refuse_too_little(config: Config) -> None:
    """Raises: ConfigError where this machine has not the memory of a warm start on its CPU: a learner without π_ref."""
    shape = shape_of(config.model)
    if shape is None or count_gpus():
        return
    try:
        memory = _memory(config, shape)
    except Exception:  # the model's own code may raise anything where its tensors have no memory
        return
    in_turn = max(memory.step, memory.activations)
    needed = config.learner.ranks_per_node * (memory.held - memory.reference + in_turn)
    here = usable_memory().total
    if needed > here:
        raise ConfigError(
            f"training {config.model.path!r} needs {needed / GIB:.1f} GiB of memory, this machine has "
            f"{here / GIB:.1f}; use {_less(config)} a smaller learner.micro_batch_tokens"
        )


def _less(config: Config) -> str:
    if config.learner.lora.rank or config.learner.trained_layers:
        return ""
    return "an adapter (learner.lora.rank), fewer layers (learner.trained_layers) or "


def _in_memory(what: str, text: str, needed: int) -> Finding:
    here = usable_memory().total
    if needed > here:
        return Finding("too small", what, f"{text}; {needed / GIB:.1f} GiB needed, {here / GIB:.1f} GiB there")
    return Finding("ok", what, f"{text}; this machine has {here / GIB:.1f} GiB")


def disk(config: Config, shape: ModelShape) -> Iterator[Finding]:
    """Room for the checkpoints and weight versions that a run keeps, the best one among them, and for one more of each,
    which is being written. Too little is no error: the run may be on another machine."""
    from cusearch_async.weights.folder import KEPT  # noqa: PLC0415  (imports torch)

    kept = KEPT + 1 + sum(config.eval.keeps(version) for version in range(config.run.steps + 1))
    count = config.learner.keep_checkpoints + 1 + bool(config.eval.every)
    checkpoint, version = sizing.checkpoint_bytes(shape, config), sizing.version_bytes(shape, config)
    checkpoints = (count * checkpoint, f"{count} checkpoints of {_size(checkpoint)}", config.folder / "checkpoints")
    versions = (kept * version, f"{kept} weight versions of {_size(version)}", config.weights_folder)
    if config.weights.folder is None:
        yield _on_disk("disk", config.folder, [checkpoints, versions], "--run.folder")
    else:
        yield _on_disk("disk", config.folder, [checkpoints], "--run.folder")
        yield _on_disk("weights.folder", config.weights_folder, [versions], "--weights.folder")


def _on_disk(what: str, folder: Path, kept: Sequence[tuple[int, str, Path]], key: str) -> Finding:
    """`kept`: bytes, in words, and the folder that has some of them already."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free, needed = shutil.disk_usage(there).free, sum(size for size, _, _ in kept)
    held = sum(path.lstat().st_size for _, _, own in kept for path in own.rglob("*") if path.is_file())
    words = " and ".join(text for _, text, _ in kept)
    text = f"{_size(free)} free for {folder.absolute()}; {_size(needed)} needed for {words}"
    if free + held < needed:
        return Finding("too small", what, f"{text}: {key} on a larger disk")
    return Finding("ok", what, text)


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"
