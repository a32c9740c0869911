"""A long quiet run: does anything grow? python -m tests.bench.soak [--minutes 30] [--out runs/soak]

The atlas policy, a real learner, retriever and Redis, two workers whose engine costs nothing (slowed down, so that the
soak leaves most of the machine to others) and one with vLLM. Every ten seconds the memory, open files and threads of
every process, Redis's memory and keys, and the bytes of the run's folder are measured; over the last third each has to
stay within its bound of a straight line: vLLM's memory takes twenty minutes to settle. Afterwards every pool is audited
as after a chaos campaign. Exit status 1 when a line is too steep, a process has ended, or the audit finds anything.
OUT/samples.jsonl has every measurement."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.system.chaos import checker
from tests.system.chaos.campaign import audit
from tests.system.chaos.scene import STUCK_S, Scene, Stuck, fresh_folder, write_line

SETTINGS = {
    "model.path": "atlas",
    "pool.max_staleness": 2,
    "learner.checkpoint_every": 10,
    "rollout.vllm.kv_cache_memory_bytes": 64 << 20,  # filled early on, as vLLM touches every block once
    "rollout.max_episodes": 8,
    "redis.lease_s": 30,
    "redis.timeout_s": 10,
}
LIGHT_TURN_S = 2.0


@dataclass(frozen=True, slots=True)
class Bound:
    """How much a series may grow: `noise` at any time, and `per_hour` or `per_step` on top."""

    unit: str
    noise: float
    per_hour: float = 0.0
    per_step: float = 0.0


BOUNDS = {
    "pss": Bound("MiB", noise=32, per_hour=16),  # shared pages become its own when others end
    "rss": Bound("MiB", noise=8, per_hour=16),
    "fds": Bound("", noise=4),
    "threads": Bound("", noise=4),
    "redis memory": Bound("MiB", noise=1, per_hour=1),
    "redis keys": Bound("", noise=60),
    "redis log": Bound("MiB", noise=150),  # rewritten when it has doubled beyond 64 MiB
    "folder": Bound("MiB", noise=4, per_step=0.016),  # a row of metrics.jsonl and its TensorBoard events
}
"""By the last word or words of a series' name."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series over the last third, and whether it is flat enough."""

    name: str
    last: float
    per_hour: float
    per_step: float
    grown: float
    """By the straight line, over the last third."""
    allowed: float
    unit: str

    @property
    def is_red(self) -> bool:
        return self.grown > self.allowed


def fit(name: str, hours: Sequence[float], steps: Sequence[int], values: Sequence[float]) -> Line:
    """Least squares over time; the steps of the same stretch turn it into growth per step."""
    bound = BOUNDS[next(key for key in BOUNDS if name.endswith(key))]
    per_hour = float(np.polyfit(hours, values, 1)[0])
    stretch, made = hours[-1] - hours[0], max(steps[-1] - steps[0], 1)
    grown = per_hour * stretch
    allowed = bound.noise + bound.per_hour * stretch + bound.per_step * made
    return Line(name, values[-1], per_hour, grown / made, grown, allowed, bound.unit)


def last_third(samples: list[dict[str, Any]]) -> list[Line]:
    """A line for every series that the last sample has."""
    part = samples[2 * len(samples) // 3 :]
    hours, steps = [s["seconds"] / 3600 for s in part], [s["step"] for s in part]
    names = [name for name in part[-1] if name not in ("seconds", "step")]
    return [fit(name, hours, steps, [s.get(name, part[-1][name]) for s in part]) for name in names]


async def measure(scene: Scene) -> dict[str, float]:
    found: dict[str, float] = {"seconds": scene.clock(), "step": await scene.step()}
    for name, process in scene.processes.items():
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
        memory = [member.memory_full_info() for member in family]
        found |= {
            f"{name} rss": sum(m.rss for m in memory) / 2**20,
            f"{name} pss": sum(m.pss for m in memory) / 2**20,
            f"{name} fds": sum(member.num_fds() for member in family),
            f"{name} threads": sum(member.num_threads() for member in family),
        }
    memory = await scene.ask(lambda client: client.info("memory"))
    found["redis memory"] = memory["used_memory"] / 2**20
    found["redis keys"] = await scene.ask(lambda client: client.dbsize())
    found["redis log"] = size(scene.folder / "redis")
    found["run folder"] = size(scene.run_folder)
    return found


def size(folder: Path) -> float:
    """MiB of all files below; what is being deleted does not count."""
    total = 0
    for directory, _, files in os.walk(folder):
        for name in files:
            try:
                total += (Path(directory) / name).stat().st_size
            except FileNotFoundError:
                continue
    return total / 2**20


async def soak(out: Path, minutes: float, every_s: float, with_vllm: bool) -> dict[str, Any]:
    os.nice(10)
    scene = Scene(out, 0, ["light", "light", *(["vllm"] if with_vllm else [])], SETTINGS, LIGHT_TURN_S)
    await scene.start()
    supervisor = asyncio.create_task(scene.supervise())
    samples: list[dict[str, float]] = []
    stuck = ""
    try:
        await scene.wait_for_steps(2, 3 * STUCK_S)
        began = time.monotonic()
        while time.monotonic() - began < 60 * minutes:
            samples.append(await measure(scene))
            write_line(out / "samples.jsonl", samples[-1])
            await asyncio.sleep(every_s)
        await scene.wait_for_steps(1, STUCK_S)
    except (Stuck, psutil.Error, TypeError) as error:  # a process, or Redis, is not there any more
        stuck = str(error)
    audited = await audit(scene)
    supervisor.cancel()
    await scene.stop()
    lines = last_third(samples) if samples else []
    red = [line.name for line in lines if line.is_red]
    wrong = [*audited["wrong"], *(f"{told['process']}: {told['said']}" for told in scene.ended_alone)]
    return {
        "minutes": minutes,
        "steps": samples[-1]["step"] - samples[0]["step"] if samples else 0,
        "red": red,
        "stuck": stuck,
        "wrong": wrong,
        "clean": not (red or stuck or wrong or any(audited[name] for name in checker.WRONGS)),
        "lines": [asdict(line) for line in lines],
        "audit": audited,
    }


def show(lines: list[Line]) -> None:
    print(f"{'':22} {'last':>10} {'per hour':>11} {'per step':>11} {'last third':>12} {'allowed':>9}")
    for line in lines:
        print(
            f"{line.name:22} {line.last:10.1f} {line.per_hour:+11.2f} {line.per_step:+11.5f} {line.grown:+12.2f} "
            f"{line.allowed:9.1f} {line.unit:4}{'RED' if line.is_red else ''}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=10, help="seconds between two measurements")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    parser.add_argument("--without-vllm", action="store_true")
    arguments = parser.parse_args()
    out = fresh_folder(arguments.out)
    summary = asyncio.run(soak(out, arguments.minutes, arguments.every, not arguments.without_vllm))
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    show([Line(**line) for line in summary["lines"]])
    for name in ("minutes", "steps", "red", "stuck", "wrong", "clean"):
        print(f"{name:8} {summary[name]}")
    sys.exit(0 if summary["clean"] else 1)


if __name__ == "__main__":
    main()
