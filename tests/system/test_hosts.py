"""A run on two hosts (hosts.py)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cusearch_async.metrics.files import read_metrics
from cusearch_async.transport.server import find_redis_server
from tests.conftest import free_port, wait_until
from tests.system.conftest import ATLAS, SMALL
from tests.system.hosts import PASSWORD, Hosts

pytestmark = pytest.mark.system

MODULE = "cusearch_async.cli.main"
CUSEARCH = str(Path(sys.executable).with_name("cusearch"))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path, "ab")
    try:
        problem = hosts.build()
        if problem:
            pytest.skip(problem)
        yield hosts
    finally:
        hosts.remove()


@pytest.fixture
def run(hosts: Hosts, tmp_path: Path) -> Run:
    return Run(hosts, tmp_path)


class Run:
    """As docs/nodes.md says: a Redis of your own on one host, and a retriever on each."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self._folder, port = hosts, folder, free_port()
        self.settings: dict[str, Any] = SMALL | {
            "redis.url": f"redis://{hosts.address['a']}:{port}/0",
            "retriever.url": f"http://127.0.0.1:{free_port()}",
            "pool.max_staleness": 0,
            "run.steps": 3,
        }
        redis = [str(find_redis_server()), "--bind", hosts.address["a"], "--port", str(port), "--requirepass", PASSWORD]
        hosts.start("a", "redis", *redis, "--appendonly", "yes", "--dir", str(folder))
        for host in hosts.address:
            self.start(host, "retriever")

    def start(self, host: str, name: str, *before: str, module: str = MODULE) -> subprocess.Popen[bytes]:
        overrides = {"run.folder": self._folder / host} | self.settings
        words = [word for key, value in overrides.items() for word in (f"--{key}", str(value))]
        command = (sys.executable, "-m", module, *before, "worker", name, str(ATLAS), *words)
        return self.hosts.start(host, f"{name}-{host}", *command)

    def must_end_well(self, *processes: subprocess.Popen[bytes]) -> None:
        wait_until(lambda: any(p.poll() for p in processes) or all(p.poll() == 0 for p in processes), 400)
        assert [process.poll() for process in processes] == [0] * len(processes), self.hosts.said()


@pytest.mark.long
def test_a_learner_and_a_worker_on_two_hosts(run: Run, tmp_path: Path):
    """Weights over HTTP, two run folders."""
    run.settings |= {"weights.transport": "http", "weights.url": f"http://{run.hosts.address['a']}:{free_port()}"}
    run.must_end_well(run.start("b", "rollout"), run.start("a", "learner"))
    rows = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {row["staleness/max"] for row in rows} == {0}, "every version was loaded on the other host"
    assert "loaded weights v000002-e1" in run.hosts.log("rollout-b").read_text()


@pytest.mark.slow
def test_the_ranks_of_a_learner_on_two_hosts(run: Run, tmp_path: Path):
    """Torchrun on each, over gloo; a run folder that both see. The ranks have the same policy."""
    run.settings |= {"run.folder": tmp_path / "shared", "learner.zero_stage": 3}
    torchrun = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=mine", "--no-python")
    torchrun += (f"--rdzv-endpoint={run.hosts.address['a']}:{free_port()}", CUSEARCH)
    ranks = []
    for host, address in run.hosts.address.items():  # both have the name of this machine, which tells torchrun nothing
        who = (f"--local-addr={address}", f"--rdzv-conf=is_host={int(host == 'a')}")
        ranks.append(run.start(host, "learner", *who, *torchrun, module="torch.distributed.run"))
    run.must_end_well(*ranks, run.start("a", "rollout"))
    assert [row["step"] for row in read_metrics(tmp_path / "shared" / "metrics.jsonl")] == [0, 1, 2]
