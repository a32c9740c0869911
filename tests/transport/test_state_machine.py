"""Both buffers, driven by the same random interleavings of workers, learners, crashes and operators.

Some workers have another contract than the run, a learner may change the run's, commands arrive a second time much
later, what is kept vanishes, and Redis goes back to an earlier state.

After every rule the two agree, the ledger closes, no trajectory is trained twice in one lineage, no ticket is lost, and
every pool keeps the staleness bound and the sizes of its groups. A worker whose contract is not the run's takes and
stores nothing, and gets an error."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import os
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from cusearch_async.errors import BufferLost, Fenced
from cusearch_async.run.identity import NOBODY
from cusearch_async.transport.interface import MethodState, WorkerStatus
from tests.strategies import make_trajectory
from tests.transport.both_buffers import (
    ATTEMPTS,
    CHANGED,
    DEFER,
    REFUSED,
    S_MAX,
    STALENESS,
    WORKERS,
    BothBuffers,
    G,
    N,
    contract_of,
)

SEQUENCES = int(os.environ.get("CUSEARCH_SEQUENCES", "25"))


class Run(BothBuffers):
    """What workers, learners, Redis and operators may do, in any order."""

    @initialize(order=st.sampled_from(list(DEFER)), limit=st.sampled_from([1, N * G, 100]))
    def a_run_begins(self, order: str, limit: int) -> None:
        self.begin(order, limit)
        self.take_over()

    # --- workers ---

    @rule(worker=st.sampled_from(WORKERS), room=st.integers(1, 2 * G), answer_is_lost=st.booleans())
    def admit(self, worker: str, room: int, answer_is_lost: bool = False) -> None:
        self.admissions += 1
        redis = self.workers[worker][1]
        redis._numbers = itertools.count(1000 * self.admissions)
        granted = self.both("admit", worker, self.loaded[worker], room, by=self.workers[worker])
        assert (granted == REFUSED) == (not self.fits(worker))
        if granted == REFUSED:
            return
        if answer_is_lost:
            redis._numbers = itertools.count(1000 * self.admissions)
            assert self.do(redis.admit(worker, self.loaded[worker], room)) == granted, "the command was sent again"
        assert len(granted) <= room
        limit = (self.staleness + self.loaded[worker] + 1) * N
        assert all(slot.ticket < limit for slot in granted), "the staleness bound"
        self.running[worker] |= dict.fromkeys(granted, self.loaded[worker])
        self.granted[worker, 1000 * self.admissions] = granted

    @precondition(lambda self: self.admissions)
    @rule(data=st.data(), worker=st.sampled_from(WORKERS))
    def an_earlier_admission_arrives_again(self, data: Any, worker: str) -> None:
        """It takes nothing. The newest one is answered again, less what the bound forbids by now."""
        redis, memory = self.workers[worker][1], self.workers[worker][0]
        token = (
            self.do(redis.ask(lambda client: client.hget(redis.keys.worker(worker), "admit_token"))) or b"0/0"
        ).decode()
        number = data.draw(st.sampled_from([0, int(token.split("/")[1])]))
        redis._numbers = itertools.count(number)
        again = self.do(redis.admit(worker, self.loaded[worker], 2 * G)) if number or token != "0/0" else []
        if not self.fits(worker):
            assert again == (REFUSED if number or token != "0/0" else [])
            return
        if not number:
            assert again == []
            return
        state = self.do(memory.state())
        limit = (self.staleness + min(self.loaded[worker], state.published) + 1) * N if state.published >= 0 else 0
        tickets = {p.ticket for p in self.granted[worker, number]}
        leased = {t for t in tickets if memory._run.leases.get(t, ("", 0))[0] == worker}
        hedged = {t for t in tickets if memory._run.hedged.get(t) == worker}
        assert {p.ticket for p in again} == {t for t in leased | hedged if t < limit}
        if state.published >= 0:
            for ticket in sorted(t for t in leased if t >= limit):
                memory._run.requeue_ticket(ticket)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def an_old_command_arrives_again(self, data: Any) -> None:
        name, by, arguments = data.draw(st.sampled_from(self.sent))
        self.both(name, *arguments, by=by)

    @rule(data=st.data())
    def an_old_recovery_arrives_again(self, data: Any) -> None:
        epoch, recover = data.draw(st.sampled_from(self.recoveries))
        assert self.do(recover()) == epoch

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data(), depth=st.integers(0, S_MAX), again=st.booleans())
    def put(self, data: Any, depth: int, again: bool) -> None:
        worker = data.draw(st.sampled_from([w for w in WORKERS if self.running[w]]))
        slot = data.draw(st.sampled_from(sorted(self.running[worker], key=lambda p: (p.ticket, p.rollout))))
        trajectory = self.trajectory(worker, slot, depth)
        outcome = self.both("put", trajectory, by=self.workers[worker])
        assert (outcome == REFUSED) == (not self.fits(worker))
        if again:
            assert self.both("put", trajectory, by=self.workers[worker]) == outcome
        if outcome != "full":
            del self.running[worker][slot]

    @rule(worker=st.sampled_from(WORKERS), left=st.sets(st.integers(0, 7), max_size=2), depth=st.integers(0, S_MAX))
    def generate(self, worker: str, left: set[int], depth: int) -> None:
        """Admit as much as there is and finish it, but for a few."""
        self.admit(worker, 4 * G)
        for number, slot in enumerate(sorted(self.running[worker], key=lambda p: (p.ticket, p.rollout))):
            if number not in left:
                outcome = self.both("put", self.trajectory(worker, slot, depth), by=self.workers[worker])
                if outcome != "full":
                    del self.running[worker][slot]

    @rule(share=st.floats(0, 1), deeper=st.booleans(), size=st.integers(1, 2 * G), worker=st.sampled_from(WORKERS))
    def learn(self, share: float, deeper: bool, size: int, worker: str) -> None:
        """An ordinary step: one worker generates all that is missing, and has the new weights at once."""
        self.generate(worker, set(), size)
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

    @rule(ticket=st.integers(0, 12), rollout=st.integers(0, 3), worker=st.sampled_from(WORKERS))
    def something_late_is_put(self, ticket: int, rollout: int, worker: str) -> None:
        """By a worker that was taken for dead: wherever its ticket is by now."""
        outcome = self.both("put", make_trajectory(ticket, rollout, depth=0, worker="late"), by=self.workers[worker])
        assert (outcome == REFUSED) == (not self.fits(worker))

    @rule(worker=st.sampled_from(WORKERS))
    def load_weights(self, worker: str) -> None:
        self.loaded[worker] = self.do(self.buffers[0].state()).published

    @rule(worker=st.sampled_from(WORKERS))
    def beat(self, worker: str) -> None:
        tickets = sorted({p.ticket for p in self.running[worker]})
        answer = self.both("heartbeat", worker, tickets, WorkerStatus(), by=self.workers[worker])
        assert (answer == REFUSED) == (not self.fits(worker))

    @rule(worker=st.sampled_from(WORKERS))
    def join(self, worker: str) -> None:
        answer = self.both("check_identity", by=self.workers[worker])
        assert answer == (True if self.fits(worker) else REFUSED)

    @rule(worker=st.sampled_from(WORKERS), failed=st.booleans())
    def release(self, worker: str, failed: bool) -> None:
        self.both("release", worker, sorted({p.ticket for p in self.running[worker]})[:1], failed)

    @rule(worker=st.sampled_from(WORKERS), times=st.integers(1, ATTEMPTS))
    def fail(self, worker: str, times: int) -> None:
        """An episode that fails on every worker."""
        for _ in range(times):
            self.admit(worker, G)
            tickets = sorted({p.ticket for p in self.running[worker]})[:1]
            self.both("release", worker, tickets, True)
            self.running[worker] = {p: v for p, v in self.running[worker].items() if p.ticket not in tickets}

    @rule(worker=st.sampled_from(WORKERS), heir=st.sampled_from(WORKERS))
    def die_and_be_followed(self, worker: str, heir: str) -> None:
        """Another worker, with other weights, requests the tickets of the dead one."""
        self.admit(worker, 4 * G)
        self.worker_is_killed(worker)
        self.every_lease_runs_out()
        self.admit(heir, 4 * G)

    @rule(worker=st.sampled_from(WORKERS))
    def leave(self, worker: str) -> None:
        self.both("leave", worker, sorted({p.ticket for p in self.running[worker]}))
        self.running[worker] = {}

    @rule(worker=st.sampled_from(WORKERS))
    def worker_is_killed(self, worker: str) -> None:
        self.running[worker] = {}

    @rule()
    def every_lease_runs_out(self) -> None:
        for backend in self.backends:
            self.loop.run_until_complete(backend.expire_leases())

    @rule(worker=st.sampled_from(WORKERS), helper=st.sampled_from(WORKERS), left=st.integers(0, 2))
    def leases_grow_old(self, worker: str, helper: str, left: int) -> None:
        """A worker with nothing to do runs what another one lacks, and finishes most of it first."""
        self.admit(worker, 4 * G)
        for backend in self.backends:
            self.loop.run_until_complete(backend.age_leases())
        self.generate(helper, set(range(left)), depth=1)

    # --- learner ---

    @rule()
    def claim(self) -> None:
        step, run = self.step, self.backends[0].run
        answers = [self.do(learner.claim(step)) for learner in self.learners]
        ids = [a if a is None or isinstance(a, str) else [t.id for t in a] for a in answers]
        assert ids[0] == ids[1]
        self.pool = answers if isinstance(ids[0], list) else None
        if self.pool is None:
            return
        pool = self.pool[0]
        assert all(t.depth <= S_MAX and t.versions.max() <= step for t in pool)
        if self.order == "ticket":
            assert all(step * N <= t.ticket < (step + 1) * N for t in pool), "pool = its tickets"
        if self.order == "deferred" and not self.went_back:
            due = (step - DEFER[self.order] + 1) * N
            assert set(range(due)) <= run.taken, "a group misses at most so many pools"
        if self.order != "oldest_complete":
            bound = self.staleness + DEFER[self.order]
            self.bounds[step] = max(self.bounds.get(step, 0), bound)  # a pool that was claimed stays as it is
            assert all(step - t.oldest_version <= self.bounds[step] for t in pool), "the staleness bound"
        if not run.counts["lost"] and not run.quarantined:
            wanted = sum(run.sizes.get(t, G) - run.incomplete.get(t, 0) for t in run.pools[step].tickets)
            assert len(pool) == wanted, "groups are whole, or known to be incomplete"

    @precondition(lambda self: self.pool is not None)
    @rule(share=st.floats(0, 1), deeper=st.booleans(), size=st.integers(1, 2 * G))
    def commit(self, share: float, deeper: bool, size: int) -> None:
        step = self.pool[0].step
        self.phase = min(self.phase + deeper, S_MAX - 1)
        first = (step + 1 + STALENESS) * N
        method = MethodState(memory=f"of {step}", fields={"phase": self.phase}, sizes={first: size})
        taken = int(share * len(self.pool[0]))
        for learner, pool in zip(self.learners, self.pool, strict=True):
            selected = pool.trajectories[:taken]
            answer = self.do(learner.commit(pool, selected, method))
            assert answer is None or (self.went_back and answer == BufferLost.__name__)
        ids, self_pool, self.pool = {t.id for t in self.pool[0].trajectories[:taken]}, self.pool, None
        self.sent.append(("commit", self.learners, (self_pool[0], self_pool[0].trajectories[:taken], method)))
        if answer is None:
            is_sure = self.order == "ticket" or not self.went_back
            assert not is_sure or not any(ids & earlier for earlier in self.trained.values()), (
                "nothing is trained twice"
            )
            self.trained[step] = ids
            self.step = step + 1
            self.latest = (step + 1, method)

    @rule()
    def publish(self) -> None:
        self.both("announce", self.step, f"v{self.step}-e{self.learners[0].epoch}", by=self.learners)

    @precondition(lambda self: bool(self.trained))
    @rule()
    def checkpoint(self) -> None:
        if self.latest[0] == self.step and self.both("checkpoint", 0, by=self.learners) is None:
            self.saved = self.latest
            self.both("checkpoint", self.saved[0], by=self.learners)

    @rule()
    def finish(self) -> None:
        self.both("finish", by=self.learners)
        assert all(self.do(buffer.state()).is_finished for buffer in self.buffers)

    @rule()
    def take_over(self) -> None:
        """A learner is killed, or replaced while it lives; the new one resumes from the checkpoint."""
        if self.learners:
            self.old_learners.append(self.learners)
        self.learners = self.processes(self.limits)
        step, method = self.saved
        redis, recover = self.learners[1], self.learners[1].run_script

        async def record(script: str, *arguments: Any) -> Any:
            answer = await recover(script, *arguments)
            if script == "recover":
                self.recoveries.append((answer, lambda: recover(script, *arguments)))
            return answer

        redis.run_script = record
        changes = self.backends[0].run.identity not in (NOBODY, contract_of(self.limits))
        assert self.both("recover", step, method, self.epoch, changes, by=self.learners) is None
        assert self.epoch < self.learners[0].epoch == self.learners[1].epoch
        self.epoch = self.learners[0].epoch
        self.trained = {s: ids for s, ids in self.trained.items() if s < step}
        self.step, self.phase = step, int(method.fields.get("phase", 0))
        self.pool = None
        self.publish()

    @rule()
    def a_learner_changes_the_run(self) -> None:
        """One that may not is refused, and the current learner continues."""
        before = self.limits
        self.limits = self.begun_with if self.limits != self.begun_with else self.begun_with | CHANGED
        assert self.both("recover", *self.saved, self.epoch, by=self.processes(self.limits)) == REFUSED
        assert self.both("learner_leaves", by=self.learners) is None, "it is not fenced off"
        assert self.fits("a") == (before != self.begun_with)
        self.take_over()

    @precondition(lambda self: bool(self.old_learners))
    @rule(data=st.data())
    def an_old_learner_is_refused(self, data: Any) -> None:
        old = data.draw(st.sampled_from(self.old_learners))
        step = self.do(self.buffers[0].state()).step
        assert self.both("claim", step, by=old) == Fenced.__name__
        assert self.both("announce", step, "x", by=old) == Fenced.__name__
        assert self.both("checkpoint", step, by=old) == Fenced.__name__
        assert self.both("finish", by=old) == Fenced.__name__

    # --- Redis ---

    @precondition(lambda self: self.backends[0].run.entries)
    @rule(data=st.data())
    def something_vanishes(self, data: Any) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.backends[0].run.entries)))
        for backend in self.backends:
            self.loop.run_until_complete(backend.vanish(id_))

    @rule()
    def redis_is_copied(self) -> None:
        memory, redis = self.backends
        self.snapshot = copy.deepcopy(memory.run), self.loop.run_until_complete(redis.dump()), len(self.recoveries)

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def redis_goes_back_to_the_copy(self) -> None:
        """As when a replica that lags behind is promoted. The learner meets BufferLost, and the next one recovers."""
        memory, redis = self.backends
        run, dump, recoveries = self.snapshot
        for field in dataclasses.fields(run):
            setattr(memory.run, field.name, copy.deepcopy(getattr(run, field.name)))
        self.loop.run_until_complete(redis.restore(dump))
        self.went_back, self.pool = True, None
        del self.recoveries[recoveries:]  # the copy has never heard of the later ones
        if memory.run.state.step != self.step:
            assert self.both("claim", self.step, by=self.learners) in (BufferLost.__name__, Fenced.__name__)
        self.take_over()

    # --- operator ---

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.both("pause", paused)

    @rule(data=st.data())
    def quarantine(self, data: Any) -> None:
        run = self.backends[0].run
        known = sorted(run.entries) or ["0:0"]
        self.both("quarantine", data.draw(st.sampled_from(known)), "an operator did not like it")

    @rule(data=st.data())
    def reopen(self, data: Any) -> None:
        run = self.backends[0].run
        tickets = sorted({*run.leases, *run.incomplete, *run.ready}) or [0]
        self.both("reopen", data.draw(st.sampled_from(tickets)))


@pytest.mark.parametrize("sequences", [6, pytest.param(SEQUENCES, marks=pytest.mark.system)])
def test_memory_and_redis_behave_alike_whatever_happens(redis_url: str, sequences: int) -> None:
    Run.redis_url = redis_url
    Run.loop = asyncio.new_event_loop()
    try:
        run_state_machine_as_test(Run, settings=settings(max_examples=sequences, stateful_step_count=50, deadline=None))
    finally:
        Run.loop.close()
