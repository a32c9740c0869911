"""What a process may use: a container's control groups, as both versions of the kernel's interface show them."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cusearch_async import machine
from cusearch_async.machine import Memory, usable_cores, usable_memory

GIB = 2**30
ALL = Memory(64 * GIB, 24 * GIB)
UNLIMITED = "9223372036854771712"
"""Bytes, in the first version."""


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Makes control groups on a machine with 8 cores and 64 GiB: the text of /proc/self/cgroup, and the files."""
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "MINE", tmp_path / "mine")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    there = SimpleNamespace(total=ALL.total, available=ALL.total - ALL.used)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there)

    def make(mine: str, files: dict[str, str]) -> None:
        (tmp_path / "mine").write_text(mine)
        for path, text in files.items():
            (file := tmp_path / "groups" / path).parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")

    return make


def memory_of_2(group, limit, used, idle=0):
    """The memory files of a group in the second version."""
    return {
        f"{group}memory.max": limit,
        f"{group}memory.current": str(used),
        f"{group}memory.stat": f"anon 5\ninactive_file {idle}\nfile 3",
    }


def memory_of_1(group, limit, used, idle=0):
    return {
        f"{group}memory.limit_in_bytes": limit,
        f"{group}memory.usage_in_bytes": str(used),
        f"{group}memory.stat": f"cache 5\ntotal_inactive_file {idle}",
    }


def test_without_groups_or_limits_it_is_the_machines(groups, tmp_path):
    assert (usable_cores(), usable_memory()) == (8, ALL), "no /proc"
    groups("0::/\n", {})
    assert (usable_cores(), usable_memory()) == (8, ALL), "the outermost group has no files"
    groups("0::/pod\n", {"pod/cpu.max": "max 100000", **memory_of_2("pod/", "max", GIB)})
    assert (usable_cores(), usable_memory()) == (8, ALL)
    first = {"cpu/pod/cpu.cfs_quota_us": "-1", "cpu/pod/cpu.cfs_period_us": "100000"}
    groups("3:cpu,cpuacct:/pod\n2:memory:/pod\n", first | memory_of_1("memory/pod/", UNLIMITED, GIB))
    assert (usable_cores(), usable_memory()) == (8, ALL)


@pytest.mark.parametrize(("quota", "cores"), [("200000", 2), ("150000", 2), ("5000", 1), ("9900000", 8)])
def test_a_quota_of_cores_is_rounded_up(groups, quota, cores):
    groups("0::/\n", {"cpu.max": f"{quota} 100000"})
    assert usable_cores() == cores
    groups("3:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": quota, "cpu/cpu.cfs_period_us": "100000"})
    assert usable_cores() == cores


@pytest.mark.parametrize("mine", ["0::/a/b\n", "0::/a/b/../..\n"])
def test_the_smallest_limit_of_the_groups_around_counts(groups, mine):
    """The second `mine` is how a process sees a group outside of its namespace."""
    files = {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000", "cpu.max": "600000 100000"}
    groups(mine, files | memory_of_2("a/", str(8 * GIB), 3 * GIB, GIB) | memory_of_2("a/b/", str(9 * GIB), GIB))
    assert (usable_cores(), usable_memory()) == (3, Memory(8 * GIB, 2 * GIB))


def test_a_container_that_sees_its_own_group_as_the_outermost_has_its_limits(groups):
    """The first version without a namespace: the path is the host's, and the files are the container's."""
    quota = {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}
    groups("7:cpu:/docker/4f\n6:memory:/docker/4f\n", quota | memory_of_1("memory/", str(4 * GIB), GIB, 2 * GIB))
    assert (usable_cores(), usable_memory()) == (4, Memory(4 * GIB, 0))


@pytest.mark.parametrize("text", ["", "rubbish", "1 0", "max"])
def test_files_that_say_nothing_limit_nothing(groups, text):
    groups("0::/\n", {"cpu.max": text, "memory.max": text, "memory.current": text, "memory.stat": text})
    assert (usable_cores(), usable_memory()) == (8, ALL)


SAYS = """
from cusearch_async.lifecycle.placement import configure_process
from cusearch_async.machine import usable_memory
import os
configure_process([])
print(os.environ["OMP_NUM_THREADS"], usable_memory().total)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_process_in_a_real_group_has_its_limits():
    made = []
    try:
        for controller, name, text in (
            ("cpu", "cpu.cfs_quota_us", "100000"),
            ("memory", "memory.limit_in_bytes", str(3 * GIB)),
        ):
            group = Path("/sys/fs/cgroup") / controller / f"test-{uuid.uuid4().hex}"
            try:
                group.mkdir()
            except OSError:
                pytest.skip("no control groups of the first version may be made here")
            made.append(group)
            (group / name).write_text(text)
        enter = "".join(f"echo $$ > {group}/cgroup.procs; " for group in made)
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        command = ["sh", "-c", f'{enter} exec "$0" -c "$1"', sys.executable, SAYS]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        assert done.stdout.split() == ["1", str(3 * GIB)]
    finally:
        for group in made:
            group.rmdir()
