"""A run on four hosts whose network loses packets, is cut, and whose hosts come and go (hosts.py): what was trained is
judged as in the campaigns of faults (chaos/checker.py)."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cusearch_async.config import load_config
from cusearch_async.metrics.files import read_metrics, read_scores
from cusearch_async.run.folder import SCORES
from cusearch_async.transport.server import find_redis_server
from tests.conftest import free_port, wait_until
from tests.object_stores import SERVER, s3_environment
from tests.system.chaos import checker
from tests.system.conftest import ATLAS
from tests.system.hosts import PASSWORD, Hosts

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.long]

STEPS = 16
LEASE_S = 5.0
DISK_MIB = 64
STEP_S = 200
"""A step takes no longer, whatever happens."""
BUCKET = "weights"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    hosts, disk = Hosts(tmp_path, "abcd"), tmp_path / "disk-of-d"
    try:
        problem = hosts.build()
        if problem:
            pytest.skip(problem)
        try:
            for host in hosts.address:
                hosts.slow_down(host, mbit=100, loss_percent=2)
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", str(disk)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no bad network or small disk here: {error}")
        yield hosts
    finally:
        hosts.remove()
        subprocess.run(["umount", str(disk)], check=False, capture_output=True)


class Run:
    """The demo's training: Redis and the object store on host a, which the learner leaves; nothing is shared."""

    def __init__(self, hosts: Hosts, folder: Path, transport: str) -> None:
        self.hosts, self.folder, self.records = hosts, folder, folder / "records"
        self.records.mkdir()
        port, objects = free_port(), free_port()
        self.settings: dict[str, Any] = {
            "redis.url": f"redis://{hosts.address['a']}:{port}/0",
            "redis.lease_s": LEASE_S,
            "retriever.url": f"http://127.0.0.1:{free_port()}",
            "weights.transport": transport,
            "run.steps": STEPS,
            "run.wait_s": 600,
            "eval.every": STEPS,
            "learner.checkpoint_every": 2,
            "learner.cores": [],
            "rollout.cores": [],
            "rollout.canary_every": 1,
            "rollout.drain_s": 120,
        }
        hosts.environment["CHAOS_RECORD"] = str(self.records)
        redis = [str(find_redis_server()), "--bind", hosts.address["a"], "--port", str(port), "--requirepass", PASSWORD]
        hosts.start("a", "redis", *redis, "--appendonly", "yes", "--dir", str(folder))
        if transport == "object":
            store = f"http://{hosts.address['a']}:{objects}"
            hosts.start("a", "objects", str(SERVER), "-H", hosts.address["a"], "-p", str(objects))
            hosts.environment |= s3_environment(store)
            places = {"weights.objects": f"s3://{BUCKET}/run", "learner.checkpoint_objects": f"s3://{BUCKET}/run"}
            self.settings |= places
            make = f"from tests.object_stores import make_bucket; make_bucket({store!r}, {BUCKET!r})"
            hosts.inside("a", sys.executable, "-c", make)
        else:
            self.settings["weights.url"] = f"http://{hosts.address['a']}:{free_port()}"
        for host in hosts.address:
            self.start(host, "retriever")

    def words(self, host: str, **others: Any) -> list[str]:
        values = self.settings | {"run.folder": self.folder / host}
        values |= {key.replace("__", "."): value for key, value in others.items()}
        return [str(ATLAS), *(word for key, value in values.items() for word in (f"--{key}", str(value)))]

    def start(self, host: str, name: str, **others: Any) -> subprocess.Popen[bytes]:
        recorded = ("tests.system.chaos.record", name)
        plain = ("cusearch_async.cli.main", "worker", name)
        module = recorded if name in ("learner", "rollout") else plain
        command = (sys.executable, "-m", *module, *self.words(host, **others))
        return self.hosts.start(host, f"{name}-{host}", *command)

    def wait_for_step(self, step: int) -> None:
        """Until it is done, by whichever learner."""

        def is_done() -> bool:
            dead = [name for name in ("learner-a", "learner-d") if self._status(name) not in (None, 0, -9)]
            assert not dead, self.hosts.said()
            return any(e["event"] == "commit" and e["step"] >= step for e in checker.read_events(self.records))

        wait_until(is_done, STEP_S)

    def _status(self, name: str) -> int | None:
        return self.hosts.processes[name].poll() if name in self.hosts.processes else None

    def judge(self, learners: str) -> checker.Verdict:
        expected = checker.Expected.of(load_config(ATLAS, self.words(learners)[1:]))
        return checker.judge(checker.read_events(self.records), STEPS, expected)

    def must_end_well(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        wait_until(lambda: process.poll() is not None, seconds)
        assert process.returncode == 0, self.hosts.said()


@pytest.mark.parametrize(
    "transport",
    [
        "http",
        pytest.param("object", marks=pytest.mark.skipif(not SERVER.exists(), reason=f"{SERVER}: make setup-sdks")),
    ],
)
def test_the_demo_learns_on_four_hosts_that_come_and_go(hosts: Hosts, tmp_path: Path, transport: str):
    """With object storage the learner ends on another host than it began on."""
    run = Run(hosts, tmp_path, transport)
    learner = run.start("a", "learner")
    leaving = run.start("b", "rollout")
    run.start("c", "rollout")
    evaluator = run.start("c", "evaluator", run__folder=tmp_path / "evaluator")

    run.wait_for_step(0)
    hosts.cut_off("b")  # until others have run its tickets, whose leases had to run out
    run.wait_for_step(2)
    hosts.join_again("b")

    staying = run.start("d", "rollout", run__folder=tmp_path / "disk-of-d" / "run")  # it comes late
    run.wait_for_step(3)
    hosts.crash("c")
    run.wait_for_step(5)
    run.start("c", "retriever")
    back = run.start("c", "rollout")
    evaluator = run.start("c", "evaluator", run__folder=tmp_path / "evaluator")

    run.wait_for_step(7)
    wait_until(lambda: "loaded weights" in hosts.log("rollout-d").read_text(), STEP_S)
    subprocess.run(["dd", "if=/dev/zero", f"of={tmp_path}/disk-of-d/full", "bs=1M"], check=False, capture_output=True)
    learner.kill()
    learner.wait()
    home = "d" if transport == "object" else "a"
    learner = run.start(home, "learner")
    run.wait_for_step(10)
    (tmp_path / "disk-of-d" / "full").unlink()

    leaving.terminate()
    wait_until(lambda: leaving.poll() is not None, 130)
    assert leaving.returncode == 128 + signal.SIGTERM, hosts.said()
    for process in (learner, staying, back, evaluator):
        run.must_end_well(process, STEP_S * STEPS)

    verdict = run.judge(home)
    assert not verdict.counts, verdict.examples
    hosts.inside(home, sys.executable, "-m", "cusearch_async.cli.main", "buckets", *run.words(home), "--ledger")
    rows = read_metrics(tmp_path / home / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    last = read_scores(tmp_path / "evaluator" / SCORES, [])[-1]
    assert last["step"] == STEPS
    assert last["all"]["em"] > 0.7, "the demo begins at 0.2 and ends at 0.9"
