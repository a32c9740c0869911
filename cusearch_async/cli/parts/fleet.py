"""The processes of a run on one machine: start them, watch them, stop them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from cusearch_async.config import Config, is_loopback, save_config
from cusearch_async.dashboard.server import address_of
from cusearch_async.data.questions import asks_of_atlas, refuse_another_world
from cusearch_async.errors import BufferUnavailable, CusearchError, ProcessDied, RetrievalUnavailable
from cusearch_async.lifecycle.children import CLI, free_port, start_child, why_it_ended
from cusearch_async.lifecycle.gpus import Gpus, cuda_name, divide
from cusearch_async.lifecycle.placement import LAUNCHED
from cusearch_async.lifecycle.progress import log_waiting
from cusearch_async.lifecycle.signals import stop_signals
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import Start, read_starts, read_stop
from cusearch_async.run.provenance import COMMAND
from cusearch_async.training.checkpoint import checkpoints_of
from cusearch_async.transport.server import holding_data, is_listening, own_server

log = logging.getLogger(__name__)

POLL_S = 0.1
PAGE_PORT = 8787
_SERVING = ("redis", "retriever", "simulator", "rollout")
_OPTIONAL = ("evaluator", "dashboard", "tracker")
"""Processes that a run continues without."""
_STAGES = (
    (("rollout", "evaluator", "eval_"), 60.0),
    (("learner",), 300.0),
    (("tracker",), 60.0),
    (("retriever", "simulator", "dashboard"), 30.0),
    (("redis",), 30.0),
)
"""The order in which processes are stopped, and how many seconds each stage may take: first the workers, which release
their tickets, then the learner, which saves its checkpoint, the tracker, which sends its last steps, then the
services."""

_SECRETS = {
    "CUSEARCH_REDIS_PASSWORD": ("learner", "rollout", "evaluator", "dashboard"),
    "CUSEARCH_SENTINEL_PASSWORD": ("learner", "rollout", "evaluator", "dashboard"),
    "CUSEARCH_WEIGHTS_TOKEN": ("learner", "rollout", "evaluator"),
    "CUSEARCH_AGENTS_TOKEN": ("rollout", "evaluator", "eval_"),
    "CUSEARCH_JUDGE_KEY": ("eval_",),
    "CUSEARCH_PAGE_TOKEN": ("dashboard",),
    "WANDB_API_KEY": ("tracker",),
    "MLFLOW_TRACKING_PASSWORD": ("tracker",),
    "MLFLOW_TRACKING_TOKEN": ("tracker",),
    "SERPER_API_KEY": ("retriever",),
    "SERPAPI_API_KEY": ("retriever",),
    "CUSEARCH_SIMULATOR_KEY": ("retriever",),
}
"""Environment variables with secrets, and the processes that need them: the others are started without them."""
_EPISODES = ("rollout", "evaluator", "eval_")
"""Processes that run episodes: they also have what environment.LABEL.passes names."""

MEMORY = "the kernel kills a process when memory is full: see `dmesg`"
_LOGGED = re.compile(r"\d\d:\d\d:\d\d [\w-]+: (.+)")


@dataclass
class Child:
    """A process that was started, and its log since then."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    began: int
    """Size of the log in bytes before the process was started."""
    read: int

    def new_lines(self) -> list[str]:
        """The lines that our code has logged since the last call, without the output of libraries."""
        self._start_again_if_cut()
        with self.log.open("rb") as file:
            file.seek(self.read)
            complete, _, _ = file.read().rpartition(b"\n")
        self.read += len(complete) + bool(complete)
        found = map(_LOGGED.fullmatch, complete.decode(errors="replace").splitlines())
        return [match[1] for match in found if match]

    def _start_again_if_cut(self) -> None:
        """Somebody, or logrotate, may have emptied it, or taken it away: then there is nothing to show."""
        self.log.touch()
        size = self.log.stat().st_size
        self.began, self.read = (where if where <= size else 0 for where in (self.began, self.read))

    def describe_end(self) -> str:
        """One line: the exit status and why the process has ended."""
        self._start_again_if_cut()
        status = self.process.returncode
        if status < 0:  # the last thing that it said is not why
            hint = f"{MEMORY}; " if -status == signal.SIGKILL else ""
            return f"{self.name} was killed by {signal.Signals(-status).name} ({hint}log: {self.log})"
        why = why_it_ended(self.log, self.began)
        return f"{self.name} ended with status {status}{f': {why}' if why else ''} (log: {self.log})"


