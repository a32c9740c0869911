"""What every buffer must do for workers, on both buffers: admission, leases, what is put."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cusearch_async.errors import InvalidTrajectory
from cusearch_async.transport import codec
from cusearch_async.transport.interface import MethodState, RolloutSlot, WorkerStatus
from tests.strategies import make_trajectory
from tests.transport.filling import G, N, fill, start


async def test_nothing_is_admitted_before_weights_are_announced(backend):
    buffer = backend.make()
    await buffer.recover(0)
    assert await buffer.admit("w", 0, 8 * G) == []


async def test_tickets_come_in_order_each_with_all_its_rollouts(backend):
    buffer = backend.make()
    await start(buffer)
    assert await buffer.admit("w", 0, 2 * G) == [
        RolloutSlot(0, 0),
        RolloutSlot(0, 1),
        RolloutSlot(1, 0),
        RolloutSlot(1, 1),
    ]
    assert await buffer.admit("w", 0, G) == [RolloutSlot(2, 0), RolloutSlot(2, 1)]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_admission_stops_at_the_staleness_bound(backend, max_staleness):
    buffer = backend.make(max_staleness=max_staleness)
    await start(buffer)
    slots = await buffer.admit("w", 0, 1000)
    assert len({slot.ticket for slot in slots}) == (max_staleness + 1) * N
    assert await buffer.admit("w", 0, G) == []
    assert await buffer.admit("w", 5, G) == [], "a version that was never announced grants nothing"


async def test_no_ticket_is_granted_that_the_run_will_not_train_on(backend):
    buffer = backend.make(max_staleness=3, steps=2)
    await start(buffer)
    assert {slot.ticket for slot in await buffer.admit("w", 0, 1000)} == set(range(2 * N))
    assert await buffer.admit("w", 0, 1000) == []


async def test_a_run_that_gets_more_steps_grants_the_next_tickets(backend):
    worker = backend.make(max_staleness=3, steps=2)
    await start(worker)
    await worker.admit("w", 0, 1000)
    await start(backend.make(max_staleness=3, steps=3))
    assert {slot.ticket for slot in await worker.admit("w", 0, 1000)} == set(range(2 * N, 3 * N))


async def test_in_the_order_of_completion_more_tickets_are_granted_than_the_run_has_pools(backend):
    buffer = backend.make(max_staleness=1, steps=1, order="oldest_complete")
    await start(buffer)
    assert len({slot.ticket for slot in await buffer.admit("w", 0, 1000)}) == 2 * N


async def test_newer_weights_open_the_next_tickets(backend):
    buffer = backend.make(max_staleness=0)
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, N * G))
    pool = await buffer.claim(0)
    await buffer.commit(pool, pool.trajectories[:3], MethodState(fields={"phase": 0}))
    await buffer.announce(1, "v000001-e1")
    assert await buffer.admit("w", 0, N * G) == [], "the worker still has the old weights"
    assert {slot.ticket for slot in await buffer.admit("w", 1, N * G)} == {4, 5, 6, 7}


async def test_two_workers_never_get_the_same_ticket(backend):
    learner = backend.make(max_staleness=10)
    await start(learner)
    workers = [backend.make(max_staleness=10) for _ in range(12)]
    grants = await asyncio.gather(*(worker.admit(f"w{i}", 0, 3 * G) for i, worker in enumerate(workers)))
    slots = [slot for grant in grants for slot in grant]
    assert len(slots) == len(set(slots)) == 12 * 3 * G


async def test_a_trajectory_lies_in_the_bucket_of_its_depth(backend):
    buffer = backend.make()
    await start(buffer)
    slots = await buffer.admit("w", 0, 3 * G)
    for depth, slot in enumerate(slots):
        await buffer.put(make_trajectory(slot.ticket, slot.rollout, depth=depth))
    assert await buffer.capacities() == [1, 1, 1, 1, 1, 1]


async def test_a_trajectory_deeper_than_the_last_bucket_is_refused_by_name(backend):
    buffer = backend.make()
    await start(buffer)
    await buffer.admit("w", 0, G)
    with pytest.raises(InvalidTrajectory, match=r"trajectory 0:1: depth must be at most 5, got 6"):
        await buffer.put(make_trajectory(0, 1, depth=6))
    assert (await buffer.ledger()).finished == 0


async def test_a_second_put_of_the_same_rollout_is_refused_and_counted(backend):
    buffer = backend.make()
    await start(buffer)
    await buffer.admit("w", 0, G)
    assert await buffer.put(make_trajectory(0, 0)) == "stored"
    assert await buffer.put(make_trajectory(0, 0, reward=0.0)) == "duplicate"
    ledger = await buffer.ledger()
    assert (ledger.finished, ledger.duplicates_refused) == (1, 1)


async def test_a_put_for_a_group_that_was_trained_and_forgotten_is_late(backend):
    buffer = backend.make()
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, N * G))
    pool = await buffer.claim(0)
    await buffer.commit(pool, pool.trajectories, MethodState(fields={"phase": 0}))
    await buffer.checkpoint(1)
    assert await buffer.put(make_trajectory(0, 0)) == "late"
    assert (await buffer.ledger()).late_refused == 1


async def test_a_put_without_a_ticket_is_late(backend):
    buffer = backend.make()
    await start(buffer)
    assert await buffer.put(make_trajectory(77, 0)) == "late"


async def test_a_group_is_granted_only_as_a_whole(backend):
    buffer = backend.make()
    await start(buffer)
    assert await buffer.admit("w", 0, G - 1) == []
    assert await buffer.admit("w", 0, 2 * G + 1) == [
        RolloutSlot(0, 0),
        RolloutSlot(0, 1),
        RolloutSlot(1, 0),
        RolloutSlot(1, 1),
    ]


async def test_an_expired_lease_passes_to_another_worker_without_what_is_there(backend):
    buffer = backend.make()
    await start(buffer)
    assert RolloutSlot(0, 1) in await buffer.admit("dead", 0, G)
    assert await buffer.put(make_trajectory(0, 0)) == "stored"
    assert RolloutSlot(0, 1) not in await buffer.admit("alive", 0, G)
    await backend.expire_leases()
    assert (await buffer.admit("alive", 0, G))[0] == RolloutSlot(0, 1)
    assert (await buffer.ledger()).requeued >= 1


async def test_a_heartbeat_keeps_a_lease(backend):
    buffer = backend.make()
    await start(buffer)
    await buffer.admit("w", 0, G)
    await backend.expire_leases()
    await buffer.heartbeat("w", [0], WorkerStatus())
    assert RolloutSlot(0, 0) not in await buffer.admit("other", 0, G)


async def test_after_the_last_attempt_a_group_closes_short_and_its_pool_goes_on(backend):
    buffer = backend.make(max_attempts=2, max_staleness=0)
    await start(buffer)
    slots = await buffer.admit("w", 0, N * G)
    await fill(buffer, [p for p in slots if p != RolloutSlot(2, 1)])
    await buffer.release("w", [2], failed=True)
    assert await buffer.claim(0) is None
    assert await buffer.admit("v", 0, G) == [RolloutSlot(2, 1)]
    await backend.expire_leases()
    assert await buffer.admit("v", 0, G) == []
    ledger = await buffer.ledger()
    assert (ledger.incomplete_groups, ledger.failed_rollouts, ledger.requeued) == (1, 1, 1)
    assert await buffer.put(make_trajectory(2, 1)) == "late"
    pool = await buffer.claim(0)
    assert "2:1" not in [t.id for t in pool]
    assert len(pool) == N * G - 1
    await buffer.commit(pool, pool.trajectories[:1])
    assert (await buffer.ledger()).closes


async def test_bytes_are_bounded_as_trajectories_are(backend):
    buffer = backend.make(limit_bytes=1)
    await start(buffer)
    await buffer.admit("w", 0, 2 * N * G)
    await fill(buffer, [RolloutSlot(N, 0)])
    assert await buffer.put(make_trajectory(N, 1)) == "full"
    await fill(buffer, [RolloutSlot(t, r) for t in range(N) for r in range(G)])
    assert (await buffer.ledger()).bytes > 1


async def test_a_resent_put_is_stored_and_not_refused(backend):
    buffer = backend.make()
    await start(buffer)
    await buffer.admit("w", 0, G)
    assert [await buffer.put(make_trajectory(0, 0)) for _ in range(2)] == ["stored", "stored"]
    ledger = await buffer.ledger()
    assert (ledger.finished, ledger.duplicates_refused) == (1, 0)


async def test_a_trajectory_longer_than_any_episode_is_refused_by_name(backend):
    buffer = backend.make(max_tokens=8)
    await start(buffer)
    with pytest.raises(InvalidTrajectory, match="trajectory 0:0: token_ids must be at most 8, got 9"):
        await buffer.put(make_trajectory(0, 0))


async def test_a_ticket_given_back_is_granted_again_at_once(backend):
    buffer = backend.make()
    await start(buffer)
    await buffer.admit("w", 0, G)
    await buffer.release("w", [0], failed=False)
    assert await buffer.admit("other", 0, G) == [RolloutSlot(0, 0), RolloutSlot(0, 1)]


async def test_a_worker_cannot_renew_what_was_passed_on(backend):
    buffer = backend.make()
    await start(buffer)
    await buffer.admit("first", 0, G)
    await buffer.release("first", [0], failed=False)
    await buffer.admit("second", 0, G)
    await buffer.release("first", [0], failed=False)
    assert RolloutSlot(0, 0) not in await buffer.admit("third", 0, G)


async def test_a_full_buffer_refuses_all_but_the_pool_that_is_waited_for(backend):
    buffer = backend.make(limit=G)
    await start(buffer)
    slots = await buffer.admit("w", 0, 2 * N * G)
    later = [slot for slot in slots if slot.ticket >= N]
    await fill(buffer, later[:G])
    assert await buffer.put(make_trajectory(later[G].ticket, later[G].rollout)) == "full"
    await fill(buffer, [slot for slot in slots if slot.ticket < N])
    assert (await buffer.ledger()).finished == G + N * G


async def test_a_buffer_is_full_when_it_holds_just_as_many_bytes_as_it_may(backend):
    held = len(codec.encode(make_trajectory(N)))
    buffer = backend.make(limit_bytes=held)
    await start(buffer)
    await buffer.admit("w", 0, 2 * N * G)
    await fill(buffer, [RolloutSlot(N, 0)])
    assert (await buffer.ledger()).bytes == held
    assert await buffer.put(make_trajectory(N + 1)) == "full"


async def test_a_requeued_ticket_keeps_the_staleness_bound(backend):
    """Version 1 opens ticket 4; a worker that still has version 0 must not get it when it comes back."""
    buffer = backend.make(max_staleness=0)
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, N * G))
    pool = await buffer.claim(0)
    await buffer.commit(pool, pool.trajectories)
    await buffer.announce(1, "v000001-e1")
    assert await buffer.admit("new", 1, G) == [RolloutSlot(4, 0), RolloutSlot(4, 1)]
    await buffer.release("new", [4], failed=False)
    assert await buffer.admit("old", 0, G) == []
    assert await buffer.admit("new", 1, G) == [RolloutSlot(4, 0), RolloutSlot(4, 1)]


async def test_a_requeued_ticket_waits_until_there_is_room_for_it_and_nothing_passes_it(backend):
    buffer = backend.make(rollouts=3)
    await start(buffer)
    await buffer.admit("w", 0, 3)
    await buffer.put(make_trajectory(0, 1))
    await buffer.release("w", [0], failed=False)
    assert await buffer.admit("v", 0, 1) == []
    assert await buffer.admit("v", 0, 2) == [RolloutSlot(0, 0), RolloutSlot(0, 2)]


async def test_a_rollout_that_its_group_does_not_have_is_refused(backend):
    buffer = backend.make()
    await start(buffer)
    await buffer.admit("w", 0, G)
    assert await buffer.put(make_trajectory(0, G)) == "late"
    assert (await buffer.ledger()).finished == 0


@pytest.mark.parametrize("token", [-1, 100])
async def test_a_token_outside_the_vocabulary_is_refused_at_the_put(backend, token):
    buffer = backend.make(vocab_size=100)
    await start(buffer)
    await buffer.admit("w", 0, G)
    tokens = np.array([1, 2, 3, 4, 5, 6, 7, token, 9], np.int32)
    with pytest.raises(InvalidTrajectory, match=rf"token ids must be at least 0 and below 100 .*, got {token}"):
        await buffer.put(make_trajectory(0, 0, token_ids=tokens))
