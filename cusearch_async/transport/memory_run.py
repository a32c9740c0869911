"""The data of a run in memory, and the steps that several operations share."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from cusearch_async.run.identity import NOBODY, Identity
from cusearch_async.transport.interface import LearnerStatus, RolloutSlot, RunState, WorkerStatus
from cusearch_async.transport.limits import RunLimits
from cusearch_async.types import Trajectory

OUTDATED = "it was generated before the settings of the run were changed (--accept-changes)"


@dataclass(slots=True)
class Entry:
    trajectory: Trajectory
    state: str
    """buffered, claimed, trained, unselected or quarantined."""
    size: int
    has_gone: bool = False
    """Whether it disappeared from the server without an operation of ours."""
    reason: str = ""
    """Why it is quarantined."""


@dataclass(slots=True)
class Claimed:
    """A pool that a step has claimed."""

    tickets: list[int]
    ids: list[str]


@dataclass(slots=True)
class MemoryRun:
    """The data that the server would hold for a run."""

    now: float = 0.0
    limits: RunLimits | None = None
    """Written by the learner."""
    identity: Identity = NOBODY
    """Written by the learner."""
    state: RunState = field(default_factory=RunState)
    announced_by: int = 0
    news: int = 0
    """How often a worker could have found something to do."""
    listeners: set[asyncio.Event] = field(default_factory=set)
    memory: str = ""
    """Memory of the selection method."""
    entries: dict[str, Entry] = field(default_factory=dict)
    held: int = 0
    held_bytes: int = 0
    """Buffered trajectories, and their payload bytes."""
    quarantined: dict[str, Entry] = field(default_factory=dict)
    pools: dict[int, Claimed] = field(default_factory=dict)
    leases: dict[int, tuple[str, float]] = field(default_factory=dict)
    first_deadline: float = math.inf
    """No lease ends before it."""
    requeue: set[int] = field(default_factory=set)
    leased_at: dict[int, float] = field(default_factory=dict)
    """Leased ticket -> when it was granted last, also by a hedge; the oldest first."""
    hedged: dict[int, str] = field(default_factory=dict)
    """Leased ticket -> the last other worker that was granted what it lacks."""
    ready: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)
    """Tickets that steps have claimed, in deferred order."""
    reserved: dict[int, list[int]] = field(default_factory=dict)
    """Step -> tickets of its pool, which are generated again for it; deferred order."""
    groups: dict[int, int] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)
    incomplete: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    """The counters of the ledger, without what `entries` are."""
    workers: dict[str, tuple[WorkerStatus, float]] = field(default_factory=dict)
    """Worker -> its last status, and the time."""
    learners: dict[str, int] = field(default_factory=dict)
    """Nonce of a learner's start -> its epoch."""
    learner: tuple[LearnerStatus, float] | None = None
    """The learner's last status, and the time."""

    # --- moves of tickets and trajectories ------------------------------------------------------------

    def group_size(self, ticket: int) -> int:
        return self.sizes.get(ticket, self._known.rollouts)

    def is_open(self, ticket: int) -> bool:
        """Whether its group takes trajectories."""
        return ticket in self.leases or ticket in self.requeue

    def slot_ids(self, ticket: int) -> list[str]:
        return [f"{ticket}:{rollout}" for rollout in range(self.group_size(ticket))]

    def missing(self, ticket: int) -> list[RolloutSlot]:
        slots = (RolloutSlot(ticket, rollout) for rollout in range(self.group_size(ticket)))
        return [slot for slot in slots if f"{slot.ticket}:{slot.rollout}" not in self.entries]

    def hold(self, id_: str, entry: Entry) -> None:
        """Buffer a trajectory."""
        self.entries[id_] = entry
        self.held, self.held_bytes = self.held + 1, self.held_bytes + entry.size

    def move(self, id_: str, state: str) -> None:
        entry = self.entries[id_]
        if entry.state == "buffered":
            self.held, self.held_bytes = self.held - 1, self.held_bytes - entry.size
        entry.state = state

    def count_as_lost(self, id_: str) -> None:
        self.move(id_, "lost")
        del self.entries[id_]
        self.counts["lost"] += 1

    def keep_apart(self, id_: str, reason: str) -> None:
        self.move(id_, "quarantined")
        entry = self.quarantined[id_] = self.entries.pop(id_)
        entry.reason = reason
        self.counts["quarantined"] += 1

    def forget_pool(self, step: int) -> None:
        pool = self.pools.pop(step)
        for id_ in pool.ids:
            state = self.entries.pop(id_).state
            self.counts["lost" if state == "claimed" else state] += 1
        for ticket in pool.tickets:
            self.sizes.pop(ticket, None)
            self.incomplete.pop(ticket, None)

    def lease(self, ticket: int, worker: str) -> None:
        self.renew(ticket, worker)
        self.leased_at[ticket] = self.now

    def renew(self, ticket: int, worker: str) -> None:
        """The lease, which may have been another worker's."""
        deadline = self.now + self._known.lease_s
        self.leases[ticket] = worker, deadline
        self.first_deadline = min(self.first_deadline, deadline)

    def expired(self) -> list[int]:
        """Tickets whose leases have ended, the first one first."""
        if self.now < self.first_deadline:
            return []
        deadlines = sorted((deadline, ticket) for ticket, (_, deadline) in self.leases.items())
        self.first_deadline = min((deadline for deadline, _ in deadlines if deadline > self.now), default=math.inf)
        return [ticket for deadline, ticket in deadlines if deadline <= self.now]

    def hedge(self, ticket: int, worker: str) -> None:
        self.hedged[ticket] = worker
        del self.leased_at[ticket]  # so that it becomes the last
        self.leased_at[ticket] = self.now

    def end_hedge(self, ticket: int, failed: bool) -> None:
        """Another worker may hedge the ticket; at once, unless it has failed."""
        del self.hedged[ticket]
        if not failed:
            del self.leased_at[ticket]
            self.leased_at = {ticket: -math.inf} | self.leased_at

    def end_lease(self, ticket: int) -> None:
        for known in (self.leases, self.leased_at, self.hedged):
            known.pop(ticket, None)

    def close_group(self, ticket: int) -> None:
        self.end_lease(ticket)
        self.requeue.discard(ticket)
        self.groups.pop(ticket, None)
        self.ready.add(ticket)

    def requeue_ticket(self, ticket: int) -> None:
        self.end_lease(ticket)
        self._mark_incomplete(ticket, 0)
        lacking = len(self.missing(ticket))
        if not lacking:
            self.close_group(ticket)
            return
        self.ready.discard(ticket)
        self.groups[ticket] = self.group_size(ticket) - lacking
        self.requeue.add(ticket)
        self.tell()

    def pass_on(self, ticket: int) -> None:
        """The worker of a lease has given it up: the worker that hedges it gets the lease. Without one it is
        requeued."""
        hedger = self.hedged.pop(ticket, None)
        if hedger is None:
            self.requeue_ticket(ticket)
        else:
            self.renew(ticket, hedger)

    def tell(self) -> None:
        """Wake the workers that wait for something to do."""
        self.news += 1
        for heard in self.listeners:
            heard.set()

    def _mark_incomplete(self, ticket: int, lacking: int) -> None:
        before = self.incomplete.pop(ticket, 0)
        if lacking:
            self.incomplete[ticket] = lacking
        self.counts.update(incomplete_groups=bool(lacking) - bool(before), failed_rollouts=lacking - before)

    def fail_attempt(self, ticket: int) -> None:
        self.attempts[ticket] += 1
        if self.attempts[ticket] < self._known.max_attempts:
            self.pass_on(ticket)
            self.counts["requeued"] += 1
        else:
            self.close_group(ticket)
            self._mark_incomplete(ticket, len(self.missing(ticket)))

    def plan_sizes(self, sizes: Mapping[int, int], everything: bool) -> None:
        """Of tickets that are not granted; with `everything` also of the groups that are generated again."""
        planned = {t for t in sizes if t >= self.state.next_ticket}
        if everything:
            kept = {t for pool in self.pools.values() for t in pool.tickets}
            self.sizes = {t: size for t, size in self.sizes.items() if t in kept}
            planned |= self.requeue
        self.sizes = {t: size for t, size in sizes.items() if t in planned} | self.sizes

    def generate_again(self, step: int, everything: bool) -> None:
        """At the start of a learner: requeue the groups from `step` on in which no episode has succeeded, or
        `everything` that was generated, with a new count of attempts."""
        emptied = [s for s, pool in self.pools.items() if s >= step and (everything or not pool.ids)]
        if self._known.order == "deferred":
            self.reserved |= {s: self.pools[s].tickets for s in emptied}
            for s in list(self.reserved):
                self._open_if_it_must(s, everything)
        tickets = {ticket for s in emptied for ticket in self.pools.pop(s).tickets}
        if everything:
            for id_, entry in list(self.entries.items()):
                if entry.state == "buffered" or (entry.state == "claimed" and entry.trajectory.ticket in tickets):
                    self.keep_apart(id_, OUTDATED)
            tickets |= {*self.leases, *self.requeue, *self.ready}
        tickets |= {t for t in self.ready if self.incomplete.get(t) == self.group_size(t)}
        for ticket in sorted(tickets):
            self.attempts.pop(ticket, None)
            self.requeue_ticket(ticket)

    def _open_if_it_must(self, step: int, everything: bool) -> None:
        """Tickets that are kept for a step are open again when they might not be granted before it is done, or when
        everything is generated again."""
        known = self._known
        most = min(step + known.max_staleness + 1, known.steps) * known.questions
        if everything or any(ticket >= most for ticket in self.reserved[step]):
            self.taken -= set(self.reserved.pop(step))

    @property
    def _known(self) -> RunLimits:
        """The limits of a run that a learner has taken over; before that it has no tickets."""
        assert self.limits is not None
        return self.limits
