"""`cusearch check CONFIG`: checks a config before anything is started: lengths, memory, files, services. Without a
config it checks this machine, and names the command that fixes what is wrong with it.

An error of a config is a setting that can never work; the status is then 1. What is missing now (a download, a
service), and a host or a disk that is too small, is no error: the run may be on another machine."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator

from rich.console import Console

from cusearch_async.cli.parts.arguments import add_config, parsed, refuse_settings_of_nothing
from cusearch_async.cli.preflight import gpus, machine, memory, options, sizing, sources, workload
from cusearch_async.cli.preflight.finding import Finding, table
from cusearch_async.cli.preflight.gpus import Device, device_of
from cusearch_async.cli.preflight.shapes import ModelShape, shape_of
from cusearch_async.cli.preflight.trial import trial
from cusearch_async.config import Config, load_config
from cusearch_async.errors import ConfigError, first_line

GPU_MEMORY = "GPU memory"


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser, without="this machine")
    size = parsed(float, lambda gib: 0 < gib < math.inf, "a size in GiB, like 80")
    text = "memory of one GPU, in GiB (of the GPU that is here, else run.gpu_gib, else 80)"
    parser.add_argument("--gpu-gib", type=size, help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    refuse_settings_of_nothing(arguments, overrides)
    console = Console()
    if arguments.config:
        config = load_config(arguments.config, overrides)
        device, shape = device_of(config, arguments.gpu_gib), shape_of(config.model)
        findings = list(check(config, shape, device))
    else:
        findings, shape, device = list(machine.examine()), None, None
    console.print(table(findings))
    if shape is not None and device is not None and any(finding.what == GPU_MEMORY for finding in findings):
        console.print(memory.stages(config, shape, device.bytes))
    if any(finding.status == "error" for finding in findings):
        sys.exit(1)


def check(config: Config, shape: ModelShape | None, device: Device | None) -> Iterator[Finding]:
    """All findings of a config, in the order of the table; without a `device` nothing of GPUs."""
    yield workload.lengths(config, shape)
    found, tokenizer = workload.tokenizer(config)
    yield found
    if tokenizer is not None:
        yield from workload.chat(config, tokenizer)
        yield from trial(config, tokenizer)
    yield from workload.batch(config)
    if shape is not None:
        yield from _fits(config, shape, device)
    yield workload.staleness(config)
    if device is not None:
        yield gpus.named_gpus(config)
    yield from gpus.gpus_here(config)
    yield from options.unused(config)
    yield from options.patience(config)
    yield from options.vllm_options(config)
    yield from options.batched_tokens(config, on_cpu=device is None)
    yield machine.open_files(config)
    yield from sources.files(config, tokenizer)
    yield from sources.own_code(config)
    yield from sources.services(config)


def _fits(config: Config, shape: ModelShape, device: Device | None) -> Iterator[Finding]:
    try:
        sizing.learner_memory(shape, config, sizing.forward_tokens(config))
    except Exception as error:  # the model's own code may raise anything where its tensors have no memory
        what = f"{config.model.path!r}, a {shape.config.model_type} ({first_line(error)})"
        yield Finding("not reachable", "memory", f"cannot be computed for {what}; watch the GPUs")
        return
    from cusearch_async.models import refuse_more_layers  # noqa: PLC0415  (transformers)

    try:
        refuse_more_layers(config.learner.trained_layers, shape.layers, config.model.path)
    except ConfigError as error:
        yield Finding("error", "learner.trained_layers", str(error))
    if config.learner.lora.rank:
        yield memory.adapter(config, shape, on_gpu=device is not None)
    if device is None:
        yield memory.memory_on_cpu(config, shape)
        yield memory.kv_cache_on_cpu(config, shape)
        from cusearch_async.cli.preflight.speed import speed_on_cpu  # noqa: PLC0415  (imports torch)

        timed = speed_on_cpu(config, shape)
        if timed is not None:
            yield timed
    else:
        yield Finding("ok", GPU_MEMORY, f"{device.gib:.4g} GiB ({device.source})")
        yield memory.learner_memory(config, shape, device.bytes)
        yield memory.worker_memory(config, shape, device.bytes)
        yield memory.host_memory(config, shape)
    yield from memory.disk(config, shape)
