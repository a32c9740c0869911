"""The memory, disk and GPUs of this machine, as metrics of a step."""

from __future__ import annotations

import shutil
from pathlib import Path

from cusearch_async.machine import usable_memory
from cusearch_async.metrics.table import Metrics

GIB = 2**30


def describe_machine(folder: Path) -> Metrics:
    """Of the machine that this process runs on, with the disk of `folder`."""
    memory = usable_memory()
    return {
        "machine/disk_free_gib": shutil.disk_usage(folder).free / GIB,
        "machine/memory_used_share": memory.used / memory.total,
        **_gpus(),
    }


def _gpus() -> Metrics:
    """The mean use and the fullest memory; nothing where they cannot be read."""
    try:
        import pynvml  # type: ignore[import-not-found]  # noqa: PLC0415  (only where NVIDIA's library is)

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        used = [pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles]
        memory = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
    except Exception:
        return {}
    if not handles:
        return {}
    return {
        "machine/gpu_used_share": sum(used) / len(used),
        "machine/gpu_memory_share": max(one.used / one.total for one in memory),
    }
