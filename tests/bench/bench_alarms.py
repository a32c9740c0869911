"""Faults that are planted in short real runs of the demo's config: which are named, and how soon; and clean runs.

    python -m tests.bench.bench_alarms [--only NAME]... [--clean 10]

A fault is named when an alarm, a trouble that the page tells, the error that ends a process, or the refusal of the
config has a name that fits it. Figures go to runs/bench/dashboard.json after every run; runs that are in it are not
repeated. Two runs took 86 and 93 seconds beside other work."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from cusearch_async.alarms.firing import alarms_of
from cusearch_async.alarms.history import History
from cusearch_async.cli.parts.fleet import Fleet
from cusearch_async.config import Config, load_config
from cusearch_async.dashboard.facts import firing, lag
from cusearch_async.dashboard.kept import KeptRun
from cusearch_async.dashboard.live import Live
from cusearch_async.errors import CusearchError, first_line
from cusearch_async.run import folder as run_folder
from tests.bench import figures
from tests.conftest import own_services
from tests.planted_troubles import LIMITS, healthy_runs

OUTPUT, FOLDER = Path("runs/bench/dashboard.json"), Path("runs/bench/alarms")
STEPS, AT_STEP, LIMIT_S = 14, 4, 400.0
TWO_WORKERS = ("--rollout.workers", "2")
FAULTS_AT = "tests.bench.faults"


@dataclass(frozen=True, slots=True)
class Fault:
    names: tuple[str, ...]
    """Of alarms or troubles that fit; or a part of the error that ends the run, or that refuses its config."""
    settings: tuple[str, ...] = ()
    disturb: Callable[[Fleet], contextlib.AbstractContextManager[None]] | None = None
    """Entered when AT_STEP steps are done; else the fault is there from the start."""


def pids(fleet: Fleet, name: str) -> list[int]:
    """Of a process and its children, if it is alive."""
    try:
        process = psutil.Process(fleet.children[name].process.pid)
        return [process.pid, *(child.pid for child in process.children(recursive=True))]
    except (KeyError, psutil.NoSuchProcess):
        return []


def send(fleet: Fleet, name: str, number: signal.Signals) -> None:
    for pid in pids(fleet, name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def frozen(fleet: Fleet, name: str) -> Iterator[None]:
    send(fleet, name, signal.SIGSTOP)
    try:
        yield
    finally:
        send(fleet, name, signal.SIGCONT)


@contextlib.contextmanager
def slowed(fleet: Fleet, name: str, share: float = 0.05, period_s: float = 0.5) -> Iterator[None]:
    """Stopped most of the time."""
    over = threading.Event()

    def pulse() -> None:
        while not over.is_set():
            send(fleet, name, signal.SIGSTOP)
            over.wait((1 - share) * period_s)
            send(fleet, name, signal.SIGCONT)
            over.wait(share * period_s)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def killed(fleet: Fleet, name: str) -> Iterator[None]:
    send(fleet, name, signal.SIGKILL)
    yield


def reward(name: str) -> tuple[str, str]:
    return "--environment.search.reward", f"{FAULTS_AT}:{name}"


FAULTS = {
    "dead retriever": Fault(("retriever_down", "searches_fail"), (), lambda fleet: frozen(fleet, "retriever")),
    "retriever answers rubbish": Fault(("finds_nothing",), ("--retriever.backend", f"{FAULTS_AT}:Rubbish")),
    "learning rate x 100": Fault(
        ("large_gradient", "drifts", "off_policy", "reward_falls", "entropy_falls", "entropy_rises"),
        ("--learner.lr", "5e-3"),
    ),
    "negative entropy bonus": Fault(("loss.entropy_coef",), ("--loss.entropy_coef", "-0.1")),
    "reward of the format alone": Fault(("reward_ignores_answers", "reward_without_answers"), reward("format_alone")),
    "reward for not searching": Fault(("reward_ignores_answers", "stops_searching"), reward("no_searching")),
    "frozen worker": Fault(("worker_silent", "workers_gone"), TWO_WORKERS, lambda fleet: frozen(fleet, "rollout-1")),
    "weights that are ignored": Fault(
        ("published weights", "log-probabilities differ"), ("--weights.transport", f"{FAULTS_AT}:IgnoredWeights")
    ),
    "full buffer": Fault(  # a learner that trains on whole pools is slower than the worker on any machine
        ("buffer_full",), ("--redis.max_mib", "1", "--pool.max_staleness", "8", "--method.name", "grpo_full")
    ),
    "slow disk": Fault(("slow_publishing",), ("--weights.transport", f"{FAULTS_AT}:SlowDisk")),
    "evaluator killed": Fault(("evaluator_lags",), ("--eval.every", "3"), lambda fleet: killed(fleet, "evaluator")),
    "reward that is no number": Fault(("episodes_fail", "must give a finite number"), reward("not_a_number")),
    "judge is down": Fault(("episodes_fail", "the judge does not answer"), reward("judge_is_down")),
    "engine at another precision": Fault(
        ("engine_differs", "log-probabilities differ", "quantization"), ("--rollout.vllm.quantization", "fp8")
    ),
    "one worker 20 times slower": Fault(("slow_worker",), TWO_WORKERS, lambda fleet: slowed(fleet, "rollout-1")),
}


@dataclass(slots=True)
class Seen:
    """What is told of a run, and how many steps were done when it was first told; without what was told `before`."""

    names: dict[str, int] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    """The same, before the fault was there."""
    steps: int = 0
    ended: str = ""

    def look(self, config: Config) -> int:
        """Steps that are done."""
        kept = KeptRun.read(config.folder)
        lagging = lag(kept)
        now = asyncio.run(live(config)).get("troubles", ()) if kept.rows else ()
        for name in (*firing(kept), *(one["name"] for one in now), *([lagging["name"]] if lagging else ())):
            if name not in self.before:
                self.names.setdefault(name, len(kept.rows))
        self.steps = len(kept.rows)
        return self.steps


async def live(config: Config) -> dict[str, Any]:
    async with Live(config, config.folder) as watched:
        return await watched.now()


def run_with(name: str, fault: Fault, seed: int) -> dict[str, Any]:
    folder = FOLDER / name.replace(" ", "-")
    base = ["--run.folder", str(folder), "--run.steps", str(STEPS), "--run.seed", str(seed), *own_services()]
    seen, began = Seen(), time.monotonic()
    try:
        config = load_config(Path("atlas"), [*base, *fault.settings])
        run_folder.forget(config.folder)
        watch(config, fault, seen, began)
    except CusearchError as error:
        seen.ended = first_line(error)
    told = {told: step for told, step in seen.names.items() if told in fault.names}
    by_end = any(part in seen.ended for part in fault.names)
    return {
        "named": bool(told) or by_end,
        "named_by": min(told, key=told.__getitem__, default="the end of the run" if by_end else ""),
        "at_step": min(told.values(), default=None),
        "planted_at": AT_STEP if fault.disturb else 0,
        "steps": seen.steps,
        "told": seen.names,
        "told_before": seen.before,
        "ended": seen.ended,
        "seconds": round(time.monotonic() - began),
    }


def watch(config: Config, fault: Fault, seen: Seen, began: float) -> None:
    """Until all steps are done, the fault is named, or it has lasted too long. Raises: ProcessDied."""
    with contextlib.ExitStack() as planted, Fleet(config) as fleet:
        fleet.start_services()
        fleet.start_run()
        is_planted = fault.disturb is None

        def is_over() -> bool:
            nonlocal is_planted
            done = seen.look(config) if (config.folder / "metrics.jsonl").exists() else 0
            if not is_planted and done >= AT_STEP:
                is_planted = True
                seen.before, seen.names = seen.names, {}
                planted.enter_context(fault.disturb(fleet))
            is_named = is_planted and bool(seen.names.keys() & set(fault.names))
            return is_named or fleet.has_ended("learner") or time.monotonic() - began > LIMIT_S

        try:
            fleet.wait(is_over, poll_s=1.0)
        finally:
            planted.close()  # a process that is frozen ends in no time that is waited


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", choices=FAULTS, default=[])
    parser.add_argument("--clean", type=int, default=10, help="runs without a fault")
    arguments = parser.parse_args()
    known = json.loads(OUTPUT.read_text(encoding="utf-8")) if OUTPUT.exists() else {}
    faults, clean = known.get("faults", {}), known.get("clean", {})
    for name in arguments.only or FAULTS:
        if name not in faults or arguments.only:
            faults[name] = run_with(name, FAULTS[name], 0)
            print(f"{name}: {faults[name]}", flush=True)
            write(faults, clean)
    for seed in range(arguments.clean):
        if str(seed) not in clean:
            clean[str(seed)] = run_with(f"clean {seed}", Fault(()), seed)
            print(f"clean, seed {seed}: {clean[str(seed)]['told'] or 'no alarm'}", flush=True)
            write(faults, clean)
    write(faults, clean)


def write(faults: dict[str, Any], clean: dict[str, Any]) -> None:
    figures.add(
        OUTPUT,
        {
            "faults": faults,
            "clean": clean,
            "faults_planted": len(faults),
            "faults_named": sum(found["named"] for found in faults.values()),
            "clean_runs": sum(found["steps"] == STEPS and not found["ended"] for found in clean.values()),
            "false_alarms_clean_runs": sum(bool(found["told"]) for found in clean.values()),
            "healthy_runs_with_alarm": sum(bool(alarms_of(rows, History(LIMITS))) for rows in healthy_runs().values()),
        },
    )


if __name__ == "__main__":
    main()
