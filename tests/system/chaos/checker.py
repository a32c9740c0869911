"""The judge of a campaign. It believes no counter of the run, but for what was lost where a fault deleted it.

What was trained is read from the learners' and workers' own records (record.py): of every step the pool that the last
learner committed, each trajectory with its versions, tokens, question and digest. What Redis holds is counted key by
key, and only then compared with the ledger."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cusearch_async.config import Config
from cusearch_async.data.questions import load_run_questions
from cusearch_async.metrics.files import read_metrics

Event = dict[str, Any]
VOCABULARY = 384
"""Of the atlas tokenizer, which the tiny model has too."""
MOST_MIB = {"redis": 400, "retriever": 800, "objects": 1000, "learner": 2500, "worker": 2000, "vllm worker": 6000}
"""Resident memory of a process and its children at its largest."""


@dataclass
class Expected:
    """What is known of the run beforehand."""

    questions: int
    """N"""
    rollouts: int
    """G"""
    max_staleness: int
    """The bound of the run's order."""
    defer: int
    """Pools that a group may miss."""
    vocabulary: int
    question_of: Callable[[int], str]
    """The id of a ticket's question."""

    @classmethod
    def of(cls, config: Config) -> Expected:
        return cls(
            questions=config.questions_per_step,
            rollouts=config.pool.rollouts,
            max_staleness=config.pool.staleness_bound,
            defer=config.pool.deferral,
            vocabulary=VOCABULARY,
            question_of=load_run_questions(config).id_of,
        )


