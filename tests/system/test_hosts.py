"""Two hosts: network namespaces, each with a loopback and an address of its own, and a cable between them. What dials
itself, or listens on loopback only, is not reached from the other one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cusearch_async.metrics.files import read_metrics
from cusearch_async.transport.server import find_redis_server
from tests.conftest import SLOW, free_port, wait_until
from tests.system.conftest import ATLAS, SMALL

pytestmark = pytest.mark.system

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
PASSWORD = "of-this-test"


class Hosts:
    """Processes by host; all are ended at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._name = f"cusearch-{os.getpid()}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def build(self) -> str:
        """Why they cannot be built here; empty when they are."""
        ends = {host: f"cu{host}{os.getpid()}"[:15] for host in ADDRESSES}
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
        environment |= {"CUSEARCH_WEIGHTS_TOKEN": "also-of-this-test"}
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


def test_a_learner_and_a_worker_on_two_hosts(hosts: Hosts, tmp_path: Path):
    """As docs/nodes.md says: a Redis of your own on one, a retriever on each, weights over HTTP, two run folders."""
    port = free_port()
    settings = SMALL | {
        "redis.url": f"redis://{ADDRESSES['a']}:{port}/0",
        "retriever.url": f"http://127.0.0.1:{port + 1}",
        "weights.transport": "http",
        "weights.url": f"http://{ADDRESSES['a']}:{port + 2}",
        "pool.max_staleness": 0,
        "run.steps": 3,
    }

    def start(host: str, name: str) -> subprocess.Popen[bytes]:
        overrides = settings | {"run.folder": tmp_path / host}
        words = [word for key, value in overrides.items() for word in (f"--{key}", str(value))]
        module = "cusearch_async.cli.main"
        return hosts.start(host, f"{name}-{host}", sys.executable, "-m", module, "worker", name, str(ATLAS), *words)

    listening = ("--bind", ADDRESSES["a"], "--port", str(port), "--requirepass", PASSWORD)
    hosts.start("a", "redis", str(find_redis_server()), *listening, "--appendonly", "yes", "--dir", str(tmp_path))
    for host in ADDRESSES:
        start(host, "retriever")
    worker, learner = start("b", "rollout"), start("a", "learner")
    wait_until(lambda: learner.poll() is not None or worker.poll() not in (None, 0), 300)
    assert learner.poll() == 0, hosts.said()
    deadline = time.monotonic() + 60 * SLOW
    while worker.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert worker.poll() == 0, hosts.said()
    rows = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {row["staleness/max"] for row in rows} == {0}, "every version was loaded on the other host"
    assert "loaded weights v000002-e1" in hosts.log("rollout-b").read_text()
