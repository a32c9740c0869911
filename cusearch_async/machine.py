"""The cores and the memory that this process may use: the machine's, or fewer in a container.

Docker, Kubernetes and Slurm limit them with control groups, of which neither the scheduler's affinity nor the machine's
memory tells. A limit also holds for the groups within its group, and a container may see its own as the outermost.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

MINE = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes."""

    total: int
    used: int
    """Without what the kernel gives back at once."""


def usable_cores() -> int:
    """At least 1; a container with 1.5 of them has 2, the second of which is not always there."""
    cores = len(os.sched_getaffinity(0))
    for group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no limit, which both versions say otherwise
            quota, period = _quota(group)
            cores = min(cores, math.ceil(quota / period))
    return max(1, cores)


def usable_memory() -> Memory:
    """Of the machine, or of the smallest group that this process is in."""
    machine = psutil.virtual_memory()
    found = Memory(machine.total, machine.total - machine.available)
    for group in _groups("memory"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            limited = _memory(group)
            found = limited if limited.total < found.total else found
    return found


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those around it, in both versions of control groups."""
    try:
        lines = MINE.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            root = GROUPS if number == "0" else GROUPS / controller
            group = root / path.lstrip("/")
            yield group
            yield from (parent for parent in group.parents if parent == root or root in parent.parents)


def _quota(group: Path) -> tuple[int, int]:
    """Microseconds of all cores together in a period, and the period's. Raises: OSError, ValueError without one."""
    with contextlib.suppress(FileNotFoundError):
        given, of = (group / "cpu.max").read_text(encoding="utf-8").split()
        return int(given), int(of)
    quota, period = (_number(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota < 0:
        raise ValueError("no limit")
    return quota, period


def _memory(group: Path) -> Memory:
    """Raises: OSError, ValueError or KeyError without a limit."""
    is_second = (group / "memory.max").exists()
    limit, usage, idle = (
        ("memory.max", "memory.current", "inactive_file")
        if is_second
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
    return Memory(_number(group / limit), max(0, _number(group / usage) - int(stat[idle])))


def _number(path: Path) -> int:
    return int(path.read_text(encoding="utf-8"))
