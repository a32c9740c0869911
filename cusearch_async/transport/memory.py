"""The buffer in memory: the model that the Redis buffer is tested against, and a buffer for tests of other parts.

One `MemoryRun` represents the server, and each `MemoryBuffer` one client process. Time is `MemoryRun.now`, which tests
set.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from cusearch_async.algorithm.tickets import ticket_limit
from cusearch_async.errors import BufferLost, ConfigError, Fenced
from cusearch_async.run.identity import NOBODY, Identity, granted_otherwise, has_joined, refusal
from cusearch_async.transport import codec
from cusearch_async.transport.interface import (
    ALIVE_S,
    NOTHING,
    Audit,
    Filter,
    LearnerStatus,
    Ledger,
    MethodState,
    Outcome,
    Queues,
    RolloutSlot,
    RunState,
    TrajectoryRow,
    WorkerStatus,
)
from cusearch_async.transport.limits import QuestionOf, RunLimits
from cusearch_async.transport.memory_run import Claimed, Entry, MemoryRun
from cusearch_async.types import Pool, Trajectory


class MemoryBuffer:
    def __init__(self, run: MemoryRun, limits: RunLimits, identity: Identity = NOBODY) -> None:
        self._run = run
        self._own_limits = limits
        self._identity = identity
        self.epoch, self.nonce = 0, ""
        self._read_news = 0

    @property
    def _limits(self) -> RunLimits:
        return self._run.limits or self._own_limits

    # --- rollout worker -------------------------------------------------------------------------------

    async def admit(self, worker: str, loaded_version: int, room: int) -> list[RolloutSlot]:
        self._refuse_another()
        run, limits = self._run, self._limits
        for ticket in run.expired():
            run.fail_attempt(ticket)
        if run.state.published < 0 or run.state.paused:
            return []
        limit = ticket_limit(min(loaded_version, run.state.published), limits.max_staleness, limits.questions)
        if limits.order != "oldest_complete":
            limit = min(limit, limits.steps * limits.questions)
        granted: list[RolloutSlot] = []
        waiting = sorted(ticket for ticket in run.requeue if ticket < limit)
        for ticket in itertools.chain(waiting, range(run.state.next_ticket, limit)):
            slots = run.missing(ticket)
            if len(granted) + len(slots) > room:
                return granted
            granted += slots
            run.lease(ticket, worker)
            run.requeue.discard(ticket)
            run.state = replace(run.state, next_ticket=max(run.state.next_ticket, ticket + 1))
        return granted + self._hedge(worker, limit, room - len(granted))

    def _hedge(self, worker: str, limit: int, room: int) -> list[RolloutSlot]:
        """What other workers were granted long ago, and lack, up to `room` rollouts."""
        run, limits, granted = self._run, self._limits, list[RolloutSlot]()
        if not limits.hedge_s:
            return granted
        soon = min(limit, (run.state.step + limits.defer + 2) * limits.questions)
        old = itertools.takewhile(lambda known: run.now - known[1] >= limits.hedge_s, run.leased_at.items())
        may = (t for t, _ in old if t < soon and worker not in (run.leases[t][0], run.hedged.get(t)))
        for ticket in sorted(may):
            slots = run.missing(ticket)
            if len(granted) + len(slots) > room:
                break
            granted += slots
            run.hedge(ticket, worker)
            run.counts["hedged_rollouts"] += len(slots)
        return granted

    async def put(self, trajectory: Trajectory) -> Outcome:
        run, limits = self._run, self._limits
        self._own_limits.check(trajectory)
        self._refuse_another()
        ticket, payload = trajectory.ticket, codec.encode(trajectory)
        known = run.entries.get(trajectory.id)
        if known is not None and (known.state == "buffered" or not known.has_gone):
            if not known.has_gone and codec.encode(known.trajectory) == payload:
                return "stored"
            run.counts["duplicates_refused"] += 1
            return "duplicate"
        if not run.is_open(ticket) or trajectory.rollout >= run.group_size(ticket):
            run.counts["late_refused"] += 1
            return "late"
        is_full = run.held >= limits.limit or run.held_bytes >= limits.limit_bytes
        is_needed = ticket < (run.state.step + 1) * limits.questions or ticket in run.reserved.get(run.state.step, ())
        if is_full and not is_needed:
            return "full"
        run.hold(trajectory.id, Entry(trajectory, "buffered", len(payload)))
        run.counts["finished"] += 1
        run.groups[ticket] = run.groups.get(ticket, 0) + 1
        if run.groups[ticket] == run.group_size(ticket):
            run.close_group(ticket)
        return "stored"

    async def wait_for_news(self, longest_s: float) -> bool:
        heard = asyncio.Event()
        self._run.listeners.add(heard)
        try:
            if self._run.news == self._read_news:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(heard.wait(), longest_s)
        finally:
            self._run.listeners.discard(heard)
        before, self._read_news = self._read_news, self._run.news
        return self._run.news != before

    async def heartbeat(self, worker: str, tickets: Sequence[int], status: WorkerStatus) -> list[int]:
        self._refuse_another()
        self._run.workers[worker] = (status, self._run.now)
        for ticket in tickets:
            if ticket in self._run.leases and self._run.leases[ticket][0] == worker:
                self._run.renew(ticket, worker)
        return [ticket for ticket in tickets if not self._run.is_open(ticket)] if self._run.state.epoch else []

    async def release(self, worker: str, tickets: Sequence[int], failed: bool) -> None:
        for ticket in tickets:
            if ticket in self._run.leases and self._run.leases[ticket][0] == worker:
                if failed:
                    self._run.fail_attempt(ticket)
                else:
                    self._run.pass_on(ticket)
            elif self._run.hedged.get(ticket) == worker:
                self._run.end_hedge(ticket, failed)

    async def leave(self, worker: str, tickets: Sequence[int]) -> None:
        await self.release(worker, tickets, failed=False)
        self._run.workers.pop(worker, None)

    # --- learner --------------------------------------------------------------------------------------

    async def epoch_of(self, nonce: str) -> int | None:
        return self._run.learners.get(nonce)

    async def recover(
        self, step: int, method: MethodState = NOTHING, least_epoch: int = 0, accepts_changes: bool = False
    ) -> None:
        run, limits = self._run, self._own_limits
        self._refuse_another(accepts_changes or not run.identity.terms)
        if step < run.state.checkpoint:
            raise ConfigError(
                f"the pools before step {run.state.checkpoint} are forgotten, the checkpoint is of {step}"
            )
        for name in ("questions", "rollouts", "order", "defer"):
            if run.limits and run.state.next_ticket and getattr(run.limits, name) != getattr(limits, name):
                raise granted_otherwise("in memory", name, getattr(limits, name), getattr(run.limits, name))
        own, is_changed = self._identity, bool(run.identity.terms) and run.identity.terms != self._identity.terms
        run.limits, run.identity = limits, own if own.run_id else replace(run.identity, terms=own.terms)
        reached = run.state.step if run.state.epoch else step
        if step > reached:
            self._forget_before(step)
        for id_ in [id_ for s, pool in run.pools.items() if s >= step for id_ in pool.ids]:
            run.move(id_, "claimed")
        run.generate_again(step, everything=is_changed)
        run.memory = method.memory
        run.plan_sizes(method.sizes, everything=is_changed)
        run.state = replace(
            replace(run.state, published=-1, weights="") if is_changed else run.state,  # none may begin with those
            epoch=max(run.state.epoch, least_epoch) + 1,
            step=step,
            resumed=step,
            fields=method.fields,
            next_ticket=max(run.state.next_ticket, step * limits.questions),
            checkpoint=max(run.state.checkpoint, step if step > reached else 0),
        )
        self.epoch, self.nonce = run.state.epoch, uuid.uuid4().hex
        run.learners[self.nonce] = self.epoch
        run.tell()

    def _forget_before(self, step: int) -> None:
        """The server is behind the checkpoint: the steps in between have already used these tickets."""
        run, first = self._run, step * self._limits.questions
        for s in [s for s in run.pools if s < step]:
            run.forget_pool(s)
        for id_ in [i for i, e in run.entries.items() if e.state == "buffered" and e.trajectory.ticket < first]:
            run.count_as_lost(id_)
        for tickets in (run.ready, run.requeue):
            tickets -= {t for t in tickets if t < first}
        for known in (run.leases, run.leased_at, run.hedged, run.groups, run.attempts, run.incomplete, run.sizes):
            for ticket in [t for t in known if t < first]:
                del known[ticket]
        if self._limits.order == "deferred":
            run.taken = {*range(first), *(t for pool in run.pools.values() for t in pool.tickets)}
            run.reserved = {}

    async def claim(self, step: int, question_of: QuestionOf | None = None) -> Pool | None:
        run, limits = self._run, self._limits
        self._refuse_if_fenced()
        if step != run.state.step:
            raise BufferLost(f"the next step is {run.state.step}, not {step}")
        if step not in run.pools:
            tickets = self._next_tickets(step)
            if len(tickets) < limits.questions or self._count_lost(tickets):
                return None
            ids = [id_ for ticket in tickets for id_ in run.slot_ids(ticket) if id_ in run.entries]
            bad = limits.faults([run.entries[id_].trajectory for id_ in ids], step, question_of)
            if bad:
                self._quarantine(bad)
                return None
            run.pools[step] = Claimed(tickets, ids)
            run.ready -= set(tickets)
            if limits.order == "deferred":
                run.taken |= set(tickets)
            run.reserved.pop(step, None)
            for ticket in tickets:
                run.attempts.pop(ticket, None)
            for id_ in ids:
                run.move(id_, "claimed")
        pool = run.pools[step]
        for id_ in [id_ for id_ in pool.ids if run.entries[id_].has_gone]:
            pool.ids.remove(id_)
            run.count_as_lost(id_)
        return Pool(step, tuple(run.entries[id_].trajectory for id_ in pool.ids))

    def _next_tickets(self, step: int) -> list[int]:
        """Of the pool of `step`, none that is kept for another; fewer than N while it is not complete."""
        run, limits = self._run, self._limits
        if step in run.reserved:
            return [ticket for ticket in run.reserved[step] if ticket in run.ready]
        first, last = limits.due(step)
        if limits.order == "ticket":
            return sorted(ticket for ticket in run.ready if first <= ticket <= last)
        is_waiting = limits.order == "deferred" and any(
            ticket not in run.ready and ticket not in run.taken for ticket in range(max(0, first), last + 1)
        )
        return [] if is_waiting else sorted(run.ready - {*itertools.chain(*run.reserved.values())})[: limits.questions]

    def _count_lost(self, tickets: Sequence[int]) -> bool:
        """Count trajectories of these groups that disappeared as lost, and requeue the groups. True if there were
        any."""
        entries = self._run.entries
        slots = [(ticket, id_) for ticket in tickets for id_ in self._run.slot_ids(ticket)]
        gone = [(ticket, id_) for ticket, id_ in slots if id_ in entries and entries[id_].has_gone]
        for _, id_ in gone:
            self._run.count_as_lost(id_)
        for ticket in sorted({ticket for ticket, _ in gone}):
            self._run.fail_attempt(ticket)
        return bool(gone)

    async def commit(self, pool: Pool, selected: Sequence[Trajectory], method: MethodState = NOTHING) -> None:
        run = self._run
        self._refuse_if_fenced()
        if run.state.step > pool.step:
            return
        claimed, trained = run.pools.get(pool.step), {t.id for t in selected}
        if run.state.step < pool.step or claimed is None or not trained <= {*claimed.ids, *run.quarantined}:
            raise BufferLost(f"step {pool.step} is not the next, which is {run.state.step}")
        for id_ in claimed.ids:
            run.move(id_, "trained" if id_ in trained else "unselected")
        run.memory = method.memory
        run.sizes = {ticket: n for ticket, n in method.sizes.items() if ticket >= run.state.next_ticket} | run.sizes
        run.state = replace(run.state, step=pool.step + 1, fields=method.fields)

    async def announce(self, version: int, directory: str) -> None:
        run = self._run
        self._refuse_if_fenced()
        if run.announced_by == self.epoch and version < run.state.published:
            return
        run.announced_by = self.epoch
        run.state = replace(run.state, published=version, weights=directory)
        run.tell()

    async def checkpoint(self, step: int) -> None:
        run = self._run
        self._refuse_if_fenced()
        for forgotten in range(run.state.checkpoint, step):
            if forgotten in run.pools:
                run.forget_pool(forgotten)
        run.state = replace(run.state, checkpoint=max(run.state.checkpoint, step))

    async def finish(self) -> None:
        self._refuse_if_fenced()
        self._run.state = replace(self._run.state, finished_by=self.epoch)
        self._run.tell()

    async def learner_heartbeat(self, status: LearnerStatus) -> None:
        self._refuse_if_fenced()
        self._run.learner = status, self._run.now

    async def learner_leaves(self) -> None:
        self._refuse_if_fenced()
        self._run.learner = None

    # --- operator -------------------------------------------------------------------------------------

    async def pause(self, paused: bool) -> None:
        self._run.state = replace(self._run.state, paused=paused)
        self._run.tell()

    async def quarantine(self, trajectory_id: str, reason: str) -> bool:
        return self._quarantine({trajectory_id: reason})

    def _quarantine(self, reasons: Mapping[str, str]) -> bool:
        """Quarantine trajectories that are buffered or claimed. True if there were any."""
        run, groups = self._run, set()
        known = {id_: run.entries[id_] for id_ in reasons if id_ in run.entries}
        found = {id_: entry for id_, entry in known.items() if entry.state == "buffered" or self._pool_of(id_)}
        for id_, entry in found.items():
            if entry.state == "buffered":
                groups.add(entry.trajectory.ticket)
            else:
                self._pool_of(id_).ids.remove(id_)  # type: ignore[union-attr]
            run.keep_apart(id_, reasons[id_])
        for ticket in groups:
            if ticket in run.ready:
                run.fail_attempt(ticket)
            else:
                run.groups[ticket] = run.group_size(ticket) - len(run.missing(ticket))
        return bool(found)

    def _pool_of(self, id_: str) -> Claimed | None:
        """The pool with this trajectory that is claimed and not committed."""
        pools = (pool for step, pool in self._run.pools.items() if step >= self._run.state.step)
        return next((pool for pool in pools if id_ in pool.ids), None)

    async def reopen(self, ticket: int) -> bool:
        run = self._run
        if ticket not in run.leases and not (ticket in run.ready and ticket in run.incomplete):
            return False
        run.attempts.pop(ticket, None)
        run.requeue_ticket(ticket)
        return True

    async def learner(self) -> LearnerStatus | None:
        if self._run.learner is None:
            return None
        status, at = self._run.learner
        age_s = self._run.now - at
        return msgspec.structs.replace(status, heartbeat_age_s=age_s) if age_s < ALIVE_S else None

    async def state(self) -> RunState:
        return self._run.state

    async def ledger(self) -> Ledger:
        counts, entries = Counter(self._run.counts), self._run.entries.values()
        counts.update(entry.state for entry in entries)
        counts["bytes"] = sum(entry.size for entry in entries if entry.state == "buffered")
        return Ledger(**{name: counts[name] for name in Ledger.__dataclass_fields__})

    async def server_memory(self) -> tuple[int, int]:
        return sum(entry.size for entry in self._run.entries.values()), 0

    async def queues(self, step: int) -> Queues:
        run, (first, last) = self._run, self._limits.due(step)
        due = sum(first <= ticket <= last for ticket in run.ready | run.taken)
        ready_of_pool = self._limits.ready_of_pool(step, len(run.ready), due)
        if step in run.reserved:
            ready_of_pool = len(run.ready & set(run.reserved[step]))
        return Queues(
            ready_of_pool=ready_of_pool,
            ready=len(run.ready),
            leased=len(run.leases),
            requeued=len(run.requeue),
            incomplete=len(run.incomplete),
            is_claimed=step in run.pools,
        )

    async def workers(self) -> dict[str, WorkerStatus]:
        now, last = self._run.now, self._run.workers
        return {name: msgspec.structs.replace(status, heartbeat_age_s=now - at) for name, (status, at) in last.items()}

    async def identity(self) -> Identity:
        return self._run.identity

    async def check_identity(self, accepts_changes: bool = False) -> bool:
        if is_it := has_joined("in memory", self._identity, self._run.identity, accepts_changes):
            self._identity = self._identity.after_joining(self._run.identity)
        return is_it

    async def capacities(self) -> list[int]:
        depths = Counter(t.depth for t in self._buffered())
        return [depths[s] for s in range(self._limits.s_max + 1)]

    async def depth_by_version(self) -> dict[tuple[int, int], int]:
        return dict(Counter((t.depth, t.oldest_version) for t in self._buffered()))

    async def rows(self, wanted: Filter) -> AsyncIterator[TrajectoryRow]:
        for t in sorted(self._buffered(), key=lambda t: (t.depth, t.ticket, t.rollout)):
            fields = {name: str(value) for name, value in codec.readable_fields(t).items()}
            row = TrajectoryRow(t.id, fields, max(0, self._run.state.step - t.oldest_version))
            if wanted.passes(row):
                yield row

    async def fetch(self, trajectory_id: str) -> tuple[Trajectory, dict[str, str]] | None:
        entry = self._run.entries.get(trajectory_id) or self._run.quarantined.get(trajectory_id)
        if entry is None:
            return None
        fields = codec.readable_fields(entry.trajectory) | {"state": entry.state}
        return entry.trajectory, {name: str(value) for name, value in fields.items()}

    async def quarantined(self) -> dict[str, str]:
        return {id_: entry.reason for id_, entry in self._run.quarantined.items()}

    async def audit(self) -> Audit:
        gone = tuple(f"gone: {id_}" for id_, entry in self._run.entries.items() if entry.has_gone)
        return Audit(len(self._run.entries) - len(gone), gone)

    async def exists(self) -> bool:
        return self._run.state.exists or bool(self._run.workers)

    async def runs(self) -> list[str]:
        return ["in memory"] if self._run.state.exists else []

    async def size(self) -> int:
        return len(self._run.entries) + self._run.state.exists

    async def reset(self) -> int:
        count, fresh = await self.size(), MemoryRun(now=self._run.now)
        for name in MemoryRun.__slots__:
            setattr(self._run, name, getattr(fresh, name))
        return count

    def _buffered(self) -> list[Trajectory]:
        return [entry.trajectory for entry in self._run.entries.values() if entry.state == "buffered"]

    def _refuse_another(self, accepts_changes: bool = False) -> None:
        refused = refusal("in memory", self._identity, self._run.identity, accepts_changes)
        if refused and self._run.state.exists:
            raise refused

    def _refuse_if_fenced(self) -> None:
        if self.epoch > self._run.state.epoch:
            raise BufferLost("the run is gone")
        if self.epoch != self._run.state.epoch:
            raise Fenced("another learner has taken over")
