"""How a command ends when nobody reads its output, its device is full, or ctrl-C comes early; and what it imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SLOW

pytestmark = pytest.mark.system  # each starts an interpreter

COMMAND = [sys.executable, "-m", "cusearch_async.cli.main"]
ROOT = Path(__file__).parents[2]


def end_of(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for name in ("PYTHONUNBUFFERED", "PYTHONSAFEPATH"):
        env.pop(name, None)
    options = {"stdout": subprocess.PIPE, "env": env} | options
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60 * SLOW, check=False, **options)


@pytest.mark.parametrize("command", [["config", "--schema"], ["config", "atlas"], ["--help"], ["--version"]])
def test_a_full_device_is_named_in_one_line(command):
    with Path("/dev/full").open("w") as full:
        done = end_of([*COMMAND, *command], stdout=full)
    assert done.returncode == 1
    assert done.stderr == (
        "cusearch: nothing more can be written: No space left on device; make room on the disk, or send the output "
        "elsewhere\n"
    )


@pytest.fixture
def full(tmp_path):
    """A file that takes nothing and may be deleted, unlike the machine's own /dev/full."""
    path = tmp_path / "full.parquet"
    path.symlink_to("/dev/full")
    return path


def test_an_output_that_is_full_is_named_and_not_deleted(full):
    done = end_of([*COMMAND, "data", "convert", "atlas", "--output", str(full)])
    assert done.returncode == 1
    assert done.stderr == f"cusearch: --output {full} cannot be written: No space left on device; choose another\n"
    assert full.is_symlink()


@pytest.mark.parametrize("command", [["config", "--schema"], ["--help"]])
def test_a_closed_pipe_is_no_error(command):
    read, write = os.pipe()
    os.close(read)
    done = end_of([*COMMAND, *command], stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


INTERRUPTED = """
import os, runpy, signal, sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == {at!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
sys.argv = ["cusearch", "check", "atlas"]
runpy.run_module("cusearch_async.cli.main", run_name="__main__")
"""


@pytest.mark.parametrize("at", ["argparse", "pydantic", "cusearch_async.cli.check", "transformers", "numpy"])
def test_an_interrupt_while_libraries_are_imported_says_nothing(at):
    done = end_of([sys.executable, "-c", INTERRUPTED.format(at=at)])
    assert (done.returncode, done.stderr) == (130, "")


def test_files_of_the_current_folder_are_not_taken_for_packages(tmp_path):
    for name in ("redis", "torch", "pydantic", "uvloop", "rich"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not the package')")
    done = end_of([*COMMAND, "buckets", "atlas", "--ledger", "--redis.url", "redis://127.0.0.1:1/0"], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("cusearch: Redis at 127.0.0.1:1 cannot be reached")
    worker = [sys.executable, "-m", "cusearch_async.cli.main", "worker", "evaluator", "atlas"]
    done = end_of(worker, cwd=tmp_path)
    assert done.stderr.startswith("evaluator: eval.every is 0")


def test_a_current_folder_that_was_deleted_is_no_obstacle(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    done = end_of(["sh", "-c", f'rmdir {gone}; exec "$@"', "sh", *COMMAND, "--version"], cwd=gone)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_of_the_current_folder_is_found(tmp_path):
    (tmp_path / "my_method.py").write_text("from cusearch_async.algorithm.methods.baselines import GrpoFull as Mine")
    settings = ["--method.name", "my_method:Mine", "--method.budget", "96"]
    done = end_of([*COMMAND, "config", "atlas", *settings], cwd=tmp_path)
    assert '`method.name` (`"my_method:Mine"`, shared)' in done.stdout, done.stderr


def test_an_interrupt_that_scripts_ignore_stays_ignored(tmp_path):
    done = end_of([*COMMAND, "--version"], preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert done.returncode == 0
