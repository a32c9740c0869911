"""What a process of a run is before it is anything else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cusearch_async import host
from cusearch_async.errors import ConfigError

AUTOGROUP = Path("/proc/self/autogroup")
GIVE_WAY = """
import os, pathlib
from cusearch_async import host
from cusearch_async.errors import ConfigError
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


@pytest.mark.parametrize("module", ["cusearch_async.processes.start", "workers.learner", "workers.retriever"])
def test_help_of_a_process_is_no_failure(module: str):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "a TOML file" in done.stdout


def test_gpus_that_are_not_there_are_named():
    host.require_gpus("learner.gpus", ())
    with pytest.raises(ConfigError, match=r"learner.gpus = \[7, 997\], but CUDA finds \d of them"):
        host.require_gpus("learner.gpus", [7, 997])


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
    assert re.search(r"gpus = \[997\], but CUDA finds 0 of them.*name others.*or none", line), line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("learner.lr: too high"), "test: learner.lr: too high"),
        (ExceptionGroup("tasks", [ValueError("x"), ConfigError("no")]), "test: no"),
        (FileNotFoundError(2, "No such file or directory", "/nowhere"), "test: /nowhere: No such file or directory"),
        (
            ExceptionGroup("tasks", [PermissionError(13, "Permission denied", b"/root")]),
            "test: /root: Permission denied",
        ),
    ],
)
def test_a_failure_with_a_name_is_one_line(error: Exception, line: str):
    with pytest.raises(SystemExit) as ended, host.last_words("test"):
        raise error
    assert str(ended.value.code).startswith(line)
    assert "\n" not in str(ended.value.code)


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("x"), OSError("no path"), ExceptionGroup("", [ValueError()])]
)
def test_a_bug_keeps_its_traceback(error: Exception):
    with pytest.raises(type(error)), host.last_words("test"):
        raise error
