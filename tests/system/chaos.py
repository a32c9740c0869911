"""A run whose processes are killed again and again, and an audit of what is left of it.

    python -m tests.system.chaos [--kills N]

Redis (appendfsync always), retriever, rollout worker and learner run as separate processes; each is ended by kill -9
at random moments, N times, and started again. Then the run is left alone for a few steps and ends by itself. The audit
reads every pool of every step since the first checkpoint: 0 lost, 0 trained twice, and the ledger closes. Figures go to
runs/chaos/summary.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from cusearch_async import host
from cusearch_async.transport.server import server_command

ATLAS = Path(__file__).parents[2] / "configs" / "atlas.toml"
N, G, K = 8, 2, 8
SETTLE_STEPS = 3
"""Learner steps after the last kill."""
LONGEST_LIFE_S = {"redis": 25.0, "retriever": 20.0, "rollout": 40.0, "learner": 30.0}
"""A process is killed at a random moment up to so long after its start; start-up counts."""
SETTINGS = {
    "run.name": "chaos",
    "run.steps": 100_000,
    "run.wait_s": 120,
    "pool.questions": N,
    "pool.rollouts": G,
    "pool.max_attempts": 100,
    "method.budget": K,
    "loss.minibatch": 4,
    "learner.checkpoint_every": 2,
    "learner.keep_checkpoints": 10_000,
    "rollout.max_episodes": 16,
    "redis.lease_s": 3,
    "redis.timeout_s": 3,
}


@dataclass
class Chaos:
    folder: Path
    kills: int
    seed: int = 0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    killed: Counter[str] = field(default_factory=Counter)
    ended_alone: Counter[str] = field(default_factory=Counter)
    deadlines: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.redis_port, port = host.free_port(), host.free_port()
        self.url = f"redis://127.0.0.1:{self.redis_port}/0"
        self.settings: dict[str, Any] = SETTINGS | {
            "run.folder": self.folder / "run",
            "redis.url": self.url,
            "retriever.url": f"http://127.0.0.1:{port}",
        }
        self.random = random.Random(self.seed)

    @property
    def client(self) -> Any:
        return redis.Redis(port=self.redis_port, decode_responses=True)

    def command(self, name: str) -> list[str]:
        if name == "redis":
            return server_command(self.url, self.folder / "redis", None)
        overrides = [part for key, value in self.settings.items() for part in (f"--{key}", str(value))]
        return [sys.executable, "-m", f"workers.{name}", str(ATLAS), *overrides]

    def start(self, name: str) -> None:
        self.processes[name] = host.start_child(self.command(name), log_file=self.folder / f"{name}.log")
        self.deadlines[name] = time.monotonic() + self.random.uniform(0, LONGEST_LIFE_S[name])

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def keep_alive(self) -> None:
        """Start again what has ended, by us or by itself."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                self.ended_alone[name] += 1
                self.start(name)

    def run(self) -> dict[str, Any]:
        """Kill, settle, audit; returns the summary."""
        began = time.monotonic()
        try:
            for name in LONGEST_LIFE_S:
                self.start(name)
            while any(self.killed[name] < self.kills for name in LONGEST_LIFE_S):
                time.sleep(0.05)
                self.keep_alive()
                for name, deadline in list(self.deadlines.items()):
                    if time.monotonic() > deadline and self.killed[name] < self.kills:
                        self.kill(name)
                        self.killed[name] += 1
                        self.start(name)
            self.settle()
            return self.audit(time.monotonic() - began)
        finally:
            for process in self.processes.values():
                process.terminate()
            for process in self.processes.values():
                try:
                    process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    process.kill()

    def settle(self, patience_s: float = 600) -> None:
        """Let the run end by itself, SETTLE_STEPS after where it is."""
        deadline = time.monotonic() + patience_s
        self.kill("learner")
        step = int(self.wait_for(lambda: self.client.hget("cusearch:{chaos}:state", "step"), deadline) or 0)
        self.settings["run.steps"] = step + SETTLE_STEPS
        self.start("learner")

        def is_over() -> bool:
            status = self.processes["learner"].poll()
            if status:
                self.ended_alone["learner"] += 1
                self.start("learner")
            others = {name: process for name, process in self.processes.items() if name != "learner"}
            for name, process in others.items():
                if process.poll() is not None:
                    self.ended_alone[name] += 1
                    self.start(name)
            return status == 0

        self.wait_for(is_over, deadline)

    def wait_for(self, condition: Any, deadline: float) -> Any:
        while True:
            try:
                found = condition()
            except redis.ConnectionError:
                found = None
            if found:
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run did not settle; logs in {self.folder}")
            time.sleep(0.1)

    def audit(self, wall_s: float) -> dict[str, Any]:
        client = self.client
        state = client.hgetall("cusearch:{chaos}:state")
        ledger = {name: int(count) for name, count in client.hgetall("cusearch:{chaos}:ledger").items()}
        steps, first = int(state["step"]), int(state.get("checkpoint", 0))
        pools = {step: client.lrange(f"cusearch:{{chaos}}:pool:{step}", 0, -1) for step in range(first, steps)}
        expected = {f"{ticket}:{rollout}" for ticket in range(first * N, steps * N) for rollout in range(G)}
        found = Counter(itertools.chain.from_iterable(pools.values()))
        states = Counter(client.hget(f"cusearch:{{chaos}}:traj:{id_}", "state") for id_ in found)
        where = ("buffered", "claimed", "trained", "unselected", "quarantined")
        rows = [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]
        return {
            "kills": dict(self.killed),
            "ended_alone": dict(self.ended_alone),
            "steps": steps,
            "first_audited_step": first,
            "finished": ledger["finished"],
            "trained": ledger["trained"],
            "lost": len(expected - found.keys()) + len(found.keys() - expected),
            "trained_twice": sum(count - 1 for count in found.values()),
            "wrong_pools": sum(len(ids) != N * G for ids in pools.values()),
            "trained_per_step_is_k": states["trained"] == (steps - first) * K
            and set(states) == {"trained", "unselected"},
            "requeued": ledger.get("requeued", 0),
            "incomplete_groups": ledger.get("incomplete_groups", 0),
            "quarantined": ledger.get("quarantined", 0),
            "ledger_closes": ledger["finished"] == sum(ledger.get(name, 0) for name in where),
            "metrics_rows_in_order": [row["step"] for row in rows] == list(range(steps)),
            "staleness_max": max(row["staleness/max"] for row in rows),
            "wall_s": round(wall_s),
        }


def is_clean(summary: dict[str, Any]) -> bool:
    zero = ("lost", "trained_twice", "wrong_pools", "incomplete_groups", "quarantined")
    true = ("trained_per_step_is_k", "ledger_closes", "metrics_rows_in_order")
    return not any(summary[name] for name in zero) and all(summary[name] for name in true)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"))
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True)
    summary = Chaos(arguments.folder.resolve(), arguments.kills, arguments.seed).run()
    (arguments.folder / "summary.json").write_text(json.dumps(summary, indent=1))
    for name, value in summary.items():
        print(f"{name:24} {value}")
    sys.exit(0 if is_clean(summary) else 1)


if __name__ == "__main__":
    main()
