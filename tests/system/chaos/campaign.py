"""One campaign: a seeded list of faults on a living run, some quiet steps, and the judgement."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from cusearch_async.transport.buffer import open_buffer
from tests.agents.templates import CHAT_STARTER
from tests.system.chaos import checker
from tests.system.chaos.faults import KINDS, Kind
from tests.system.chaos.scene import BUCKET, STUCK_S, Scene, Stuck, write_line

QUIET_STEPS = 6
"""Learner steps after the last fault."""
SHARES = {
    "network": 0.43,
    "content": 0.43,
    "worker": 0.05,
    "servers": 0.05,
    "learner": 0.04,
    "forgetful": 0.04,
    "agent": 0.43,
    "transfer": 0.43,
    "objects": 0.05,
    "elastic": 0.43,
}
"""Of the faults, by lane: a learner that starts takes many seconds."""
ATTEMPTS = 20
"""Times that a fault is tried which finds nothing to spoil."""
GAP_S = {
    "network": 0.1,
    "content": 0.1,
    "worker": 2.0,
    "servers": 2.0,
    "learner": 2.0,
    "forgetful": 1.0,
    "agent": 0.5,
    "transfer": 0.5,
    "objects": 2.0,
    "elastic": 2.0,
}
"""Longest pause between two faults of a lane."""


CHAT_TEMPLATE = CHAT_STARTER / "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class Campaign:
    name: str
    share: float
    """Of all faults."""
    engines: tuple[str, ...]
    lanes: tuple[str, ...]
    changes: dict[str, Any]
    model: str = "tiny"
    turn_s: float = 0.1
    """Longest turn of a light engine."""


EVERYTHING = ("network", "content", "worker", "servers", "learner")
DEFERRED = {"pool.order": "deferred", "pool.max_staleness": 1, "pool.defer": 1, "pool.hedge_after_s": 2}
AGENTS = {
    "environment.search.name": "agent",
    "environment.search.command": json.dumps([sys.executable, "-m", "docs.examples.program"]),
}
ELASTIC = DEFERRED | {"rollout.drain_s": 20}
HTTP = {"pool.max_staleness": 2, "weights.transport": "http"}
OBJECT = {
    "pool.max_staleness": 2,
    "weights.transport": "object",
    "weights.objects": f"s3://{BUCKET}/run",
    "learner.checkpoint_objects": f"s3://{BUCKET}/run",
}
CAMPAIGNS = (
    Campaign("asynchronous", 0.3, ("light", "light"), EVERYTHING, {"pool.max_staleness": 2}),
    Campaign("deferred", 0.2, ("light", "light"), EVERYTHING, DEFERRED),
    Campaign("synchronous", 0.15, ("light", "light"), EVERYTHING, {"pool.max_staleness": 0}),
    Campaign("engine", 0.15, ("vllm",), EVERYTHING, {"rollout.max_episodes": 16}, model="atlas"),
    Campaign("http", 0.2, ("light", "light"), (*EVERYTHING, "transfer"), HTTP),
    Campaign("object", 0.15, ("light", "light"), (*EVERYTHING, "transfer", "objects"), OBJECT),
    Campaign("agents", 0.1, ("light", "light"), (*EVERYTHING, "agent"), AGENTS, model="chat"),
    Campaign("elastic", 0.3, ("light",) * 4, ("elastic", "network"), ELASTIC, turn_s=1.0),
    Campaign("forgetful", 0.1, ("light", "light"), ("network", "content", "forgetful"), {"redis.outage_s": 60}),
)


def plan(kinds: Iterable[Kind], count: int, seed: int) -> dict[str, list[Kind]]:
    """By lane what is to happen, in order: each kind once, and others by chance until there are `count`."""
    draw = random.Random(seed)
    kinds = list(kinds)
    lanes: dict[str, list[Kind]] = {}
    for kind in kinds:
        lanes.setdefault(kind.lane, []).append(kind)
    total = sum(SHARES[lane] for lane in lanes)
    planned = {}
    for lane, of_lane in lanes.items():
        wanted = max(len(of_lane), round(count * SHARES[lane] / total))
        planned[lane] = of_lane + draw.choices(of_lane, k=wanted - len(of_lane))
        draw.shuffle(planned[lane])
    return planned


class Play:
    """A campaign under way."""

    def __init__(self, campaign: Campaign, folder: Path, model: Path, count: int, seed: int, only: set[str]) -> None:
        self.campaign, self.folder, self.seed = campaign, folder, seed
        paths = {"atlas": "atlas", "tiny": str(model), "chat": str(folder / "model")}
        if campaign.model == "chat":
            shutil.copytree(model, folder / "model")
            shutil.copy(CHAT_TEMPLATE, folder / "model" / "chat_template.jinja")
        self.scene = Scene(
            folder,
            seed,
            list(campaign.engines),
            {"model.path": paths[campaign.model]} | campaign.changes,
            campaign.turn_s,
        )
        kinds = [kind for kind in KINDS if kind.lane in campaign.lanes and (not only or kind.name in only)]
        self.plan = plan(kinds, count, seed)
        self.done: Counter[str] = Counter()
        self.variants: Counter[str] = Counter()
        self.not_run: Counter[str] = Counter()
        self.stuck = ""

    async def run(self) -> dict[str, Any]:
        began, scene, lanes = time.monotonic(), self.scene, list[asyncio.Task[None]]()
        await scene.start()
        supervisor = asyncio.create_task(scene.supervise())
        try:
            await scene.wait_for_steps(2, 2 * STUCK_S)
            lanes = [asyncio.create_task(self._lane(lane, kinds)) for lane, kinds in self.plan.items()]
            await self._all_of(lanes, supervisor)
            await scene.wait_for_steps(QUIET_STEPS, STUCK_S)
        except Stuck as error:
            self.stuck = str(error)
        except Exception as error:  # a mistake of the harness must not hide what was found so far
            (self.folder / "harness.log").write_text(traceback.format_exc())
            self.stuck = f"the harness failed, see harness.log: {error!r}"
        finally:
            for task in lanes:
                task.cancel()
            summary = await self._judge(time.monotonic() - began)
            supervisor.cancel()
            await scene.stop()
        return summary

    async def _all_of(self, lanes: list[asyncio.Task[None]], supervisor: asyncio.Task[None]) -> None:
        """Until every lane is through. Raises: Stuck when no step is committed for STUCK_S, whatever the lanes do."""
        watch = asyncio.create_task(self._watch())
        try:
            waiting = set(lanes)
            while waiting:
                ended, _ = await asyncio.wait([*waiting, watch, supervisor], return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
                waiting -= ended
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        """Raises: Stuck when no step is committed for STUCK_S, whatever the lanes do."""
        while True:
            await self.scene.wait_for_steps(1, STUCK_S)

    async def _lane(self, name: str, kinds: list[Kind]) -> None:
        draw = random.Random(f"{self.seed} {name}")
        for kind in kinds:
            await asyncio.sleep(draw.uniform(0, GAP_S[name]))
            for _ in range(ATTEMPTS):
                at = self.scene.clock()
                try:
                    did = await kind.act(self.scene, draw)
                except Stuck as error:
                    raise Stuck(f"after {kind.name!r}: {error}") from error
                write_line(
                    self.folder / "faults.jsonl", {"at": at, "to": self.scene.clock(), "kind": kind.name, "did": did}
                )
                if did is not None:
                    self.done[kind.name] += 1
                    self.variants[f"{kind.name}: {did}"] += 1
                    break
                await asyncio.sleep(1)
            else:
                self.not_run[kind.name] += 1
            if name in ("learner", "worker", "servers", "objects"):
                await self.scene.wait_for_steps(1, STUCK_S)

    async def _judge(self, wall_s: float) -> dict[str, Any]:
        audited = await audit(self.scene)
        summary = {
            "campaign": self.campaign.name,
            "seed": self.seed,
            "faults": dict(sorted(self.done.items())),
            "not_run": dict(self.not_run),
            "stuck": self.stuck,
            "seconds": round(wall_s),
            **audited,
            "raw_ends": sum(is_raw(told["said"]) for told in self.scene.ended_alone),
            "workers_ended": sum(
                told["process"] in self.scene.workers and not is_told_to_end(told["said"])
                for told in self.scene.ended_alone
            ),
        }
        details = {"variants": dict(sorted(self.variants.items())), "ended_alone": self.scene.ended_alone}
        (self.folder / "summary.json").write_text(json.dumps(summary | details, indent=1))
        return summary


async def audit(scene: Scene) -> dict[str, Any]:
    """End the run, and judge every pool, key and file of it."""
    config = scene.config()
    await scene.quiet()
    await scene.wait_until_serving()
    steps = max(await scene.step(), 0)
    expected = await asyncio.to_thread(checker.Expected.of, config)
    events = checker.read_events(scene.record)
    verdict = checker.judge(events, steps, expected)
    facts, wrong_keys = checker.judge_keys(redis.Redis(port=scene.redis_port), scene.keys.prefix)
    epochs = {step: commit["epoch"] for step, (_, commit) in checker.lineage(events, steps).items()}
    async with open_buffer(config, 10) as buffer:  # what `cusearch ledger` would say
        wrong_keys += [f"audit: {finding}" for finding in (await buffer.audit()).findings]
    files, wrong_files = checker.judge_files(scene.run_folder, epochs, scene.spoiled)
    return {
        "steps": steps,
        **{name: verdict.counts[name] for name in checker.WRONGS},
        "ledger_closes": not wrong_keys,
        "files_whole": not wrong_files,
        "wrong": [*verdict.examples.values(), *wrong_keys, *wrong_files, *checker.judge_memory(scene.most_mib)],
        "incomplete_groups": verdict.incomplete_groups,
        "counted_lost": verdict.counted_lost,
        "trajectories": verdict.trajectories,
        "staleness_max": verdict.staleness_max,
        "max_staleness": expected.max_staleness,
        "recoveries": sum(event["event"] == "recover" for event in events),
        "restarts": dict(scene.restarts),
        "most_mib": scene.most_mib,
        **facts,
        **files,
    }


_NAMED = re.compile(r"(learner|rollout|retriever): |\d\d:\d\d:\d\d (learner|rollout|retriever): |\d+:[A-Z] ")
"""A line for people: the last one of a process of ours, a line of its log, or one of Redis."""


def is_raw(said: str) -> bool:
    """Whether the last words of a process are those of a traceback, or none."""
    return _NAMED.match(said) is None


def is_told_to_end(said: str) -> bool:
    """Whether a worker ended as it should: the first answer that it ever got was of the wrong shape."""
    return "does not speak Search-R1's protocol" in said


def is_clean(summary: dict[str, Any]) -> bool:
    bad = (*checker.WRONGS, "incomplete_groups", "stuck", "raw_ends", "workers_ended", "wrong")
    wrong = any(summary[name] for name in bad)  # no group fails `pool.max_attempts` times
    return not wrong and summary["ledger_closes"] and summary["files_whole"]


def run(campaign: Campaign, folder: Path, model: Path, count: int, seed: int, only: set[str]) -> dict[str, Any]:
    folder.mkdir(parents=True)
    return asyncio.run(Play(campaign, folder, model, count, seed, only).run())
