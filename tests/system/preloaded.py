"""All that the processes of a test import and read, once: they are forked from a process that has imported this module.

What they start in turn is forked too: the processes of a launch, the other ranks of a learner, the engine of a worker.
On a CPU, importing takes a short run more time than all the rest of it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any

from setproctitle import getproctitle

from cusearch_async.lifecycle.children import die_with_parent
from cusearch_async.lifecycle.placement import configure_process

getproctitle()  # it finds where the title is as long as nobody has changed the environment
configure_process([])  # torch and vLLM read the environment when they are loaded

import matplotlib.backends.backend_agg  # noqa: E402
import matplotlib.figure  # noqa: E402, F401
import peft  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401
import transformers.models.qwen2.modeling_qwen2  # noqa: E402, F401
import vllm.v1.engine.core  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401
from vllm.v1.engine import utils  # noqa: E402

import cusearch_async.cli.launch  # noqa: E402
import cusearch_async.processes.evaluator  # noqa: E402
import cusearch_async.processes.learner  # noqa: E402
import cusearch_async.processes.rollout  # noqa: E402
import cusearch_async.rollout.engine  # noqa: E402, F401
import tests.strategies  # noqa: E402, F401
from cusearch_async.config import load_config, shipped_configs  # noqa: E402
from cusearch_async.data.questions import load_run_questions  # noqa: E402
from tests.system.forked import be_main, keep_frozen  # noqa: E402


class ForkingPopen(subprocess.Popen[Any]):
    """Forks this process where the command is `python -m` and a module of ours, as `start_child` has it."""

    def _execute_child(
        self,
        args: Sequence[str],
        executable: object,
        preexec_fn: Callable[[], None] | None,
        close_fds: bool,
        pass_fds: object,
        cwd: object,
        env: Mapping[str, str] | None,
        startupinfo: object,
        creationflags: object,
        shell: bool,
        *rest: Any,
    ) -> None:
        if preexec_fn is not die_with_parent or list(args[:2]) != [sys.executable, "-m"]:
            passed = (close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
            super()._execute_child(args, executable, preexec_fn, *passed, *rest)
            return
        assert env is not None
        pipes = rest[:6]
        self.pid = os.fork()
        if not self.pid:
            _begin_like_a_new_process(stdin=pipes[0], stdout=pipes[3], stderr=pipes[5])
            be_main(args[2], args[3:], env)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def _begin_like_a_new_process(stdin: int, stdout: int, stderr: int) -> None:
    """With none of its parent's files and signal handlers, in a session of its own."""
    os.setsid()
    die_with_parent()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for ours, given in enumerate((stdin, stdout, stderr)):
        if given != -1:
            os.dup2(given, ours)
    nothing = os.open(os.devnull, os.O_RDWR)
    for place in list(Path("/proc/self/fd").iterdir()):
        if int(place.name) > 2 and place.exists():
            os.dup2(nothing, int(place.name))  # closing it would let an object of the parent close a file of ours


class _Engine(ForkProcess):
    def run(self) -> None:
        """Ends with its worker, as a spawned one does (lifecycle/spawned.py)."""
        die_with_parent(signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        keep_frozen()
        super().run()


class _EngineContext(ForkContext):
    Process = _Engine


subprocess.Popen = ForkingPopen
utils.get_mp_context = _EngineContext
load_run_questions(load_config(shipped_configs()["atlas"]))  # kept
gc.collect()
gc.freeze()  # DeepSpeed and vLLM collect at their start: what is imported stays
