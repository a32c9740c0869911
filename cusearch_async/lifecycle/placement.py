"""The cores, GPUs and priority of a process.

`configure_process` must run before torch is loaded, so this module does not import torch at the top."""

from __future__ import annotations

import ctypes
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from cusearch_async.config import LOOPBACK, Config, is_loopback
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle import cuda
from cusearch_async.lifecycle.gpus import cuda_name
from cusearch_async.machine import usable_cores

log = logging.getLogger(__name__)

LAUNCHED = "CUSEARCH_LAUNCHED"
"""An environment variable that `launch` sets for all processes of a run."""
_NICENESS = 10
_KERNELS = "64"
"""A decoder's layers, forward and backward, need about 13 for one number of tokens."""


def configure_process(cores: Sequence[int], gpus: Sequence[str] = (), sharers: int = 1) -> None:
    """Restrict this process to `cores` and `gpus` (empty: all), with one thread per usable core, and let waiting
    threads sleep: threads of OpenMP that spin would starve the run's other processes. A process without `cores` has a
    thread for its share of the machine: `sharers` such processes run on it.

    The libraries read these variables when they are loaded, so this must run before torch is imported. Cores that this
    machine does not have are ignored; if none is left, all are used."""
    defaults = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "GOMP_SPINCOUNT": "0",
        # oneDNN compiles a kernel for every shape of a bfloat16 layer's input, of a megabyte or more, and torch and it
        # would keep 1,024 each: gigabytes, as no two micro-batches have the same number of tokens
        "LRU_CACHE_CAPACITY": _KERNELS,
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": _KERNELS,
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would choose the cores itself
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on CPU: the model lives in the engine's process
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked engine outlives its worker
        # on a GPU, loading and compiling take minutes, and vLLM logs its progress; on a CPU, seconds
        "VLLM_LOGGING_LEVEL": "INFO" if cuda.has_cuda_vllm() else "ERROR",
        "PYTHONSAFEPATH": "1",  # vLLM's processes find no package in the current folder either
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning",  # libraries warn about each other
    }
    if os.environ.get("MASTER_ADDR", LOOPBACK[0]) in LOOPBACK:  # the default is the address of the host's name
        defaults |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore", FutureWarning)
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(cuda_name, gpus))
    usable = sorted(set(cores) & os.sched_getaffinity(0))
    if usable:
        os.sched_setaffinity(0, usable)
    threads = usable_cores() // (1 if usable else sharers)
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, threads))
        # On a GPU, vLLM loads a model with these threads and then serves with one, unless a user has chosen the number.
        os.environ["VLLM_OMP_NUM_THREADS_SET_BY_VLLM"] = "1"


def count_sharers(config: Config, of_its_kind: int = 1) -> int:
    """Processes without separate cores that share this machine with one that `cusearch launch` has started, or that was
    started by hand where Redis is on loopback: all of the run. Else the run is on several machines, and it is those
    `of_its_kind`. At least 1."""
    if LAUNCHED not in os.environ and not is_loopback(config.redis.url):
        return of_its_kind
    processes = (
        (config.learner.cores, config.learner.ranks_per_node),
        (config.rollout.cores, config.rollout.workers),
        (config.eval.cores, 1 if config.eval.every else 0),
        ((), 1 if config.searching and is_loopback(config.retriever.url) else 0),
    )
    there = os.sched_getaffinity(0)  # a process whose cores are not there takes any
    return max(1, sum(count for cores, count in processes if not there.intersection(cores)))


def share_of(cores: Sequence[int], index: int, count: int) -> list[int]:
    """The cores of process `index` of `count`; all of them when there are fewer cores than processes."""
    return list(cores[index::count]) if len(cores) >= count else list(cores)


def require_gpus(key: str, gpus: Sequence[str]) -> None:
    """Check that CUDA finds `gpus`. Call it after `configure_process`, which hides all other GPUs.

    Raises: ConfigError when CUDA does not find them; as `cuda.refuse_idle_cuda` when none is named."""
    if not gpus:
        cuda.refuse_idle_cuda()
        return
    found = cuda.count_gpus()
    if found < len(gpus):
        raise ConfigError(
            f"{key} = [{', '.join(gpus)}], but CUDA finds {found} of them on this machine ({cuda.why_unusable()}); "
            "name other GPUs (nvidia-smi lists them), or none, and set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        )


def require_libnuma() -> None:
    """Check that what vLLM's CPU build is linked with is there. vLLM only notices that its operators are missing.

    Raises: ConfigError when it is not."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as error:
        raise ConfigError(f"vLLM's CPU build needs libnuma: `sudo apt-get install libnuma1` ({error})") from error


def require_device(key: str, device: str) -> None:
    """Raises: ConfigError when `device` is a GPU ("cuda", "cuda:1") that CUDA does not find."""
    kind, _, index = device.partition(":")
    if kind == "cuda" and cuda.count_gpus() <= int(index or 0):
        raise ConfigError(
            f"{key} = {device!r}, but CUDA finds {cuda.count_gpus()} GPUs on this machine ({cuda.why_unusable()}); set "
            "it to 'cpu'"
        )


def lower_priority() -> None:
    """Use the time that the run's other processes leave free, and about a tenth of busy cores.

    With autogroup, Linux divides the cores among sessions first, so the niceness of the session is set too, if this
    process leads it."""
    os.nice(_NICENESS)
    session = Path("/proc/self/autogroup")
    if session.exists() and os.getsid(0) == os.getpid():
        try:
            session.write_text(str(_NICENESS), encoding="utf-8")
        except OSError as error:
            log.warning("%s cannot be set (%s); this process may slow the run", session, error.strerror)
