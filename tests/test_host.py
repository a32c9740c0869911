"""What a process of a run is before it is anything else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cusearch_async import host

AUTOGROUP = Path("/proc/self/autogroup")
GIVE_WAY = """
import os, pathlib
from cusearch_async import host
host.give_way()
print(os.nice(0), pathlib.Path("/proc/self/autogroup").read_text())
"""


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel shares cores among processes, not sessions")
@pytest.mark.parametrize(
    "starter", [[], [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]]
)
def test_a_process_gives_way_with_its_session_only_if_that_is_its_own(tmp_path: Path, starter: list[str]):
    child = host.start_child([*starter, sys.executable, "-c", GIVE_WAY], log_file=tmp_path / "log")
    assert child.wait(timeout=30) == 0
    nice, _, _, of_session = (tmp_path / "log").read_text().split()
    least = min(os.nice(0) + 10, 19)  # beside what these tests were started with, and never above the kernel's most
    assert (int(nice), of_session) == (least, "0" if starter else "10")
