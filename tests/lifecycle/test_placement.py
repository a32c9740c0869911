"""GPUs that are not there are refused, and the evaluator gives way to the run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.children import start_child
from cusearch_async.lifecycle.placement import require_device, require_gpus
from tests.conftest import SLOW

AUTOGROUP = Path("/proc/self/autogroup")


GIVE_WAY = """
import os, pathlib
from cusearch_async.lifecycle.placement import lower_priority
lower_priority()
print(os.nice(0), pathlib.Path("/proc/self/autogroup").read_text())
"""


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel shares cores among processes, not sessions")
@pytest.mark.parametrize(
    "starter", [[], [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]]
)
@pytest.mark.system
def test_a_process_gives_way_with_its_session_only_if_that_is_its_own(tmp_path: Path, starter: list[str]):
    child = start_child([*starter, sys.executable, "-c", GIVE_WAY], log_file=tmp_path / "log")
    assert child.wait(timeout=30 * SLOW) == 0
    nice, _, _, of_session = (tmp_path / "log").read_text().split()
    least = min(os.nice(0) + 10, 19)  # beside what these tests were started with, and never above the kernel's most
    assert (int(nice), of_session) == (least, "0" if starter else "10")


def test_gpus_that_are_not_there_are_named():
    require_gpus("learner.gpus", ())
    with pytest.raises(ConfigError, match=r"learner.gpus = \[0, 1, .*996\], but CUDA finds \d+ of them"):
        require_gpus("learner.gpus", range(997))
    with pytest.raises(ConfigError, match=r"retriever.dense.device = 'cuda:997', but CUDA finds \d+ GPUs"):
        require_device("retriever.dense.device", "cuda:997")
    require_device("retriever.dense.device", "cpu")


@pytest.mark.system
@pytest.mark.parametrize("process", ["learner", "rollout", "evaluator"])
def test_a_process_whose_gpu_is_not_there_ends_with_one_line(process: str, tmp_path: Path):
    settings = [f"--{process if process != 'evaluator' else 'eval'}.gpus", "[997]", "--eval.every", "1"]
    settings += ["--run.folder", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "cusearch_async.processes.start", process, "atlas", *settings],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.search(r"gpus = \[997\], but CUDA finds 0 of them.*name other GPUs.*or none", line), line
    assert not (tmp_path / "run").exists()
