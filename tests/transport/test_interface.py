"""What every buffer must do for workers, on both buffers: admission, leases, what is put."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from cusearch_async.errors import InvalidTrajectory
from cusearch_async.transport import codec
from cusearch_async.transport.interface import MethodState, RolloutSlot, WorkerStatus
from tests.strategies import make_trajectory
from tests.transport.filling import G, N, fill, filled, group, recovered, start, started, train


async def test_tickets_come_in_order_each_as_a_whole_once_weights_are_announced(backend):
    buffer = await recovered(backend)
    assert await buffer.admit("w", 0, 8 * G) == []
    await start(buffer)
    assert await buffer.admit("w", 0, G - 1) == []
    assert await buffer.admit("w", 0, 2 * G + 1) == group(0, 1)
    assert await buffer.admit("w", 0, G) == group(2)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_admission_stops_at_the_staleness_bound(backend, max_staleness):
    buffer = await started(backend, max_staleness=max_staleness)
    slots = await buffer.admit("w", 0, 1000)
    assert len({slot.ticket for slot in slots}) == (max_staleness + 1) * N
    assert await buffer.admit("w", 0, G) == []
    assert await buffer.admit("w", 5, G) == [], "a version that was never announced grants nothing"


async def test_no_ticket_is_granted_beyond_the_steps_of_the_run_until_it_gets_more(backend):
    worker = await started(backend, max_staleness=3, steps=2)
    assert {slot.ticket for slot in await worker.admit("w", 0, 1000)} == set(range(2 * N))
    assert await worker.admit("w", 0, 1000) == []
    await start(backend.make(max_staleness=3, steps=3))
    assert {slot.ticket for slot in await worker.admit("w", 0, 1000)} == set(range(2 * N, 3 * N))


async def test_in_the_order_of_completion_more_tickets_are_granted_than_the_run_has_pools(backend):
    buffer = await started(backend, max_staleness=1, steps=1, order="oldest_complete")
    assert len({slot.ticket for slot in await buffer.admit("w", 0, 1000)}) == 2 * N


async def test_newer_weights_open_the_next_tickets(backend):
    buffer = await filled(backend, max_staleness=0)
    await train(buffer, selected=3, method=MethodState(fields={"phase": 0}))
    await buffer.announce(1, "v000001-e1")
    assert await buffer.admit("w", 0, N * G) == [], "the worker still has the old weights"
    assert {slot.ticket for slot in await buffer.admit("w", 1, N * G)} == {4, 5, 6, 7}


async def test_two_workers_never_get_the_same_ticket(backend):
    await started(backend, max_staleness=10)
    workers = [backend.make(max_staleness=10) for _ in range(12)]
    grants = await asyncio.gather(*(worker.admit(f"w{i}", 0, 3 * G) for i, worker in enumerate(workers)))
    slots = [slot for grant in grants for slot in grant]
    assert len(slots) == len(set(slots)) == 12 * 3 * G


async def test_a_trajectory_lies_in_the_bucket_of_its_depth(backend):
    buffer = await started(backend)
    slots = await buffer.admit("w", 0, 3 * G)
    for depth, slot in enumerate(slots):
        await buffer.put(make_trajectory(slot.ticket, slot.rollout, depth=depth))
    assert await buffer.capacities() == [1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 6}, "depth must be at most 5, got 6"),
        ({"sampled": 6}, "a row.s token_ids must be at most 9, got 11"),
        ({"token_ids": np.array([1, 2, 3, 4, 5, 6, 7, -1, 9])}, "token ids must be at least 0 .*, got -1"),
        ({"token_ids": np.array([1, 2, 3, 4, 5, 6, 7, 100, 9])}, "token ids must be .* below 100 .*, got 100"),
    ],
)
async def test_a_trajectory_outside_the_limits_is_refused_by_name_at_the_put(backend, changes, message):
    buffer = await started(backend, max_tokens=9, vocab_size=100)
    await buffer.admit("w", 0, G)
    with pytest.raises(InvalidTrajectory, match=f"trajectory 0:1: {message}"):
        await buffer.put(make_trajectory(0, 1, **changes))
    assert (await buffer.ledger()).finished == 0


async def test_a_resent_put_is_stored_and_another_of_the_same_rollout_is_refused(backend):
    buffer = await started(backend)
    await buffer.admit("w", 0, G)
    assert [await buffer.put(make_trajectory(0, 0)) for _ in range(2)] == ["stored", "stored"]
    assert await buffer.put(make_trajectory(0, 0, reward=0.0)) == "duplicate"
    ledger = await buffer.ledger()
    assert (ledger.finished, ledger.duplicates_refused) == (1, 1)


async def test_a_put_that_no_open_group_has_room_for_is_late(backend):
    buffer = await filled(backend)
    await train(buffer)
    await buffer.checkpoint(1)
    await buffer.admit("w", 0, G)
    for trajectory in (make_trajectory(0, 0), make_trajectory(77, 0), make_trajectory(N, G)):
        assert await buffer.put(trajectory) == "late", "forgotten, not granted, not of its group"
    ledger = await buffer.ledger()
    assert (ledger.late_refused, ledger.finished) == (3, N * G)


async def test_an_expired_lease_passes_to_another_worker_without_what_is_there(backend):
    buffer = await started(backend)
    assert RolloutSlot(0, 1) in await buffer.admit("dead", 0, G)
    assert await buffer.put(make_trajectory(0, 0)) == "stored"
    assert RolloutSlot(0, 1) not in await buffer.admit("alive", 0, G)
    await backend.expire_leases()
    assert (await buffer.admit("alive", 0, G))[0] == RolloutSlot(0, 1)
    assert (await buffer.ledger()).requeued >= 1


async def test_a_heartbeat_keeps_a_lease(backend):
    buffer = await started(backend)
    await buffer.admit("w", 0, G)
    await backend.expire_leases()
    await buffer.heartbeat("w", [0], WorkerStatus())
    assert RolloutSlot(0, 0) not in await buffer.admit("other", 0, G)


async def test_after_the_last_attempt_a_group_closes_short_and_its_pool_continues(backend):
    buffer = await started(backend, max_attempts=2, max_staleness=0)
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


async def test_a_buffer_is_full_with_its_bytes_but_for_the_pool_that_is_waited_for(backend):
    held = len(codec.encode(make_trajectory(N)))
    buffer = await started(backend, limit_bytes=held)
    await buffer.admit("w", 0, 2 * N * G)
    await fill(buffer, [RolloutSlot(N, 0)])
    assert (await buffer.ledger()).bytes == held
    assert await buffer.put(make_trajectory(N + 1)) == "full"
    await fill(buffer, group(*range(N)))
    assert (await buffer.ledger()).bytes > held


async def test_a_released_ticket_is_granted_again_and_its_first_worker_cannot_release_it_twice(backend):
    buffer = await started(backend)
    await buffer.admit("first", 0, G)
    await buffer.release("first", [0], failed=False)
    assert await buffer.admit("second", 0, G) == group(0)
    await buffer.release("first", [0], failed=False)
    assert RolloutSlot(0, 0) not in await buffer.admit("third", 0, G)


async def test_a_full_buffer_refuses_all_but_the_pool_that_is_waited_for(backend):
    buffer = await started(backend, limit=G)
    slots = await buffer.admit("w", 0, 2 * N * G)
    later = [slot for slot in slots if slot.ticket >= N]
    await fill(buffer, later[:G])
    assert await buffer.put(make_trajectory(later[G].ticket, later[G].rollout)) == "full"
    await fill(buffer, [slot for slot in slots if slot.ticket < N])
    assert (await buffer.ledger()).finished == G + N * G


async def test_a_requeued_ticket_keeps_the_staleness_bound(backend):
    """Version 1 opens ticket 4; a worker that still has version 0 must not get it when it comes back."""
    buffer = await filled(backend, max_staleness=0)
    await train(buffer)
    await buffer.announce(1, "v000001-e1")
    assert await buffer.admit("new", 1, G) == group(4)
    await buffer.release("new", [4], failed=False)
    assert await buffer.admit("old", 0, G) == []
    assert await buffer.admit("new", 1, G) == group(4)


async def test_a_requeued_ticket_waits_until_there_is_room_for_it_and_nothing_passes_it(backend):
    buffer = await started(backend, rollouts=3)
    await buffer.admit("w", 0, 3)
    await buffer.put(make_trajectory(0, 1))
    await buffer.release("w", [0], failed=False)
    assert await buffer.admit("v", 0, 1) == []
    assert await buffer.admit("v", 0, 2) == [RolloutSlot(0, 0), RolloutSlot(0, 2)]


async def test_the_memory_of_the_server_is_told(backend):
    buffer = backend.make()
    used, limit = await buffer.server_memory()
    assert used >= 0
    assert limit == 0, "no maxmemory is set"
