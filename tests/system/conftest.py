"""Runs of the real thing, small: Redis, retriever, vLLM and DeepSpeed as processes of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from cusearch_async.metrics.files import read_metrics
from tests.conftest import SLOW, free_port
from tests.system.forked import Command, Forked, Process

ATLAS = Path(__file__).parents[2] / "configs" / "atlas.toml"
SMALL = {
    "pool.questions": 8,
    "pool.rollouts": 2,
    "method.budget": 8,
    "loss.minibatch": 4,
    "learner.checkpoint_every": 2,
    "rollout.max_episodes": 16,
    "rollout.canary_every": 1,
    "eval.questions_per_category": 2,
    "learner.cores": [],
    "rollout.cores": [],
}


@dataclass
class Run:
    """A run on private ports and a private folder."""

    folder: Path
    overrides: dict[str, Any]
    forks: bool = True
    """Its processes have all they import from the start (`forked`). False for a test of how they start, listen or end:
    they are commands then, as users give them."""
    started: list[Process] = field(default_factory=list)

    def redis(self) -> redis.Redis[str]:
        """A client of the Redis that was started for this run."""
        password = (self.folder / "redis" / "password").read_text()
        return redis.Redis.from_url(str(self.overrides["redis.url"]), password=password, decode_responses=True)

    def arguments(self, **changes: Any) -> list[str]:
        values = self.overrides | {key.replace("__", "."): value for key, value in changes.items()}
        return [part for key, value in values.items() for part in (f"--{key}", str(value))]

    def cusearch(self, command: str, *flags: str, **changes: Any) -> Process:
        """Start `cusearch COMMAND configs/atlas.toml` with flags and this run's overrides."""
        return self._start("cusearch_async.cli.main", *command.split(), str(ATLAS), *flags, *self.arguments(**changes))

    def on_folder(self, command: str, *flags: str) -> Process:
        """Start `cusearch COMMAND RUN_FOLDER` with flags."""
        return self._start("cusearch_async.cli.main", *command.split(), str(self.folder), *flags)

    def worker(self, name: str, **changes: Any) -> Process:
        """Start `python -m workers.NAME`."""
        return self._start(f"workers.{name}", str(ATLAS), *self.arguments(**changes))

    def _start(self, *command: str) -> Process:
        log = self.folder.parent / f"{len(self.started)}-{command[0]}.log"
        process = (Forked if self.forks else Command)(command, log, {"OMP_NUM_THREADS": "1"})
        self.started.append(process)
        return process

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")

    def log(self, name: str) -> str:
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def processes(self) -> list[psutil.Process]:
        """Everything alive that works for this run."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = " ".join(process.info["cmdline"] or [])
            if str(self.folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def process(self, name: str) -> psutil.Process:
        return next(p for p in self.processes() if f" worker {name} " in " ".join(p.info["cmdline"]))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    folder = tmp_path / "run"
    addresses = {
        "run.folder": folder,
        "redis.url": f"redis://127.0.0.1:{free_port()}/0",
        "retriever.url": f"http://127.0.0.1:{free_port()}",
    }
    run = Run(folder, SMALL | addresses)
    yield run
    for process in run.started:
        if process.poll() is None:
            process.terminate()
    for process in run.started:
        try:
            process.wait(timeout=30 * SLOW)
        except subprocess.TimeoutExpired:
            process.kill()
    for left in run.processes():
        left.kill()


def finish(process: Process, timeout_s: float = 300) -> tuple[int, str]:
    output, _ = process.communicate(timeout=timeout_s * SLOW)
    return process.returncode, output
