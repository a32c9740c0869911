"""Processes of the tests that need not import anything first: each is forked from one process that has imported all
(`preloaded`), which takes 12 s of a core."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from cusearch_async.lifecycle.children import die_with_parent

PRELOADED = "tests.system.preloaded"
ROOT = Path(__file__).parents[2]


class Forked:
    """`python -m MODULE ARGUMENTS` with `env` besides this environment; it has the methods of Popen that tests use."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        module, *arguments = command
        self.log = log
        log.touch()
        self._process = _context().Process(
            target=_begin, args=(module, arguments, os.environ | dict(env), log), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            late = subprocess.TimeoutExpired(str(self.log), timeout)
            late.add_note(self.log.read_text(errors="replace")[-3000:])
            raise late
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """What it has printed, when it has ended."""
        self.wait(timeout)
        return self.log.read_text(errors="replace"), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def forked_engines() -> Iterator[None]:
    """The engines that this process starts inside are forked too. Their output is not heard."""
    from vllm.v1.engine import utils

    context = _context()
    with (
        mock.patch.object(context, "Process", _Engine),
        mock.patch.object(utils, "get_mp_context", return_value=context),
    ):
        yield


class _Engine(ForkServerProcess):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        keep_frozen()
        super().run()


def keep_frozen() -> None:
    """vLLM's end would collect all that `preloaded` has imported, in vain."""
    gc.unfreeze = lambda: None


class Command(subprocess.Popen[bytes]):
    """The same as a new process, as users start it."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        with log.open("wb") as output:
            super().__init__(
                [sys.executable, "-m", *command],
                stdout=output,
                stderr=output,
                env=os.environ | dict(env),
                preexec_fn=_heed_hangup,
            )

    def communicate(self, timeout: float) -> tuple[str, None]:
        self.wait(timeout)
        return self.log.read_text(errors="replace"), None


Process = Forked | Command


def _heed_hangup() -> None:
    """These tests may run under nohup, which children inherit."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    # A test before may have set PYTHONSAFEPATH, as our processes do: the current folder does not find the tests then.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    read_by_what_it_imports = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with mock.patch.dict(os.environ, read_by_what_it_imports | {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}):
        ensure_running()
    return context


def _begin(module: str, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> NoReturn:
    assert PRELOADED in sys.modules
    multiprocessing.current_process()._config["daemon"] = False  # it may have children
    os.setsid()
    die_with_parent(signal.SIGKILL)
    _heed_hangup()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    be_main(module, arguments, env)


def be_main(module: str, arguments: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Go on as `python -m MODULE ARGUMENTS` in the environment `env`, to the end of this process."""
    from setproctitle import setproctitle

    status = 1
    try:
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [module, *arguments]
        setproctitle(" ".join((sys.executable, "-m", *sys.argv)))
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        else:
            status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
