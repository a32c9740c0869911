"""The memory, disk and GPUs of a machine."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import pytest

from cusearch_async.metrics.machine import describe_machine

GPUS = ((50, 10, 100), (100, 90, 100))
"""Use in per cent, used and total bytes."""


def test_disk_and_memory_are_those_of_this_machine(tmp_path):
    found = describe_machine(tmp_path)
    assert found["machine/disk_free_gib"] == pytest.approx(shutil.disk_usage(tmp_path).free / 2**30, rel=0.1)
    assert 0 < found["machine/memory_used_share"] < 1


def test_gpus_are_shown_where_there_are_some(tmp_path, monkeypatch):
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(GPUS),
        nvmlDeviceGetHandleByIndex=lambda number: GPUS[number],
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=gpu[0]),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=gpu[1], total=gpu[2]),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = describe_machine(tmp_path)
    assert found["machine/gpu_used_share"] == 0.75
    assert found["machine/gpu_memory_share"] == 0.9

    def refuses(gpu):
        raise RuntimeError("Not Supported")

    monkeypatch.setattr(nvml, "nvmlDeviceGetUtilizationRates", refuses)
    assert "machine/gpu_used_share" not in describe_machine(tmp_path), "a run does not end for it"
