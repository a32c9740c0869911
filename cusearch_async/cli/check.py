"""`cusearch check CONFIG`: checks a config before anything is started: lengths, memory, time, files, services.

An error is a setting that can never work. What is missing now (a download, a service), and a host or a disk that is too
small, is reported, but is not an error: the run may be on another machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from cusearch_async.cli.preflight import costs, gpus, sources, workload
from cusearch_async.cli.preflight.device import Device, device_of
from cusearch_async.cli.preflight.finding import Finding, table
from cusearch_async.cli.preflight.shapes import ModelShape, shape_of
from cusearch_async.cli.trust import add_trust
from cusearch_async.config import CONFIG_HELP, Config, load_config

UNCOUNTED = "memory and time"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="+", help=CONFIG_HELP)
    parser.add_argument(
        "--gpu-gib", type=_gib, help="memory of one GPU, in GiB (of the GPU that is here, else run.gpu_gib, else 80)"
    )
    add_trust(parser)
    parser.set_defaults(run=run)


def _gib(text: str) -> float:
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a size in GiB, like 80, got {text!r}")
    return gib


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, overrides)
    device = device_of(config, arguments.gpu_gib)
    shape = shape_of(config.model)
    findings = list(check(config, shape, device))
    console = Console()
    console.print(table(findings))
    is_counted = not any(finding.what == UNCOUNTED for finding in findings)
    if shape is not None and device is not None and is_counted:
        console.print(gpus.stages(config, shape, device.bytes))
    if any(finding.status == "error" for finding in findings):
        sys.exit(1)


def check(config: Config, shape: ModelShape | None, device: Device | None) -> Iterator[Finding]:
    """All findings, in the order of the table; without a `device` nothing of GPUs."""
    yield workload.lengths(config, shape)
    found, tokenizer = workload.tokenizer(config)
    yield found
    if tokenizer is not None:
        yield from workload.chat(config, tokenizer)
    yield from workload.batch(config)
    from cusearch_async.cli.preflight.activations import why_not_counted  # noqa: PLC0415  (imports torch)

    uncounted = why_not_counted(shape, config.model.dtype) if shape else None
    if shape is not None and uncounted is not None:
        text = (
            f"cannot be computed for {config.model.path!r}, a {shape.config.model_type} ({uncounted}); watch the GPUs"
        )
        yield Finding("not reachable", UNCOUNTED, text)
    elif shape is not None:
        if config.learner.lora.rank:
            yield gpus.adapter(config, shape)
        if device is None:
            yield costs.memory_on_cpu(config, shape)
        else:
            yield Finding("ok", "GPU memory", f"{device.gib:.4g} GiB ({device.source})")
            yield gpus.learner_memory(config, shape, device.bytes)
            yield gpus.worker_memory(config, shape, device.bytes)
            yield costs.host_memory(config, shape)
            yield costs.publishing(config, shape)
            yield from costs.step_time(config, shape)
        yield costs.disk(config)
    yield workload.staleness(config)
    if device is not None:
        yield gpus.named_gpus(config)
    yield from gpus.gpus_here(config)
    yield from sources.files(config, tokenizer)
    yield from sources.own_code(config)
    yield from sources.services(config)
