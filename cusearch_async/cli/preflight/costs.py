"""What a run takes beside the memory of its GPUs: the host's memory, disk, and time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from cusearch_async.cli.preflight import gpus, places, sizing
from cusearch_async.cli.preflight.finding import Finding
from cusearch_async.cli.preflight.shapes import ModelShape
from cusearch_async.cli.preflight.sizing import GIB
from cusearch_async.config import Config

PUBLISHED_PER_S = 2e9
"""Assumed: bytes per second of copying weights from a GPU into files. Not measured on a GPU yet."""
PEAK_FLOPS = 989e12
"""Of an H100 in bfloat16, by its data sheet."""
PEAK_SHARE = 0.4
"""Assumed share of the peak that the learner reaches."""


def host_memory(config: Config, shape: ModelShape) -> Finding:
    """Whether this machine has the memory that a node's ranks of the learner take."""
    loading, held, writing = (size / GIB for size in sizing.host_bytes(shape, config))
    text = (
        f"{ranks_on_a_node(config)} on one machine: {loading:.1f} GiB while loading, {held:.1f} GiB permanently, "
        f"{writing:.1f} GiB while a checkpoint is written"
    )
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    if max(loading, writing) > here:
        needed = max(loading, writing)
        return Finding("too small", "host memory", f"{text}; {needed:.1f} GiB needed, {here:.1f} GiB there")
    return Finding("ok", "host memory", text)


def ranks_on_a_node(config: Config) -> str:
    count = config.learner.ranks_per_node
    return f"{count} rank" + "s" * (count > 1)


def memory_on_cpu(config: Config, shape: ModelShape) -> Finding:
    """Whether this machine has the memory that learner and engines take on its CPU."""
    learner, rollout, dtype = config.learner, config.rollout, config.model.dtype
    memory = sizing.learner_memory(shape, config, sizing.forward_tokens(config))
    of_rank = memory.peak - sizing.DEVICE_ALLOWANCE + memory.host
    of_engine = shape.parameters * sizing.DTYPE_BYTES[dtype] + (rollout.vllm.kv_cache_memory_bytes or 0)
    engines = rollout.workers + bool(config.eval.every)
    needed = (learner.ranks_per_node * of_rank + engines * of_engine) / GIB
    text = (
        f"on the CPU: ZeRO-{learner.zero_stage} on {ranks_on_a_node(config)} needs {of_rank / GIB:.1f} GiB each, "
        f"an engine {of_engine / GIB:.1f} GiB"
    )
    if rollout.vllm.kv_cache_memory_bytes is None:
        text += " and its KV cache (rollout.vllm.kv_cache_memory_bytes)"
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    text += "; libraries not counted"
    if needed > here:
        return Finding("too small", "memory", f"{text}; {needed:.1f} GiB needed, {here:.1f} GiB there")
    return Finding("ok", "memory", f"{text}; this machine has {here:.1f} GiB")


def publishing(config: Config, shape: ModelShape) -> Finding:
    size = sizing.version_bytes(shape, config.model.dtype)
    text = (
        f"a version has {size / GIB:.1f} GiB and is written in {size / PUBLISHED_PER_S:.1f} s at an assumed "
        f"{PUBLISHED_PER_S / 1e9:g} GB/s, beside the next update"
    )
    return Finding("ok", "publishing", text)


def step_time(config: Config, shape: ModelShape) -> Iterator[Finding]:
    """By arithmetic, for GPUs: a float32 model is for a CPU."""
    if config.model.dtype != "bfloat16":
        return
    trained = config.questions_per_step * config.pool.rollouts
    trained = trained if config.method.make().trains_on_all else config.method.budget
    mean = gpus.MEAN_LENGTH * config.episode.max_tokens
    flops = sizing.step_flops(shape, config, mean, trained)
    seconds = flops / (config.learner.ranks * PEAK_SHARE * PEAK_FLOPS)
    text = (
        f"{flops / 1e15:.1f} PFLOP for {trained} trajectories of {mean:.0f} tokens, padding not counted: "
        f"{seconds:.1f} s on {config.learner.ranks} H100 at an assumed {PEAK_SHARE:.0%} of {PEAK_FLOPS / 1e12:.0f} "
        "TFLOP/s"
    )
    yield Finding("ok", "step time", text)


def disk(config: Config) -> Finding:
    """As `cusearch doctor` has it. Too little is no error: the run may be on another machine."""
    found = places.disk(config)
    return replace(found, status="too small") if found.status == "error" else found
