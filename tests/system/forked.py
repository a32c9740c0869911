"""Scripts of the tests as processes of their own that need not import anything first: each is forked from one process
that has imported torch, transformers and DeepSpeed, which takes 6 s of a core."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from unittest import mock

PRELOADED = [
    "cusearch_async.processes.learner",
    "torch._dynamo",
    "transformers.models.qwen2.modeling_qwen2",
    "peft",
    "tests.strategies",
]


class Forked:
    """`python -m MODULE ARGUMENTS` with `env` besides this environment; it has the methods of Popen that tests use."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        module, *arguments = command
        self._log = log
        log.touch()
        self._process = _context().Process(
            target=_run, args=(module, arguments, os.environ | dict(env), log), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def communicate(self, timeout: float) -> tuple[str, None]:
        """What it has printed, when it has ended."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired(str(self._log), timeout, self._log.read_text())
        return self._log.read_text(), None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}):  # read by what it imports
        ensure_running()
    return context


def _run(module: str, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> None:
    os.environ.clear()
    os.environ.update(env)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