@dataclass
class Verdict:
    """Counts of what is wrong, and one example of each."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    staleness_max: int = 0
    incomplete_groups: int = 0
    counted_lost: int = 0
    """Deleted or spoiled by a fault in a pool that was trained on before, and counted so by the run."""
    trajectories: int = 0

    def wrong(self, what: str, example: str) -> None:
        self.counts[what] += 1
        self.examples.setdefault(what, example)


WRONGS = ("lost", "trained_twice", "beyond_bound", "wrong_pools", "foreign", "not_committed", "old_learner_committed")


def read_events(folder: Path) -> list[Event]:
    """All records, those of one process in their order; a line that a kill has cut in half does not count."""
    events = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            events.append(json.loads(line))
    return events


def lineage(events: Iterable[Event], steps: int) -> dict[int, tuple[Event, Event]]:
    """Of the first `steps` steps, those that the run has done in the end: step -> (claim, commit) of the learner with
    the highest epoch that committed it: the one whose weights live on, as every learner takes over at a step that is
    done."""
    events = list(events)
    claims = {(e["epoch"], e["step"]): e for e in events if e["event"] == "claim"}
    last: dict[int, Event] = {}
    for event in events:
        if (
            event["event"] == "commit"
            and event["step"] < steps
            and event["epoch"] >= last.get(event["step"], event)["epoch"]
        ):
            last[event["step"]] = event
    return {step: (claims[commit["epoch"], step], commit) for step, commit in sorted(last.items())}


def judge(events: list[Event], steps: int, expected: Expected) -> Verdict:
    """Every pool of steps 0..steps - 1, and every trajectory in it."""
    verdict = Verdict()
    put = {(e["id"], e["digest"]) for e in events if e["event"] == "put"}
    trained: dict[str, int] = {}
    taken: set[int] = set()
    done = lineage(events, steps)
    claims = [event for event in events if event["event"] == "claim"]
    first_claimed = {e["step"]: e["epoch"] for e in sorted(claims, key=lambda e: e["epoch"], reverse=True)}
    for step in range(steps):
        if step not in done:
            verdict.wrong("not_committed", f"step {step} is done, and no learner wrote that it committed it")
            continue
        claim, commit = done[step]
        # what an earlier learner counted when it took the pool is not counted again
        before = (e["counted"] for e in claims if e["step"] == step and e["epoch"] <= claim["epoch"])
        claim = claim | {"counted": sorted(set().union(*before))}
        _judge_pool(claim, commit, first_claimed[step] < claim["epoch"], expected, verdict)
        _judge_tickets(claim, taken, expected, verdict)
        for t in claim["pool"]:
            _judge_trajectory(t, step, put, expected, verdict)
            if t["id"] in trained:
                verdict.wrong("trained_twice", f"{t['id']} in the pools of steps {trained[t['id']]} and {step}")
            trained[t["id"]] = step
    for first, second in itertools.pairwise(done.values()):
        if first[1]["epoch"] > second[1]["epoch"]:
            verdict.wrong(
                "old_learner_committed",
                f"step {second[1]['step']} was last committed in epoch {second[1]['epoch']}, the one before it in "
                f"epoch {first[1]['epoch']}",
            )
    return verdict


def _judge_pool(claim: Event, commit: Event, was_kept: bool, expected: Expected, verdict: Verdict) -> None:
    """The whole groups of its tickets, but for what was counted: as lacking when its group was closed, or as lost or
    quarantined out of a pool that an earlier learner had taken (its tickets are not played again)."""
    step, pool = claim["step"], claim["pool"]
    ids, tickets = [t["id"] for t in pool], claim["tickets"]
    places = {f"{ticket}:{rollout}" for ticket in tickets for rollout in range(expected.rollouts)}
    counted = places & set(claim["counted"]) - set(ids) if was_kept else set()
    verdict.counted_lost += len(counted)
    missing = Counter(int(place.split(":")[0]) for place in places - set(ids) - counted)
    lacking = {int(ticket): count for ticket, count in claim["lacking"].items()}
    for ticket, count in missing.items():
        if lacking.get(ticket) == count:
            verdict.incomplete_groups += 1
        else:
            verdict.counts["lost"] += count - 1
            verdict.wrong("lost", f"step {step}: {count} of ticket {ticket}; counted as lacking: {lacking.get(ticket)}")
    problems = {
        "has trajectories of other tickets": set(ids) - places,
        "has a trajectory twice": [id_ for id_, n in Counter(ids).items() if n > 1],
        "selected what is not in it": set(commit["selected"]) - set(ids),
        "selected one twice": [id_ for id_, n in Counter(commit["selected"]).items() if n > 1],
        "mixes questions in a group": [
            ticket for ticket in tickets if len({t["question"] for t in pool if _ticket(t) == ticket}) > 1
        ],
    }
    for problem, found in problems.items():
        if found:
            verdict.wrong("wrong_pools", f"the pool of step {step} {problem}: {sorted(map(str, found))[:4]}")
    verdict.trajectories += len(pool)


def _judge_tickets(claim: Event, taken: set[int], expected: Expected, verdict: Verdict) -> None:
    """N tickets that no step before has taken, and all that have missed as many pools as they may. Adds them to
    `taken`."""
    step, tickets = claim["step"], set(claim["tickets"])
    knows_all = len(taken) == step * expected.questions
    due = set(range((step - expected.defer + 1) * expected.questions)) - taken if knows_all else set()
    problems = {
        f"is not of {expected.questions} tickets": tickets if len(tickets) != expected.questions else set(),
        "has tickets that were taken before": tickets & taken,
        "lacks tickets that are due": due - tickets,
    }
    taken |= tickets
    for problem, found in problems.items():
        if found:
            verdict.wrong("wrong_pools", f"the pool of step {step} {problem}: {sorted(found)[:4]}")


def _judge_trajectory(t: Event, step: int, put: set[tuple[str, str]], expected: Expected, verdict: Verdict) -> None:
    staleness = step - t["oldest"]
    verdict.staleness_max = max(verdict.staleness_max, staleness)
    if staleness > expected.max_staleness or t["newest"] > step:
        told = f"versions {t['oldest']} to {t['newest']} at step {step}, bound {expected.max_staleness}"
        verdict.wrong("beyond_bound", f"{t['id']}: {told}")
    wanted = expected.question_of(_ticket(t))
    if t["question"] != wanted:
        verdict.wrong("wrong_pools", f"{t['id']} is of question {t['question']}, its ticket's is {wanted}")
    if t["tokens"][0] < 0 or t["tokens"][1] >= expected.vocabulary:
        verdict.wrong("foreign", f"{t['id']}: tokens {t['tokens']} of a vocabulary of {expected.vocabulary}")
    if t["special"]:
        verdict.wrong("foreign", f"{t['id']}: a special token in what the environment said")
    if (t["id"], t["digest"]) not in put:
        verdict.wrong("foreign", f"{t['id']}: no worker has put this")


def _ticket(t: Event) -> int:
    return int(t["id"].split(":")[0])


# --- what is left in Redis and in the folder ------------------------------------------------------------

WHERE = ("buffered", "claimed", "trained", "unselected")


def judge_keys(client: Any, prefix: str) -> tuple[dict[str, Any], list[str]]:
    """Facts from the keys themselves, and what is wrong with them. `client` is a synchronous one; nobody writes."""
    names = [name.decode() for name in client.scan_iter(match=prefix.replace("{", "[{]").replace("}", "[}]") + "*")]
    kinds = Counter(name.removeprefix(prefix).split(":")[0] for name in names)
    held = {name.removeprefix(prefix + "traj:") for name in names if name.startswith(prefix + "traj:")}
    payloads = {name.removeprefix(prefix + "payload:") for name in names if name.startswith(prefix + "payload:")}
    states = Counter((client.hget(f"{prefix}traj:{id_}", "state") or b"?").decode() for id_ in held)
    buckets = {
        id_.decode() for name in names if name.startswith(prefix + "depth:") for id_ in client.zrange(name, 0, -1)
    }
    lists = [name for name in names if re.fullmatch(re.escape(prefix) + r"pool:\d+", name)]
    pools = {id_.decode() for name in lists for id_ in client.lrange(name, 0, -1)}
    ledger = {name.decode(): int(count) for name, count in client.hgetall(prefix + "ledger").items()}
    lasting = [name for name in names if name.startswith(prefix + "staged:") and client.ttl(name) < 0]
    waiting = {id_ for id_ in held if client.hget(f"{prefix}traj:{id_}", "state") == b"buffered"}
    wrong = []
    for is_wrong, told in (
        (held != payloads, f"hashes without payload {sorted(held - payloads)[:3]}, payloads without hash "
         f"{sorted(payloads - held)[:3]}"),
        (waiting != buckets, f"buffered by hash {len(waiting)}, in buckets {len(buckets)}"),
        (ledger.get("buffered", 0) != len(buckets), f"ledger {ledger.get('buffered')}, buckets {len(buckets)}"),
        (not pools <= held, f"in pools without a hash: {sorted(pools - held)[:3]}"),
        (held - pools - buckets, f"neither in a pool nor in a bucket: {sorted(held - pools - buckets)[:3]}"),
        (lasting, f"staged payloads that never expire: {lasting[:3]}"),
        (ledger.get("claimed", 0) != states["claimed"], f"ledger claimed {ledger.get('claimed')}, hashes {states}"),
        (
            ledger.get("finished", 0) != sum(ledger.get(name, 0) for name in (*WHERE, "quarantined", "lost")),
            f"the ledger does not close: {ledger}",
        ),
    ):  # fmt: skip
        if is_wrong:
            wrong.append(told)
    return {"ledger": ledger, "keys": dict(kinds), "states": dict(states)}, wrong


def judge_files(
    run_folder: Path, epochs: dict[int, int], spoiled: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Metrics of every step, once, by the learner that committed it (`epochs`: step -> epoch), and nothing half-written
    left but the checkpoints that we have `spoiled`."""
    wrong = []
    rows = [(row["step"], row["epoch"]) for row in read_metrics(run_folder / "metrics.jsonl")]
    expected = sorted(epochs.items())
    if rows != expected:
        missing, strange = sorted(set(expected) - set(rows)), sorted(set(rows) - set(expected))
        wrong.append(f"metrics.jsonl, (step, epoch): missing {missing[:5]}, strange {strange[:5]}, {len(rows)} rows")
    stores = (run_folder / store for store in ("checkpoints", "weights", "records"))
    left = [str(p.relative_to(run_folder)) for store in stores for p in store.glob(".unfinished-*")]
    left += [
        f"{p.relative_to(run_folder)} (no state.json)"
        for p in (run_folder / "checkpoints").glob("step*")
        if not (p / "state.json").exists() and p.name not in spoiled
    ]
    if left:
        wrong.append(f"left over: {sorted(left)[:5]}")
    return {"metrics_rows": len(rows)}, wrong


def judge_memory(most_mib: dict[str, float]) -> list[str]:
    return [f"{name}: {mib} MiB, at most {MOST_MIB[name]}" for name, mib in most_mib.items() if mib > MOST_MIB[name]]
