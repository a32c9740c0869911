"""Which cores and GPUs a process uses, and which other processes of the run it gives way to.

`configure_process` must run before torch is loaded, so nothing here imports it at the top."""

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
    """Stay on `cores` and `gpus` (empty: all), with a thread a core, and let waiting threads sleep.

    OpenMP threads that spin while they wait starve the other processes of the run on a small machine. The
    libraries read these variables when they are loaded, so this comes before torch is imported. Cores that
    this machine does not have are left out; if none is left, all are used."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if os.environ.get("MASTER_ADDR", LOOPBACK[0]) in LOOPBACK:  # else they listen at what the host's name stands for
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM would bind to cores of its own choice
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # on CPU: the model lives in the engine's process
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a forked engine outlives its worker
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # of libraries about each other
    warnings.simplefilter("ignore", FutureWarning)
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    usable = sorted(set(cores) & os.sched_getaffinity(0))
    if usable:
        os.sched_setaffinity(0, usable)
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))


def share_of(cores: Sequence[int], index: int, count: int) -> list[int]:
    """The cores of process `index` of `count`; all of them when there are too few to share."""
    return list(cores[index::count]) if len(cores) >= count else list(cores)


def require_gpus(key: str, gpus: Sequence[int]) -> None:
    """After `configure_process`, which has made `gpus` the only ones that this process sees.

    Raises: ConfigError when the config names GPUs that CUDA does not find: torch would go on without a word, on the
    CPU."""
    found = count_gpus() if gpus else 0
    if found < len(gpus):
        raise ConfigError(
            f"{key} = {list(gpus)}, but CUDA finds {found} of them on this machine; name others (nvidia-smi lists "
            "them), or none to run without a GPU"
        )


def require_device(key: str, device: str) -> None:
    """Raises: ConfigError when `device` is a GPU ("cuda", "cuda:1") that CUDA does not find."""
    kind, _, index = device.partition(":")
    if kind == "cuda" and count_gpus() <= int(index or 0):
        raise ConfigError(f"{key} = {device!r}, but CUDA finds {count_gpus()} GPUs on this machine; set it to 'cpu'")


def count_gpus() -> int:
    """CUDA devices that torch can use in this process."""
    import torch  # noqa: PLC0415  (reads what `configure_process` sets when it is loaded)

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def lower_priority() -> None:
    """Take of the cores what the run's other processes leave free, and a tenth of what they keep busy.

    Where Linux shares cores among sessions (autogroup), a nice process in a session of its own gives way to nobody:
    then the session has to be nice, if it is ours alone."""
    os.nice(_NICENESS)
    session = Path("/proc/self/autogroup")
    if session.exists() and os.getsid(0) == os.getpid():
        try:
            session.write_text(str(_NICENESS), encoding="utf-8")
        except OSError as error:
            log.warning("%s cannot be set (%s); this process may slow the run", session, error.strerror)
