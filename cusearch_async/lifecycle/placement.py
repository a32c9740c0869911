"""The cores, GPUs and priority of a process.

`configure_process` must run before torch is loaded, so this module does not import torch at the top."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from cusearch_async.config import LOOPBACK
from cusearch_async.errors import ConfigError

log = logging.getLogger(__name__)

_NICENESS = 10


def configure_process(cores: Sequence[int], gpus: Sequence[int] = ()) -> None:
    """Restrict this process to `cores` and `gpus` (empty: all), with one thread per core, and let waiting threads
    sleep.

    On a small machine, OpenMP threads that spin while they wait starve the other processes of the run. The libraries
    read these variables when they are loaded, so this must run before torch is imported. Cores that this machine does
    not have are ignored; if none is left, all are used."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if os.environ.get("MASTER_ADDR", LOOPBACK[0]) in LOOPBACK:  # the default is the address of the host's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM would choose the cores itself
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # on CPU: the model lives in the engine's process
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a forked engine outlives its worker
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # libraries warn about each other
    warnings.simplefilter("ignore", FutureWarning)
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    usable = sorted(set(cores) & os.sched_getaffinity(0))
    if usable:
        os.sched_setaffinity(0, usable)
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))


def share_of(cores: Sequence[int], index: int, count: int) -> list[int]:
    """The cores of process `index` of `count`; all of them when there are fewer cores than processes."""
    return list(cores[index::count]) if len(cores) >= count else list(cores)


def require_gpus(key: str, gpus: Sequence[int]) -> None:
    """Check that CUDA finds `gpus`. Call it after `configure_process`, which hides all other GPUs.

    Raises: ConfigError when CUDA does not find them: torch would silently use the CPU."""
    found = count_gpus() if gpus else 0
    if found < len(gpus):
        raise ConfigError(
            f"{key} = {list(gpus)}, but CUDA finds {found} of them on this machine; name other GPUs (nvidia-smi lists "
            "them), or none to run without a GPU"
        )


def require_device(key: str, device: str) -> None:
    """Raises: ConfigError when `device` is a GPU ("cuda", "cuda:1") that CUDA does not find."""
    kind, _, index = device.partition(":")
    if kind == "cuda" and count_gpus() <= int(index or 0):
        raise ConfigError(f"{key} = {device!r}, but CUDA finds {count_gpus()} GPUs on this machine; set it to 'cpu'")


def count_gpus() -> int:
    """CUDA devices that torch can use in this process."""
    import torch  # noqa: PLC0415  (reads the variables of `configure_process` when it is loaded)

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def lower_priority() -> None:
    """Use the time that the run's other processes leave free, and about a tenth of busy cores.

    With autogroup, Linux divides the cores among sessions first, so the niceness of a process in its own session has no
    effect. Then the niceness of the session is set too, if this process leads it."""
    os.nice(_NICENESS)
    session = Path("/proc/self/autogroup")
    if session.exists() and os.getsid(0) == os.getpid():
        try:
            session.write_text(str(_NICENESS), encoding="utf-8")
        except OSError as error:
            log.warning("%s cannot be set (%s); this process may slow the run", session, error.strerror)
