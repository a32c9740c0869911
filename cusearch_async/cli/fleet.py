"""The processes of a run on one machine: start them, watch them, stop them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from cusearch_async import host
from cusearch_async.config import Config, redis_password, save_config
from cusearch_async.errors import BufferUnavailable, ProcessDied, RetrievalUnavailable
from cusearch_async.transport.server import is_listening, server_command

log = logging.getLogger(__name__)

STOP_S = 20.0
POLL_S = 0.1
_SERVING = ("redis", "retriever", "simulator", "rollout")


class Fleet:
    """A context: whatever it started is stopped when it is left, in whatever way.

    Redis, the retriever and the atlas simulator are started only where nothing listens yet; then their address must be
    on loopback."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._config_path = config.folder / "config.toml"
        self._logs = config.folder / "logs"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Fleet:
        save_config(self._config, self._config_path)
        self._logs.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGTERM, _interrupt)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop(*self.processes)

    def start_services(self) -> None:
        """Redis, the retriever and what it needs, unless they run already. Returns when all accept connections."""
        config = self._config
        if not is_listening(config.redis.url):
            self._start("redis", server_command(config.redis.url, config.folder / "redis", redis_password()))
        if not is_listening(config.retriever.url):
            _refuse_elsewhere("retriever.url", config.retriever.url)
            self.start_worker("retriever", "retriever")
        urls = [config.redis.url, config.retriever.url]
        if config.retriever.backend == "zerosearch" and "atlas" in config.data.source:
            urls.append(config.retriever.zerosearch.url)
            if not is_listening(urls[-1]):
                _refuse_elsewhere("retriever.zerosearch.url", urls[-1])
                self.start_command("simulator", "atlas", "simulate")
        self.wait(lambda: all(map(is_listening, urls)), config.run.wait_s)

    def start_run(self) -> None:
        """The learner, the rollout workers, and the evaluator if there is to be one."""
        self.start_worker("learner", "learner")
        if self._config.eval.every:
            self.start_worker("evaluator", "evaluator")
        for index in range(self._config.rollout.workers):
            self.start_worker(f"rollout-{index}", "rollout", {"CUSEARCH_WORKER_INDEX": str(index)})

    def start_worker(self, name: str, module: str, env: dict[str, str] | None = None) -> None:
        self._start(name, [sys.executable, "-m", "cusearch_async.processes.start", module, str(self._config_path)], env)

    def start_command(self, name: str, *command: str, options: Sequence[str] = ()) -> None:
        """A `cusearch` sub-command on this run's config; `options` follow the config."""
        line = [sys.executable, "-m", "cusearch_async.cli.main", *command, str(self._config_path), *options]
        self._start(name, line)

    def wait(self, is_done: Callable[[], bool], timeout_s: float | None = None, poll_s: float = POLL_S) -> None:
        """Until `is_done`, watching all processes.

        Raises: ProcessDied as soon as one has ended, BufferUnavailable after `timeout_s`."""
        deadline = time.monotonic() + timeout_s if timeout_s else None
        while not is_done():
            self.check()
            if deadline and time.monotonic() > deadline:
                raise BufferUnavailable(
                    f"Redis, the retriever or the simulator did not start within {timeout_s:g} s, see {self._logs}"
                )
            time.sleep(poll_s)

    def has_ended(self, name: str) -> bool:
        """Whether a process has ended well. Raises: ProcessDied if it failed."""
        status = self.processes[name].poll()
        if status:
            raise ProcessDied(self._last_words(name, status))
        return status == 0

    def is_run_over(self) -> bool:
        """Whether the learner has ended well, and the evaluator in any way. Raises: ProcessDied."""
        evaluator = self.processes.get("evaluator")
        return self.has_ended("learner") and (evaluator is None or evaluator.poll() is not None)

    def check(self) -> None:
        """Raises: ProcessDied when any process has failed, or one has ended that serves until it is stopped. A run
        goes on without its evaluator."""
        evaluator = self.processes.get("evaluator")
        if evaluator is not None and evaluator.poll():
            log.warning(
                "the run goes on without its evaluator: %s", self._last_words("evaluator", evaluator.returncode)
            )
            del self.processes["evaluator"]
        for name in self.processes:
            if self.has_ended(name) and name.startswith(_SERVING):
                raise ProcessDied(self._last_words(name, 0))

    def stop(self, *names: str) -> None:
        """SIGTERM, in reverse order of starting; what has not ended after STOP_S is killed, children and all."""
        stopping = [(name, self.processes.pop(name)) for name in reversed(names) if name in self.processes]
        for _, process in stopping:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + STOP_S
        for _, process in stopping:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            _kill_group(process)
            process.wait()

    def _start(self, name: str, command: list[str], env: dict[str, str] | None = None) -> None:
        self.processes[name] = host.start_child(command, env, self._logs / f"{name}.log")

    def _last_words(self, name: str, status: int) -> str:
        path = self._logs / f"{name}.log"
        lines = [line for line in _read(path).splitlines() if line.strip()]
        said = f": {lines[-1][:500]}" if lines else ""
        return f"{name} ended with status {status}{said} (log: {path})"


def _refuse_elsewhere(key: str, url: str) -> None:
    """Raises: RetrievalUnavailable unless we could start a server at this address."""
    if urlsplit(url).hostname not in ("127.0.0.1", "localhost"):
        raise RetrievalUnavailable(f"nothing listens at {key} {url}; start it first")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End what a process has left behind; it was started as the leader of its own group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
