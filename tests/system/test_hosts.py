"""Two hosts: network namespaces, each with a loopback and an address of its own, and a cable between them. What dials
itself, or listens on loopback only, is not reached from the other one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cusearch_async.metrics.files import read_metrics
from cusearch_async.transport.server import find_redis_server
from tests.conftest import SLOW, free_port, wait_until
from tests.system.conftest import ATLAS, SMALL

pytestmark = pytest.mark.system

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
PASSWORD = "of-this-test"
MODULE = "cusearch_async.cli.main"
CUSEARCH = str(Path(sys.executable).with_name("cusearch"))


class Hosts:
    """Processes by host; all are ended at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._name = f"cusearch-{os.getpid()}"
        self._ends = {host: f"cu{host}{os.getpid()}"[:15] for host in ADDRESSES}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def build(self) -> str:
        """Why they cannot be built here; empty when they are."""
        ends = self._ends
        one, other = ends.values()
        steps = [["netns", "add", self.of(host)] for host in ADDRESSES]
        steps += [["link", "add", one, "type", "veth", "peer", "name", other]]
        for host, address in ADDRESSES.items():
            inside = ["-n", self.of(host)]
            steps += [["link", "set", ends[host], "netns", self.of(host)]]
            steps += [[*inside, "addr", "add", f"{address}/24", "dev", ends[host]]]
            steps += [[*inside, "link", "set", name, "up"] for name in ("lo", ends[host])]
        for step in steps:
            done = subprocess.run(["ip", *step], capture_output=True, text=True, check=False)
            if done.returncode:
                return f"ip {' '.join(step)}: {done.stderr.strip()}"
        return ""

    def of(self, host: str) -> str:
        return f"{self._name}-{host}"

    def start(self, host: str, name: str, *command: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUSEARCH_REDIS_PASSWORD": PASSWORD}
        environment |= {"CUSEARCH_WEIGHTS_TOKEN": "also-of-this-test", "GLOO_SOCKET_IFNAME": self._ends[host]}
        with self.log(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                ["ip", "netns", "exec", self.of(host), *command], stdout=log, stderr=log, env=environment
            )
        return self.processes[name]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def said(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name).read_text(errors='replace')[-1500:]}" for name in self.processes)

    def remove(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=30 * SLOW)
            except subprocess.TimeoutExpired:
                process.kill()
        for host in ADDRESSES:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", self.of(host)], capture_output=True, check=False)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    hosts = Hosts(tmp_path)
    try:
        problem = hosts.build()
        if problem:
            pytest.skip(f"no network namespaces here: {problem}")
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
            "redis.url": f"redis://{ADDRESSES['a']}:{port}/0",
            "retriever.url": f"http://127.0.0.1:{free_port()}",
            "pool.max_staleness": 0,
            "run.steps": 3,
        }
        redis = [str(find_redis_server()), "--bind", ADDRESSES["a"], "--port", str(port), "--requirepass", PASSWORD]
        hosts.start("a", "redis", *redis, "--appendonly", "yes", "--dir", str(folder))
        for host in ADDRESSES:
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
    run.settings |= {"weights.transport": "http", "weights.url": f"http://{ADDRESSES['a']}:{free_port()}"}
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
    torchrun += (f"--rdzv-endpoint={ADDRESSES['a']}:{free_port()}", CUSEARCH)
    ranks = []
    for host, address in ADDRESSES.items():  # both have the name of this machine, which tells torchrun nothing
        who = (f"--local-addr={address}", f"--rdzv-conf=is_host={int(host == 'a')}")
        ranks.append(run.start(host, "learner", *who, *torchrun, module="torch.distributed.run"))
    run.must_end_well(*ranks, run.start("a", "rollout"))
    assert [row["step"] for row in read_metrics(tmp_path / "shared" / "metrics.jsonl")] == [0, 1, 2]
