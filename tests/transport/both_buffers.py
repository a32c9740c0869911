"""The buffer in memory and the one in Redis side by side, and what must hold of them after every operation."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cusearch_async.errors import ContractMismatch, CusearchError
from cusearch_async.run.identity import Identity
from cusearch_async.transport.interface import NOTHING, RolloutSlot
from cusearch_async.transport.limits import LIMITS_IN_REDIS
from cusearch_async.types import Trajectory
from tests.strategies import make_trajectory
from tests.transport.conftest import MemoryBackend, RedisBackend

N, G, STALENESS, ATTEMPTS, S_MAX = 2, 2, 1, 3, 5
DEFER = {"ticket": 0, "deferred": 1, "oldest_complete": 0}
"""Order -> pools that a group may miss."""
HEDGE_S = 1e12
"""Only what `age_leases` has aged is hedged."""
CHANGED = {"max_staleness": 2, "max_attempts": 1}
"""What a learner may make of the run, and unmake again."""
BELIEFS: dict[str, dict[str, int]] = {
    "a": {},
    "b": {},
    "changed": CHANGED,
    "never": {"max_staleness": 7, "questions": 9, "rollouts": 3, "s_max": S_MAX + 1},
}
"""Worker -> the settings in its config that differ from the run's."""
WORKERS = tuple(BELIEFS)
REFUSED = ContractMismatch.__name__


def contract_of(limits: dict[str, Any]) -> Identity:
    return Identity({name: str(limits[name]) for name in LIMITS_IN_REDIS if name in limits})


class BothBuffers(RuleBasedStateMachine):
    """Every operation is done on both; `both` fails unless they answer alike."""

    redis_url = ""
    loop: asyncio.AbstractEventLoop

    def begin(self, order: str, limit: int) -> None:
        """A run in both, which no learner has taken over yet."""
        limits = {"questions": N, "rollouts": G, "max_staleness": STALENESS, "max_attempts": ATTEMPTS, "order": order}
        self.limits = limits | {"limit": limit, "s_max": S_MAX, "defer": DEFER[order], "hedge_s": HEDGE_S}
        self.order = order
        self.backends: list[Any] = [MemoryBackend(), RedisBackend(self.redis_url)]
        self.buffers = [backend.make(**self.limits) for backend in self.backends]
        self.workers = {name: self.processes(self.limits | belief) for name, belief in BELIEFS.items()}
        self.begun_with = self.limits
        self.bounds: dict[int, int] = {}  # step -> the largest staleness bound under which its pool was claimed
        self.old_learners: list[list[Any]] = []
        self.learners: list[Any] = []
        self.running: dict[str, dict[RolloutSlot, int]] = {worker: {} for worker in WORKERS}
        """What each has begun, and with which version."""
        self.granted: dict[tuple[str, int], list[RolloutSlot]] = {}  # by worker and number of its admission
        self.sent: list[tuple[str, list[Any], tuple[Any, ...]]] = []  # commands that may come again
        self.recoveries: list[Any] = []
        self.snapshot: Any = None
        self.went_back = False
        self.epoch = 0
        self.loaded = dict.fromkeys(WORKERS, 0)
        self.saved = (0, NOTHING)  # the checkpoint: step, and what the method remembers
        self.trained: dict[int, set[str]] = {}  # step -> what it trained on, in the current lineage
        self.latest: Any = None
        self.pool: list[Any] | None = None
        self.step = self.phase = 0
        self.admissions = 0

    def processes(self, limits: dict[str, Any]) -> list[Any]:
        """One with this config on each backend."""
        return [backend.make(contract_of(limits), **limits) for backend in self.backends]

    def fits(self, worker: str) -> bool:
        return self.begun_with | BELIEFS[worker] == self.limits

    @property
    def staleness(self) -> int:
        """The run's bound, as its learner has it."""
        return int(self.limits["max_staleness"])

    def do(self, coroutine: Any) -> Any:
        try:
            return self.loop.run_until_complete(coroutine)
        except CusearchError as error:
            return type(error).__name__

    def both(self, name: str, *arguments: Any, by: list[Any] | None = None) -> Any:
        by = by or self.buffers
        answers = [self.do(getattr(buffer, name)(*arguments)) for buffer in by]
        assert answers[0] == answers[1], f"{name}{arguments}: {answers}"
        if name in ("put", "release", "announce", "checkpoint"):
            self.sent.append((name, by, arguments))
        return answers[0]

    def trajectory(self, worker: str, slot: RolloutSlot, depth: int) -> Trajectory:
        version = self.running[worker][slot]
        versions = np.full(4, version, np.int32)
        return make_trajectory(slot.ticket, slot.rollout, depth=depth, worker=worker, versions=versions)

    # --- always ---

    @invariant()
    def both_agree(self) -> None:
        for question in ("state", "ledger", "capacities"):
            self.both(question)

    @invariant()
    def both_keep_every_ticket_in_the_same_place(self) -> None:
        run, redis = self.backends[0].run, self.backends[1]
        assert self.loop.run_until_complete(redis.tickets()) == {
            "lease": set(run.leases),
            "owner": {ticket: worker for ticket, (worker, _) in run.leases.items()},
            "hedged": run.hedged,
            "requeue": run.requeue,
            "ready": run.ready,
            "groups": {ticket: n for ticket, n in run.groups.items() if n},
            "attempts": {ticket: n for ticket, n in run.attempts.items() if n},
            "incomplete": run.incomplete,
        }

    @invariant()
    def both_know_what_was_taken(self) -> None:
        """Redis forgets what no later step has to know."""
        run, redis = self.backends[0].run, self.backends[1]
        taken, reserved = self.loop.run_until_complete(redis.taken())
        assert reserved == run.reserved
        known_from = (run.state.checkpoint - DEFER[self.order]) * N
        assert {t for t in run.taken if t >= known_from} <= taken <= run.taken

    @invariant()
    def the_ledger_closes(self) -> None:
        ledger = self.do(self.buffers[0].ledger())
        assert ledger.closes
        assert sum(self.do(self.buffers[0].capacities())) == ledger.buffered
        assert min(ledger.finished, ledger.buffered, ledger.claimed, ledger.trained, ledger.bytes) >= 0

    @invariant()
    def no_ticket_is_lost(self) -> None:
        """Every ticket that was granted is leased, queued, ready, or in the pool of a step."""
        run = self.backends[0].run
        pooled = Counter(ticket for pool in run.pools.values() for ticket in pool.tickets)
        forgotten = run.state.checkpoint * N
        for ticket in range(forgotten if self.order == "ticket" else 0, run.state.next_ticket):
            places = [ticket in run.leases, ticket in run.requeue, ticket in run.ready, pooled[ticket] == 1]
            may_be_forgotten = forgotten and (self.order == "oldest_complete" or ticket in run.taken)
            assert sum(places) == 1 or may_be_forgotten, f"ticket {ticket}: {places}"

    @rule()
    def the_keys_are_counted(self) -> None:
        """What has vanished is not in them, until it is missed."""
        if not any(entry.has_gone for entry in self.backends[0].run.entries.values()):
            assert self.do(self.buffers[1].audit()).findings == ()

    def teardown(self) -> None:
        if hasattr(self, "backends"):
            self.the_keys_are_counted()
            self.do(self.buffers[1].reset())
            self.loop.run_until_complete(self.backends[1].close())
