"""Both buffers, driven by the same random interleavings of workers, learners, crashes and operators.

After every rule the two agree, the ledger closes, no trajectory is trained twice in one lineage, no ticket is lost,
staleness keeps its bound and the phase never falls within a lineage."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cusearch_async.algorithm.methods import State
from cusearch_async.errors import CusearchError, Fenced
from cusearch_async.transport.contract import Place
from tests.strategies import make_trajectory
from tests.transport.conftest import MemoryBackend, RedisBackend

N, G, STALENESS, ATTEMPTS, S_MAX = 2, 2, 1, 3, 5
SEQUENCES = int(os.environ.get("CUSEARCH_SEQUENCES", "60"))
WORKERS = ("a", "b", "c")


class Run(RuleBasedStateMachine):
    """Every operation is done on both; `both` fails unless they answer alike."""

    redis_url = ""
    loop: asyncio.AbstractEventLoop

    @initialize(order=st.sampled_from(["ticket", "oldest_complete"]), limit=st.sampled_from([1, N * G, 100]))
    def begin(self, order: str, limit: int) -> None:
        shape = {"questions": N, "rollouts": G, "max_staleness": STALENESS, "max_attempts": ATTEMPTS, "order": order}
        self.shape = shape | {"limit": limit, "s_max": S_MAX}
        self.order = order
        self.backends: list[Any] = [MemoryBackend(), RedisBackend(self.redis_url)]
        self.buffers = [backend.make(**self.shape) for backend in self.backends]
        self.old_learners: list[list[Any]] = []
        self.learners: list[Any] = []
        self.playing: dict[str, set[Place]] = {worker: set() for worker in WORKERS}
        self.loaded = dict.fromkeys(WORKERS, 0)
        self.saved = (0, State(), {})  # the checkpoint: step, method state, group sizes
        self.trained: dict[int, set[str]] = {}  # step -> what it trained on, in the current lineage
        self.pool: list[Any] | None = None
        self.phase = 0
        self.admissions = 0
        self.take_over()

    def do(self, coroutine: Any) -> Any:
        try:
            return self.loop.run_until_complete(coroutine)
        except CusearchError as error:
            return type(error).__name__

    def both(self, name: str, *arguments: Any, by: list[Any] | None = None) -> Any:
        answers = [self.do(getattr(buffer, name)(*arguments)) for buffer in by or self.buffers]
        assert answers[0] == answers[1], f"{name}{arguments}: {answers}"
        return answers[0]

    # --- workers ---

    @rule(worker=st.sampled_from(WORKERS), room=st.integers(1, 2 * G), answer_is_lost=st.booleans())
    def admit(self, worker: str, room: int, answer_is_lost: bool = False) -> None:
        self.admissions += 1
        redis = self.buffers[1]
        redis._numbers = itertools.count(1000 * self.admissions)
        granted = self.both("admit", worker, self.loaded[worker], room)
        if answer_is_lost:
            redis._numbers = itertools.count(1000 * self.admissions)
            assert self.do(redis.admit(worker, self.loaded[worker], room)) == granted, "the command was sent again"
        assert len(granted) <= room
        limit = (STALENESS + self.loaded[worker] + 1) * N
        assert all(place.ticket < limit for place in granted), "the staleness bound"
        self.playing[worker] |= set(granted)

    @precondition(lambda self: any(self.playing.values()))
    @rule(data=st.data(), depth=st.integers(0, S_MAX), again=st.booleans())
    def put(self, data: Any, depth: int, again: bool) -> None:
        worker = data.draw(st.sampled_from([w for w in WORKERS if self.playing[w]]))
        place = data.draw(st.sampled_from(sorted(self.playing[worker], key=lambda p: (p.ticket, p.rollout))))
        trajectory = make_trajectory(place.ticket, place.rollout, depth=depth, worker=worker)
        outcome = self.both("put", trajectory)
        if again:
            assert self.both("put", trajectory) == outcome
        if outcome != "full":
            self.playing[worker].discard(place)

    @rule(worker=st.sampled_from(WORKERS), left=st.sets(st.integers(0, 7), max_size=2), depth=st.integers(0, S_MAX))
    def play(self, worker: str, left: set[int], depth: int) -> None:
        """Admit as much as there is and finish it, but for a few."""
        self.admit(worker, 4 * G)
        for number, place in enumerate(sorted(self.playing[worker], key=lambda p: (p.ticket, p.rollout))):
            if number not in left:
                outcome = self.both("put", make_trajectory(place.ticket, place.rollout, depth=depth, worker=worker))
                if outcome != "full":
                    self.playing[worker].discard(place)

    @rule(share=st.floats(0, 1), deeper=st.booleans(), size=st.integers(1, 2 * G), worker=st.sampled_from(WORKERS))
    def learn(self, share: float, deeper: bool, size: int, worker: str) -> None:
        """A step as it goes when nothing happens: one worker plays what it lacks, and has the new weights at once."""
        self.play(worker, set(), size)
        self.claim()
        if self.pool is not None:
            self.commit(share, deeper, size)
            self.publish()
            self.load_weights(worker)

    @precondition(lambda self: bool(self.trained))
    @rule()
    def claim_and_then_checkpoint(self) -> None:
        """As it goes when saving takes a while."""
        self.claim()
        self.checkpoint()

    @rule(ticket=st.integers(0, 12), rollout=st.integers(0, 3))
    def something_late_is_put(self, ticket: int, rollout: int) -> None:
        """By a worker that was taken for dead: wherever its ticket is by now."""
        self.both("put", make_trajectory(ticket, rollout, depth=0, worker="late"))

    @rule(worker=st.sampled_from(WORKERS))
    def load_weights(self, worker: str) -> None:
        self.loaded[worker] = self.do(self.buffers[0].state()).published

    @rule(worker=st.sampled_from(WORKERS))
    def beat(self, worker: str) -> None:
        self.both("heartbeat", worker, sorted({p.ticket for p in self.playing[worker]}), {})

    @rule(worker=st.sampled_from(WORKERS), failed=st.booleans())
    def give_back(self, worker: str, failed: bool) -> None:
        self.both("release", worker, sorted({p.ticket for p in self.playing[worker]})[:1], failed)

    @rule(worker=st.sampled_from(WORKERS), times=st.integers(1, ATTEMPTS))
    def fail(self, worker: str, times: int) -> None:
        """An episode that cannot be played, by whoever tries it."""
        for _ in range(times):
            self.admit(worker, G)
            tickets = sorted({p.ticket for p in self.playing[worker]})[:1]
            self.both("release", worker, tickets, True)
            self.playing[worker] = {p for p in self.playing[worker] if p.ticket not in tickets}

    @rule(worker=st.sampled_from(WORKERS), heir=st.sampled_from(WORKERS))
    def die_and_be_followed(self, worker: str, heir: str) -> None:
        """Another worker, with weights of its own, asks for what the dead one has left."""
        self.admit(worker, 4 * G)
        self.worker_is_killed(worker)
        self.every_lease_runs_out()
        self.admit(heir, 4 * G)

    @rule(worker=st.sampled_from(WORKERS))
    def leave(self, worker: str) -> None:
        self.both("leave", worker, sorted({p.ticket for p in self.playing[worker]}))
        self.playing[worker] = set()

    @rule(worker=st.sampled_from(WORKERS))
    def worker_is_killed(self, worker: str) -> None:
        self.playing[worker] = set()

    @rule()
    def every_lease_runs_out(self) -> None:
        for backend in self.backends:
            self.loop.run_until_complete(backend.expire_leases())

    # --- learner ---

    @rule()
    def claim(self) -> None:
        step = self.do(self.buffers[0].state()).step
        answers = [self.do(learner.claim(step)) for learner in self.learners]
        ids = [a if a is None or isinstance(a, str) else [t.id for t in a] for a in answers]
        assert ids[0] == ids[1]
        self.pool = answers if isinstance(ids[0], list) else None
        if self.pool and self.order == "ticket":
            assert all(step * N <= t.ticket < (step + 1) * N for t in self.pool[0]), "pool = its tickets"

    @precondition(lambda self: self.pool is not None)
    @rule(share=st.floats(0, 1), deeper=st.booleans(), size=st.integers(1, 2 * G))
    def commit(self, share: float, deeper: bool, size: int) -> None:
        step = self.pool[0].step
        self.phase = min(self.phase + deeper, S_MAX - 1)
        state = State(phase=self.phase, visits={"atlas/2/Pinsk": ((step, step + 1),)})
        first = (step + 1 + STALENESS) * N
        sizes = {first: size}
        taken = int(share * len(self.pool[0]))
        for learner, pool in zip(self.learners, self.pool, strict=True):
            selected = pool.trajectories[:taken]
            assert self.do(learner.commit(pool, selected, state, sizes)) is None
        ids = {t.id for t in self.pool[0].trajectories[:taken]}
        assert not any(ids & earlier for earlier in self.trained.values()), "nothing is trained twice"
        self.trained[step] = ids
        self.latest = (step + 1, state, sizes)
        self.pool = None

    @rule()
    def publish(self) -> None:
        state = self.do(self.buffers[0].state())
        self.both("announce", state.step, f"v{state.step}-e{state.epoch}", by=self.learners)

    @precondition(lambda self: bool(self.trained))
    @rule()
    def checkpoint(self) -> None:
        if self.latest[0] == self.do(self.buffers[0].state()).step:
            self.saved = self.latest
            self.both("checkpoint", self.saved[0], by=self.learners)

    @rule()
    def take_over(self) -> None:
        """A learner is killed, or replaced while it lives; the new one goes on from the checkpoint."""
        if self.learners:
            self.old_learners.append(self.learners)
        self.learners = [backend.make(**self.shape) for backend in self.backends]
        step, state, sizes = self.saved
        assert self.both("recover", step, state, sizes, by=self.learners) is None
        self.trained = {s: ids for s, ids in self.trained.items() if s < step}
        self.phase = state.phase
        self.pool = None
        self.publish()

    @precondition(lambda self: bool(self.old_learners))
    @rule(data=st.data())
    def an_old_learner_is_refused(self, data: Any) -> None:
        old = data.draw(st.sampled_from(self.old_learners))
        step = self.do(self.buffers[0].state()).step
        assert self.both("claim", step, by=old) == Fenced.__name__
        assert self.both("announce", step, "x", by=old) == Fenced.__name__
        assert self.both("checkpoint", step, by=old) == Fenced.__name__

    # --- operator ---

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.both("pause", paused)

    @rule(data=st.data())
    def quarantine(self, data: Any) -> None:
        run = self.backends[0].run
        of_open_groups = sorted(id_ for id_, entry in run.entries.items() if entry.trajectory.ticket in run.groups)
        known = of_open_groups or sorted(run.entries) or ["0:0"]
        self.both("quarantine", data.draw(st.sampled_from(known)), "an operator did not like it")

    @rule(data=st.data())
    def reopen(self, data: Any) -> None:
        run = self.backends[0].run
        tickets = sorted({*run.leases, *run.incomplete, *run.ready}) or [0]
        self.both("reopen", data.draw(st.sampled_from(tickets)))

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
            "requeue": run.requeue,
            "ready": run.ready,
            "groups": {ticket: n for ticket, n in run.groups.items() if n},
            "attempts": {ticket: n for ticket, n in run.attempts.items() if n},
            "incomplete": run.incomplete,
        }

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
        pooled = Counter(run.entries[id_].trajectory.ticket for ids in run.pools.values() for id_ in ids)
        forgotten = run.state.checkpoint
        for ticket in range(run.state.next_ticket):
            places = [ticket in run.leases, ticket in run.requeue, ticket in run.ready]
            assert sum(places) <= 1
            is_settled = any(places) or ticket in pooled or forgotten > 0 or run.quarantined
            assert is_settled or ticket in run.incomplete, f"ticket {ticket} is nowhere"

    def teardown(self) -> None:
        if hasattr(self, "backends"):
            self.loop.run_until_complete(self.backends[1].close())


def test_memory_and_redis_behave_alike_whatever_happens(redis_url: str) -> None:
    Run.redis_url = redis_url
    Run.loop = asyncio.new_event_loop()
    try:
        run_state_machine_as_test(Run, settings=settings(max_examples=SEQUENCES, stateful_step_count=50, deadline=None))
    finally:
        Run.loop.close()
