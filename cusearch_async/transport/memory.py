"""The contract in memory: the model that the Redis buffer is tested against, and a buffer for tests of other parts.

One `MemoryRun` stands for the server, each `MemoryBuffer` for one process's view of it. Time is `MemoryRun.now`,
moved by hand.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cusearch_async.algorithm import methods
from cusearch_async.algorithm.ar3po import Visits
from cusearch_async.errors import BufferLost, ConfigError, EmptyPool, Fenced
from cusearch_async.transport import codec
from cusearch_async.transport.contract import LEARNER_ALIVE_S, Ledger, Outcome, Place, RunState, Shape
from cusearch_async.types import Pool, Trajectory


@dataclass(slots=True)
class _Entry:
    trajectory: Trajectory
    state: str
    size: int


@dataclass(slots=True)
class MemoryRun:
    """What the server would hold of a run."""

    now: float = 0.0
    state: RunState = field(default_factory=RunState)
    visits: dict[str, Visits] = field(default_factory=dict)
    entries: dict[str, _Entry] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)
    pools: dict[int, list[str]] = field(default_factory=dict)
    leases: dict[int, tuple[str, float]] = field(default_factory=dict)
    requeue: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    groups: Counter[int] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    incomplete: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    learner: tuple[dict[str, str], float] = ({}, 0.0)
    """What it said, and until when that holds."""


class MemoryBuffer:
    def __init__(self, run: MemoryRun, shape: Shape) -> None:
        self._run = run
        self._shape = shape
        self._epoch = 0

    # --- rollout worker -------------------------------------------------------------------------------

    async def admit(self, worker: str, loaded_version: int, room: int) -> list[Place]:
        run, shape = self._run, self._shape
        for ticket, (_, deadline) in sorted(run.leases.items(), key=lambda item: item[1][1]):
            if deadline <= run.now:
                self._fail_attempt(ticket)
        if run.state.published < 0 or run.state.paused:
            return []
        limit = (shape.max_staleness + min(loaded_version, run.state.published) + 1) * shape.questions
        granted: list[Place] = []
        waiting = sorted(ticket for ticket in run.requeue if ticket < limit)
        for ticket in itertools.chain(waiting, range(run.state.next_ticket, limit)):
            places = self._missing(ticket)
            if len(granted) + len(places) > room:
                break
            granted += places
            run.leases[ticket] = (worker, run.now + shape.lease_s)
            run.requeue.discard(ticket)
            run.state = replace(run.state, next_ticket=max(run.state.next_ticket, ticket + 1))
        return granted

    async def put(self, trajectory: Trajectory) -> Outcome:
        run, shape = self._run, self._shape
        shape.check(trajectory)
        ticket, payload = trajectory.ticket, codec.encode(trajectory)
        known = run.entries.get(trajectory.id)
        if known is not None:
            if codec.encode(known.trajectory) == payload:
                return "stored"
            run.counts["duplicates_refused"] += 1
            return "duplicate"
        is_open = ticket in run.leases or ticket in run.requeue
        if not is_open or trajectory.rollout >= self._size(ticket):
            run.counts["late_refused"] += 1
            return "late"
        is_full = run.counts["buffered"] >= shape.limit or run.counts["bytes"] >= shape.limit_bytes
        if is_full and ticket >= (run.state.step + 1) * shape.questions:
            return "full"
        run.entries[trajectory.id] = _Entry(trajectory, "buffered", len(payload))
        run.counts.update(finished=1, buffered=1, bytes=len(payload))
        run.groups[ticket] += 1
        if run.groups[ticket] == self._size(ticket):
            self._close(ticket)
        return "stored"

    async def heartbeat(self, worker: str, tickets: Sequence[int], facts: Mapping[str, str | int | float]) -> None:
        for ticket in tickets:
            if ticket in self._run.leases and self._run.leases[ticket][0] == worker:
                self._run.leases[ticket] = (worker, self._run.now + self._shape.lease_s)

    async def release(self, worker: str, tickets: Sequence[int], failed: bool) -> None:
        for ticket in tickets:
            if ticket in self._run.leases and self._run.leases[ticket][0] == worker:
                if failed:
                    self._fail_attempt(ticket)
                else:
                    del self._run.leases[ticket]
                    self._run.requeue.add(ticket)

    async def leave(self, worker: str, tickets: Sequence[int]) -> None:
        await self.release(worker, tickets, failed=False)

    # --- learner --------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._epoch

    async def recover(self, step: int, state: methods.State, sizes: Mapping[int, int], least_epoch: int = 0) -> None:
        run = self._run
        if step < run.state.checkpoint:
            raise ConfigError(
                f"the pools before step {run.state.checkpoint} are forgotten, the checkpoint is of {step}"
            )
        reached = run.state.step if run.state.epoch else step
        for id_ in itertools.chain.from_iterable(run.pools.get(s, []) for s in range(step, reached)):
            run.counts[run.entries[id_].state] -= 1
            run.counts["claimed"] += 1
            run.entries[id_].state = "claimed"
        run.visits = dict(state.visits)
        run.sizes = {**sizes, **run.sizes}
        run.state = replace(
            run.state,
            epoch=max(run.state.epoch, least_epoch) + 1,
            step=step,
            phase=state.phase,
            next_ticket=max(run.state.next_ticket, step * self._shape.questions),
        )
        self._epoch = run.state.epoch

    async def claim(self, step: int, question_of: Callable[[int], str] | None = None) -> Pool | None:
        run, shape = self._run, self._shape
        self._refuse_if_fenced()
        if step not in run.pools:
            if shape.order == "ticket":
                tickets = sorted(t for t in run.ready if step * shape.questions <= t < (step + 1) * shape.questions)
            else:
                tickets = sorted(run.ready)[: shape.questions]
            if len(tickets) < shape.questions:
                return None
            places = (f"{ticket}:{rollout}" for ticket in tickets for rollout in range(self._size(ticket)))
            ids = [id_ for id_ in places if id_ in run.entries]
            if not ids:
                raise EmptyPool(f"the pool of step {step} holds no trajectory")
            run.pools[step] = ids
            run.ready -= set(tickets)
            for id_ in ids:
                run.entries[id_].state = "claimed"
                run.counts.update(buffered=-1, bytes=-run.entries[id_].size, claimed=1)
        return Pool(step, tuple(run.entries[id_].trajectory for id_ in run.pools[step]))

    async def commit(
        self, pool: Pool, selected: Sequence[Trajectory], state: methods.State, sizes: Mapping[int, int]
    ) -> None:
        run = self._run
        self._refuse_if_fenced()
        if run.state.step > pool.step:
            return
        trained = {t.id for t in selected}
        ids = run.pools.get(pool.step, [])
        if run.state.step < pool.step or not trained <= set(ids):
            raise BufferLost(f"step {pool.step} is not the next, which is {run.state.step}")
        for id_ in ids:
            run.entries[id_].state = "trained" if id_ in trained else "unselected"
        run.counts.update(claimed=-len(ids), trained=len(trained), unselected=len(ids) - len(trained))
        run.visits |= {t.question_id: state.visits[t.question_id] for t in pool if t.question_id in state.visits}
        run.sizes = {ticket: n for ticket, n in sizes.items() if ticket >= run.state.next_ticket} | run.sizes
        run.state = replace(run.state, step=pool.step + 1, phase=state.phase)

    async def announce(self, version: int, directory: str) -> None:
        self._refuse_if_fenced()
        self._run.state = replace(self._run.state, published=version, weights=directory)

    async def checkpoint(self, step: int) -> None:
        run = self._run
        self._refuse_if_fenced()
        for forgotten in range(run.state.checkpoint, step):
            for id_ in run.pools.pop(forgotten, []):
                entry = run.entries.pop(id_)
                run.sizes.pop(entry.trajectory.ticket, None)
                run.incomplete.pop(entry.trajectory.ticket, None)
        run.state = replace(run.state, checkpoint=max(run.state.checkpoint, step))

    async def learner_heartbeat(self, facts: Mapping[str, str | int | float]) -> None:
        self._refuse_if_fenced()
        self._run.learner = {k: str(v) for k, v in facts.items()}, self._run.now + LEARNER_ALIVE_S

    async def learner_leaves(self) -> None:
        self._refuse_if_fenced()
        self._run.learner = {}, 0.0

    # --- operator -------------------------------------------------------------------------------------

    async def pause(self, paused: bool) -> None:
        self._run.state = replace(self._run.state, paused=paused)

    async def quarantine(self, trajectory_id: str, reason: str) -> bool:
        run = self._run
        entry = run.entries.get(trajectory_id)
        if entry is None or entry.state != "buffered":
            return False
        del run.entries[trajectory_id]
        run.counts.update(buffered=-1, bytes=-entry.size, quarantined=1)
        run.quarantined[trajectory_id] = reason
        if entry.trajectory.ticket in run.groups:
            run.groups[entry.trajectory.ticket] -= 1
        return True

    async def reopen(self, ticket: int) -> bool:
        run = self._run
        if ticket in run.leases:
            del run.leases[ticket]
        elif ticket in run.ready and ticket in run.incomplete:
            lacking = run.incomplete.pop(ticket)
            run.ready.discard(ticket)
            run.counts.update(incomplete_groups=-1, failed_rollouts=-lacking)
            run.groups[ticket] = self._size(ticket) - len(self._missing(ticket))
        else:
            return False
        run.requeue.add(ticket)
        return True

    async def learner(self) -> dict[str, str]:
        told, until = self._run.learner
        left = until - self._run.now
        return told | {"heartbeat_age_s": f"{LEARNER_ALIVE_S - left:.1f}"} if told and left > 0 else {}

    async def state(self) -> RunState:
        return self._run.state

    async def ledger(self) -> Ledger:
        return Ledger(**{name: self._run.counts[name] for name in Ledger.__dataclass_fields__})

    async def capacities(self) -> list[int]:
        depths = Counter(e.trajectory.depth for e in self._run.entries.values() if e.state == "buffered")
        return [depths[s] for s in range(self._shape.s_max + 1)]

    # ---------------------------------------------------------------------------------------------------

    def _size(self, ticket: int) -> int:
        return self._run.sizes.get(ticket, self._shape.rollouts)

    def _missing(self, ticket: int) -> list[Place]:
        places = (Place(ticket, rollout) for rollout in range(self._size(ticket)))
        return [place for place in places if f"{place.ticket}:{place.rollout}" not in self._run.entries]

    def _close(self, ticket: int) -> None:
        run = self._run
        run.leases.pop(ticket, None)
        run.requeue.discard(ticket)
        run.groups.pop(ticket, None)
        run.attempts.pop(ticket, None)
        run.ready.add(ticket)

    def _fail_attempt(self, ticket: int) -> None:
        run = self._run
        del run.leases[ticket]
        run.attempts[ticket] += 1
        if run.attempts[ticket] < self._shape.max_attempts:
            run.requeue.add(ticket)
            run.counts["requeued"] += 1
            return
        lacking = len(self._missing(ticket))
        self._close(ticket)
        run.incomplete[ticket] = lacking
        run.counts.update(incomplete_groups=1, failed_rollouts=lacking)

    def _refuse_if_fenced(self) -> None:
        if self._epoch != self._run.state.epoch:
            raise Fenced("another learner has taken over")