class Fleet:
    """A context manager. On exit it stops everything that it has started; a second ctrl-C during that kills.

    Redis, the retriever and the atlas simulator are started only if nothing listens at their address yet; the address
    must then be on loopback. The run's folder is locked while the context is open."""

    def __init__(self, config: Config) -> None:
        """Raises: ConfigError when this machine has too few GPUs for the run."""
        self._config = config
        self._gpus = divide(config)
        self._config_path = config.folder / "launch.toml"
        self._logs = config.folder / "logs"
        self._passed = {name for own in config.environment.values() for name in getattr(own, "passes", ())}
        self._exit = contextlib.ExitStack()
        self.children: dict[str, Child] = {}

    def __enter__(self) -> Fleet:
        run_folder.mark(self._config.folder, self._config.run.name)
        self._exit.enter_context(run_folder.hold(self._config.folder))
        save_config(self._config, self._config_path)
        self._logs.mkdir(parents=True, exist_ok=True)
        for number in {*stop_signals()} - {signal.SIGINT}:
            self._exit.callback(signal.signal, number, signal.signal(number, _interrupt))
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal sends it twice, which must not kill
        with self._exit:
            self.stop()

    def start_services(self) -> None:
        """Start Redis, the retriever and what it needs, unless they run already. Returns when all accept connections.

        Raises: BufferUnavailable, RetrievalUnavailable or ProcessDied for a service that does not start."""
        config, retriever = self._config, self._config.retriever
        if not is_listening(retriever.url):
            refuse_another_world(config)
        services: list[tuple[str, str, type[CusearchError]]] = []
        if config.redis.transport == "redis":
            services.append(("Redis", config.redis.url, BufferUnavailable))
            if not is_listening(config.redis.url):
                with holding_data(config.redis, config.folder) as lock:
                    self._start("redis", own_server(config.redis, config.folder), inherited=(lock,))
        if config.searching:
            services.append(("the retriever", retriever.url, RetrievalUnavailable))
            self._start_or_reuse("retriever", retriever.url, "worker", "retriever")
        if config.searching and retriever.backend == "zerosearch" and asks_of_atlas(config):
            services.append(("the simulator", retriever.zerosearch.url, RetrievalUnavailable))
            self._start_or_reuse("simulator", retriever.zerosearch.url, "atlas", "simulate")
        for what, url, failure in services:
            self._wait_for_service(what, url, failure)

    def _start_or_reuse(self, name: str, url: str, *command: str) -> None:
        """Raises: RetrievalUnavailable unless it runs, or the address is on this machine, where we can start it."""
        if is_listening(url):
            log.info("reusing the %s already running at %s", name, url)
            return
        if not is_loopback(url):
            raise RetrievalUnavailable(
                f"no {name} listens at {url}; start one there: launch starts one on loopback only"
            )
        self.start_command(name, *command)

    def _wait_for_service(self, what: str, url: str, failure: type[CusearchError]) -> None:
        wait_s = self._config.run.wait_s
        deadline = time.monotonic() + wait_s
        with log_waiting(log, f"waiting for {what} at {url}"):
            self.wait(lambda: is_listening(url) or time.monotonic() > deadline)
        if not is_listening(url):
            raise failure(f"{what} did not start at {url} within run.wait_s = {wait_s:g} s; see {self._logs}")

    def start_run(self, accept_changes: bool = False) -> None:
        """Start the learner, the rollout workers and, with eval.every, the evaluator; with run.trackers, the tracker.

        With `accept_changes` the learner takes over first: until then Redis holds the old run contract, and the other
        processes would be refused. So it does in a run that was finished, where they would end at once. In a run that
        is continued the tracker alone waits for that."""
        earlier = read_starts(self._config.folder)
        stop = read_stop(self._config.folder, earlier[-1].epoch) if earlier else None
        options = [*_gpu_option(self._gpus.learner), *(["--accept-changes"] if accept_changes else [])]
        self.start_command("learner", "worker", "learner", options=options, env={COMMAND: shlex.join(sys.argv)})
        if accept_changes or (stop is not None and stop.outcome == "finished"):
            self._wait_for_take_over(earlier)
        if self._config.eval.every:
            self.start_command("evaluator", "worker", "evaluator", options=_gpu_option(self._gpus.evaluator))
        for index, gpus in enumerate(self._gpus.workers):
            own = {"CUSEARCH_WORKER_INDEX": str(index)}
            self.start_command(f"rollout-{index}", "worker", "rollout", options=_gpu_option(gpus), env=own)
        if self._config.run.trackers:
            if earlier:  # whose config is in the folder until then: its trackers, and its last step
                self._wait_for_take_over(earlier)
            command = ["runs", "track", str(self._config.folder), "--follow", "--trust"]
            self._start("tracker", [*CLI, *command])

    def _wait_for_take_over(self, earlier: Sequence[Start]) -> None:
        with log_waiting(log, "waiting for the learner to take over the run"):
            self.wait(lambda: self._has_taken_over(earlier) or self.has_ended("learner"))

    def _has_taken_over(self, earlier: Sequence[Start]) -> bool:
        """Whether there is a start of this learner, which may first fetch those of learners elsewhere."""
        own, before = (socket.gethostname(), self.children["learner"].process.pid), {one.epoch for one in earlier}
        return any((one.host, one.pid) == own and one.epoch not in before for one in read_starts(self._config.folder))

    def start_page(self) -> str:
        """Start the server of the run's page; its address."""
        port = PAGE_PORT if not is_listening(f"http://127.0.0.1:{PAGE_PORT}") else free_port()
        self.start_command("dashboard", "dashboard", options=["--port", str(port), "--trust"])
        return f"http://127.0.0.1:{port}{address_of(self._config.folder.resolve().name)}"

    def start_command(
        self, name: str, *command: str, options: Sequence[str] = (), env: dict[str, str] | None = None
    ) -> None:
        """A `cusearch` sub-command on this run's config; `options` follow the config."""
        line = [*CLI, *command, str(self._config_path), *options]
        self._start(name, line, env)

    def gpus_of_worker(self) -> dict[str, str]:
        """Variables for a command whose engine takes the place of the first worker's."""
        gpus = self._gpus.workers[0]
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(cuda_name, gpus))} if gpus else {}

    def wait(self, is_done: Callable[[], bool], poll_s: float = POLL_S) -> None:
        """Wait until `is_done`, and check all processes. Raises: ProcessDied as soon as one has failed."""
        while not is_done():
            self.check()
            time.sleep(poll_s)

    def has_ended(self, name: str) -> bool:
        """Whether a process has ended with status 0. Raises: ProcessDied for another status."""
        status = self.children[name].process.poll()
        if status:
            raise ProcessDied(self.children[name].describe_end())
        return status == 0

    def is_run_over(self) -> bool:
        """Whether the learner has ended with status 0, and the evaluator with any status. Raises: ProcessDied."""
        evaluator = self.children.get("evaluator")
        return self.has_ended("learner") and (evaluator is None or evaluator.process.poll() is not None)

    def check(self) -> None:
        """Raises: ProcessDied when a process has failed, or when a service or worker has ended. A run continues without
        its evaluator, its page or its tracker."""
        for name in _OPTIONAL:
            child = self.children.get(name)
            if child is not None and child.process.poll():
                log.warning("the run continues without its %s: %s", name, child.describe_end())
                del self.children[name]
        for name, child in self.children.items():
            if name not in _OPTIONAL and self.has_ended(name) and name.startswith(_SERVING):
                if name.startswith("rollout") and self._are_steps_done():
                    continue  # a worker ends with its run, a moment before the learner
                raise ProcessDied(child.describe_end())

    def _are_steps_done(self) -> bool:
        newest = checkpoints_of(self._config).latest()
        return newest is not None and newest.state.step >= self._config.run.steps

    def stop(self, *names: str) -> None:
        """Send SIGTERM to the named processes, or to all, stage by stage (`_STAGES`). A process that does not end in
        time is killed with its children. If this is interrupted, all are killed at once."""
        stopping = [child for name, child in self.children.items() if not names or name in names]
        try:
            for prefixes, patience_s in _STAGES:
                least_s = self._config.run.stall_s if "learner" in prefixes else 0.0  # a step, and a large checkpoint
                more_s = self._config.rollout.drain_s if "rollout" in prefixes else 0.0
                stage = [child for child in stopping if child.name.startswith(prefixes)]
                self._end(stage, max(patience_s, least_s) + more_s)
        except KeyboardInterrupt:
            self._kill(stopping)
            raise

    def _end(self, stage: Sequence[Child], patience_s: float) -> None:
        if not stage:
            return
        for child in stage:
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + patience_s
        alive = [child for child in stage if child.process.poll() is None]
        with log_waiting(log, f"waiting for {_names(alive)} to end (ctrl-C again kills)"):
            while alive and time.monotonic() < deadline:
                time.sleep(POLL_S)
                alive = [child for child in alive if child.process.poll() is None]
        if alive:
            log.warning("%s did not end within %g s; killed", _names(alive), patience_s)
        for child in stage:
            if child.name == "learner":  # its last line names the step it stopped at and that it is saved
                for line in child.new_lines()[-1:]:
                    log.info("%s: %s", child.name, line)
        self._kill(stage)

    def _kill(self, children: Sequence[Child]) -> None:
        """Kill them and their remaining children; each was started as the leader of its own process group."""
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
            self.children.pop(child.name, None)

    def _start(
        self, name: str, command: list[str], env: dict[str, str] | None = None, inherited: Sequence[int] = ()
    ) -> None:
        path = self._logs / f"{name}.log"
        size = path.stat().st_size if path.exists() else 0
        passed = self._passed if name.startswith(_EPISODES) else ()
        withheld = {
            secret: "" for secret, users in _SECRETS.items() if not name.startswith(users) and secret not in passed
        }
        # A file of the current folder must not be taken for a package; modules of the config are looked for there last.
        ours = {"PYTHONSAFEPATH": "1", LAUNCHED: "1"}
        process = start_child(command, ours | withheld | (env or {}), path, inherited)
        self.children[name] = Child(name, process, path, size, size)


def _names(children: Sequence[Child]) -> str:
    return ", ".join(child.name for child in children)


def _gpu_option(gpus: Gpus) -> list[str]:
    return ["--gpu", ",".join(gpus)] if gpus else []


def _interrupt(number: int, _: object) -> None:
    if number == signal.SIGHUP:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise KeyboardInterrupt
