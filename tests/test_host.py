"""What a process of a run is before it is anything else."""

from __future__ import annotations

import signal
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
    assert (nice, of_session) == ("10", "0" if starter else "10")


SPAWNS = """
import ctypes, multiprocessing, os
from cusearch_async import host

def ask():
    signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal))  # PR_GET_PDEATHSIG
    print(signal.value, flush=True)

if __name__ == "__main__":
    host.settle([])
    child = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"]).Process(target=ask)
    child.start()
    child.join()
"""


def test_an_engine_is_started_so_that_it_dies_with_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """vLLM forks its engine on CUDA unless it is told otherwise, and a forked one is not armed."""
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    (tmp_path / "worker.py").write_text(SPAWNS)
    child = host.start_child([sys.executable, str(tmp_path / "worker.py")], log_file=tmp_path / "log")
    assert child.wait(timeout=60) == 0
    assert (tmp_path / "log").read_text().split() == [str(int(signal.SIGKILL))]
