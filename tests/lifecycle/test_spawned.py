"""An engine that a worker has spawned is killed with it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

import cusearch_async
from cusearch_async.lifecycle.children import start_child
from tests.conftest import SLOW

SPAWNS = """
import ctypes, multiprocessing, os, signal
from cusearch_async.lifecycle.placement import configure_process
from cusearch_async.lifecycle.spawned import die_with_worker

die_with_worker()

def ask():
    on_death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(on_death))  # PR_GET_PDEATHSIG
    print(on_death.value, signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, flush=True)

if __name__ == "__main__":
    configure_process([])
    child = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"]).Process(target=ask)
    child.start()
    child.join()
"""


IMPORTED = """
import runpy, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which children inherit
from worker import ask
runpy.run_module(sys.argv[1], run_name=sys.argv[2], alter_sys=True)
ask()
"""
"""As multiprocessing imports the main module of the worker in the engine's process."""


@pytest.fixture
def said(tmp_path: Path):
    """What a script says that can import `worker`."""
    (tmp_path / "worker.py").write_text(SPAWNS)

    def run(*command: str) -> list[str]:
        path = os.pathsep.join([str(tmp_path), str(Path(cusearch_async.__file__).parents[1])])
        child = start_child([sys.executable, *command], {"PYTHONPATH": path}, tmp_path / "log")
        assert child.wait(timeout=60 * SLOW) == 0, (tmp_path / "log").read_text()
        return (tmp_path / "log").read_text().split()

    return run


@pytest.mark.system
def test_an_engine_is_started_so_that_it_dies_with_its_worker(said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """vLLM forks its engine on CUDA unless it is told otherwise, and a forked one is not armed."""
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    assert said(str(tmp_path / "worker.py")) == [str(int(signal.SIGKILL)), "True"]


@pytest.mark.system
@pytest.mark.parametrize("module", ["cusearch_async.cli.main", "workers.rollout"])
def test_each_entry_point_arms_the_engine_that_is_spawned_from_it(said, module: str):
    assert said("-c", IMPORTED, module, "__mp_main__") == [str(int(signal.SIGKILL)), "True"]


@pytest.mark.system
def test_a_process_that_nothing_has_spawned_is_left_as_it_is(said):
    """Also where multiprocessing was imported before, as `worker` does."""
    assert said("-c", IMPORTED, "cusearch_async.cli.main", "imported") == [str(int(signal.SIGTERM)), "False"]
