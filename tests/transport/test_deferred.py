"""pool.order = "deferred", and hedging, on both buffers. `test_state_machine.py` interleaves them with all else."""

from __future__ import annotations

import numpy as np
import pytest

from cusearch_async.errors import BufferLost
from cusearch_async.transport.interface import RolloutSlot, WorkerStatus
from tests.strategies import make_trajectory
from tests.transport.filling import G, N, fill, group, recovered, started, train

D = 2


def deferred(**limits):
    return {"order": "deferred", "defer": D, **limits}


def slots_of(version: int):
    return {"versions": np.full(4, version, np.int32)}


async def run_granted(buffer, step: int, *but: int) -> None:
    """Run all that is granted at `step`, but for these tickets."""
    slots = await buffer.admit("w", step, 4 * N * G)
    await fill(buffer, [slot for slot in slots if slot.ticket not in but], **slots_of(step))


async def with_a_straggler(backend, **limits):
    """At step 2, where ticket 1 is still running and nobody has waited for it; the pools before had the others."""
    buffer = await started(backend, **deferred(**limits))
    for step in range(D):
        await run_granted(buffer, step, 1)
        pool = await train(buffer, step)
        assert {t.ticket for t in pool} == set(range(step * N + (step > 0), (step + 1) * N + 1)) - {1}
        await buffer.announce(step + 1, f"v{step + 1:06d}-e1")
    return buffer


async def test_a_group_misses_as_many_pools_as_it_may_and_is_then_waited_for(backend):
    buffer = await with_a_straggler(backend)
    await run_granted(buffer, D, 1)
    queues = await buffer.queues(D)
    assert (queues.ready_of_pool, queues.ready >= N) == (N - 1, True), "one of the due lacks"
    assert await buffer.claim(D) is None
    await fill(buffer, group(1))
    assert (await buffer.queues(D)).ready_of_pool == N
    assert {t.ticket for t in await buffer.claim(D)} == {1, 9, 10, 11}


async def test_the_run_ends_with_every_ticket_of_its_steps_and_no_other(backend):
    buffer, trained = await started(backend, **deferred(steps=3)), []
    for step in range(3):
        await run_granted(buffer, step, *([] if step == 2 else [4 * step]))
        if step == 2:
            await fill(buffer, group(0, 4))
        trained += [t.ticket for t in await train(buffer, step)]
        await buffer.announce(step + 1, f"v{step + 1:06d}-e1")
    assert sorted(trained) == sorted(list(range(3 * N)) * G)
    assert await buffer.admit("w", 3, N * G) == []


async def test_the_bound_holds_for_whatever_a_worker_sends(backend):
    buffer = await started(backend, **deferred(max_staleness=0))
    for step in range(3):
        await run_granted(buffer, step)
        await train(buffer, step)
        await buffer.announce(step + 1, f"v{step + 1:06d}-e1")
    slots = await buffer.admit("w", 3, N * G)
    await fill(buffer, slots[:G], **slots_of(0))
    await fill(buffer, slots[G:], **slots_of(3 - D))
    assert await buffer.claim(3) is None
    reasons = await backend.quarantined()
    assert set(reasons) == {"12:0", "12:1"}
    assert "staleness 3 at step 3, pool.max_staleness is 0, pool.defer 2" in reasons["12:0"]


async def test_the_next_learner_gets_the_same_pools_and_trains_no_ticket_twice(backend):
    learner = await with_a_straggler(backend)
    first = [{t.id for t in await learner.claim(D) or []}]
    assert first == [set()]
    heir = await recovered(backend, **deferred())
    for step in range(D):
        pool = await train(heir, step)
        assert {t.ticket for t in pool} == set(range(step * N + (step > 0), (step + 1) * N + 1)) - {1}
    await heir.announce(D, "v000002-e2")
    await run_granted(heir, D, 1)
    await fill(heir, group(1))
    assert {t.ticket for t in await heir.claim(D)} == {1, 9, 10, 11}


async def test_after_a_checkpoint_the_tickets_trained_ahead_are_still_known(backend):
    learner = await with_a_straggler(backend)
    await learner.checkpoint(D)
    assert await learner.claim(D) is None
    heir = await recovered(backend, step=D, **deferred())
    await heir.announce(D, "v000002-e2")
    assert await heir.admit("w", D, 4 * N * G) == group(12, 13, 14, 15), "not 8, which step 1 has trained"
    await fill(heir, group(1, 12, 13, 14, 15))
    assert 8 not in {t.ticket for t in await heir.claim(D) or []}


async def test_a_pool_that_redis_lost_is_generated_again_with_the_same_tickets(backend):
    """The step must not take others instead: the pools behind it are kept, and have taken them."""
    learner = await with_a_straggler(backend)
    for step in range(D):
        ids = [f"{ticket}:{rollout}" for ticket in [[0, 2, 3, 4], []][step] for rollout in range(G)]
        await backend.vanish(*ids)
    assert await learner.claim(D) is None
    heir = await recovered(backend, **deferred())
    assert len(await heir.claim(0)) == 0, "it is known to be empty"
    heir = await recovered(backend, **deferred())
    assert await heir.claim(0) is None
    await heir.announce(0, "v000000-e3")
    assert await heir.admit("v", 0, 8 * G) == group(0, 2, 3, 4)
    await fill(heir, group(3, 2, 1, 0))
    assert await heir.claim(0) is None, "1 was not in it"
    await fill(heir, group(4))
    assert {t.ticket for t in await train(heir, 0)} == {0, 2, 3, 4}
    assert {t.ticket for t in await train(heir, 1)} == {5, 6, 7, 8}


async def test_a_worker_whose_room_is_too_small_for_a_group_hedges_nothing(backend):
    """Redis gave it what another worker ran, though new tickets were there."""
    buffer = await started(backend, hedge_s=1e12)
    slow = await buffer.admit("slow", 0, 2 * G)
    await fill(buffer, slow[:1])
    await backend.age_leases()
    assert await buffer.admit("busy", 0, G + 1) == group(2)


async def test_a_worker_with_nothing_to_do_runs_what_an_old_lease_lacks_once(backend):
    buffer = await started(backend, hedge_s=1e12, max_staleness=0)
    slow = await buffer.admit("slow", 0, N * G)
    await fill(buffer, slow[:1])
    assert await buffer.admit("idle", 0, N * G) == []
    await backend.age_leases()
    assert await buffer.admit("slow", 0, N * G) == [], "its own"
    assert await buffer.admit("idle", 0, 3) == [RolloutSlot(0, 1), *group(1)]
    assert await buffer.admit("another", 0, 3) == group(2), "what is hedged is not old"
    assert (await buffer.ledger()).hedged_rollouts == 5
    await fill(buffer, [RolloutSlot(0, 1)], worker="idle")
    assert await buffer.admit("third", 0, N * G) == group(3)
    outcome = await buffer.put(make_trajectory(0, 1, worker="slow"))
    assert outcome == "duplicate"
    assert (await buffer.queues(0)).ready == 1


async def test_a_hedge_that_is_old_is_hedged_too_by_a_third_worker(backend):
    """Before, a pool waited for a hedge that hung."""
    buffer = await started(backend, hedge_s=1e12, max_staleness=0, questions=2)
    await buffer.admit("slow", 0, 2 * G)
    await backend.age_leases()
    assert await buffer.admit("hangs", 0, G) == group(0)
    assert await buffer.admit("third", 0, 2 * G) == group(1)
    await backend.age_leases()
    assert await buffer.admit("hangs", 0, 2 * G) == group(1), "it runs the other itself"
    assert await buffer.admit("slow", 0, 2 * G) == []
    assert await buffer.admit("third", 0, 2 * G) == group(0)
    assert await buffer.admit("fourth", 0, 2 * G) == []
    assert (await buffer.ledger()).hedged_rollouts == 4 * G


async def test_a_worker_hears_which_of_its_groups_others_have_finished(backend):
    buffer = await started(backend, hedge_s=1e12, max_staleness=0)
    slots = await buffer.admit("slow", 0, 4 * G)
    await fill(buffer, slots[: G + 1], worker="fast")
    assert await buffer.heartbeat("slow", [0, 1, 2], WorkerStatus()) == [0]
    await backend.expire_leases()
    await buffer.admit("third", 0, G)
    assert await buffer.heartbeat("slow", [1, 2, 3], WorkerStatus()) == [], "they take its trajectories still"
    await fill(buffer, slots[G + 1 :])
    await train(buffer, 0)
    assert await buffer.heartbeat("slow", [0, 3], WorkerStatus()) == [0, 3]


@pytest.mark.parametrize("how", ["fails", "leaves", "dies"])
async def test_who_hedges_a_ticket_gets_its_lease_when_its_worker_gives_it_up(backend, how):
    """Before, it was granted what it was running already, and what it ran twice came late."""
    buffer = await started(backend, hedge_s=1e12, max_staleness=0, questions=1)
    await buffer.admit("slow", 0, G)
    await backend.age_leases()
    assert await buffer.admit("fast", 0, G) == group(0)
    if how == "dies":
        await backend.expire_leases()
    else:
        await buffer.release("slow", [0], failed=how == "fails")
    assert await buffer.admit("fast", 0, G) == []
    queues = await buffer.queues(0)
    assert (queues.leased, queues.requeued) == (1, 0)
    await buffer.release("slow", [0], failed=False)
    await buffer.release("fast", [0], failed=False)
    assert await buffer.admit("third", 0, G) == group(0)


async def test_what_another_worker_has_hedged_is_hedged_at_once_if_it_leaves(backend):
    buffer = await started(backend, hedge_s=1e12, max_staleness=0, questions=1)
    await buffer.admit("slow", 0, G)
    await backend.age_leases()
    assert await buffer.admit("idle", 0, G) == group(0)
    await buffer.leave("idle", [0])
    assert await buffer.admit("other", 0, G) == group(0)
    await buffer.release("other", [0], failed=True)
    assert await buffer.admit("third", 0, G) == [], "a group that fails is not tried by all"
    await backend.age_leases()
    assert await buffer.admit("third", 0, G) == group(0)
    assert (await buffer.queues(0)).leased == 1


async def test_only_pools_that_are_near_are_hedged(backend):
    buffer = await started(backend, hedge_s=1e12, max_staleness=5)
    await buffer.admit("slow", 0, 6 * N * G)
    await backend.age_leases()
    assert await buffer.admit("idle", 0, 9 * N * G) == group(*range(2 * N))


async def test_without_the_setting_nothing_is_hedged(backend):
    buffer = await started(backend, max_staleness=0)
    await buffer.admit("slow", 0, N * G)
    await backend.age_leases()
    assert await buffer.admit("idle", 0, N * G) == []


async def test_a_redis_that_has_lost_what_was_taken_stops_the_learner_and_the_next_one_repairs_it(redis_backend):
    learner = await with_a_straggler(redis_backend)
    await learner.checkpoint(D)
    await run_granted(learner, D, 1)
    await redis_backend.client.delete(redis_backend.keys.taken)
    with pytest.raises(BufferLost, match="taken"):
        await learner.claim(D)
    heir = await recovered(redis_backend, step=D, **deferred())
    assert (await heir.audit()).findings == ()
    await heir.announce(D, "v000002-e2")
    await fill(heir, await heir.admit("v", D, 9 * G), **slots_of(D))
    assert 8 not in {t.ticket for t in await heir.claim(D) or []}
    await fill(heir, group(1), **slots_of(D))
    assert {t.ticket for t in await heir.claim(D)} == {1, 9, 10, 11}


async def test_a_ticket_that_is_nowhere_is_generated_again_though_it_is_not_known_which_it_is(redis_backend):
    learner, keys = await with_a_straggler(redis_backend), redis_backend.keys
    await learner.checkpoint(D)
    await redis_backend.client.delete(keys.taken)
    await redis_backend.client.zrem(keys.lease, 1)
    await redis_backend.client.hdel(keys.owner, 1)
    heir = await recovered(redis_backend, step=D, **deferred())
    assert (await heir.queues(D)).requeued == 1


async def test_a_new_redis_begins_behind_the_checkpoint(redis_backend):
    learner = await with_a_straggler(redis_backend)
    await learner.checkpoint(D)
    await redis_backend.forget_everything()
    heir = await recovered(redis_backend, step=D, **deferred())
    await heir.announce(D, "v000002-e2")
    await run_on(heir, D, steps=3)


async def run_on(buffer, step: int, steps: int) -> None:
    seen = set()
    for now in range(step, step + steps):
        await run_granted(buffer, now)
        tickets = {t.ticket for t in await train(buffer, now)}
        assert len(tickets) == N
        assert not tickets & seen
        seen |= tickets
        await buffer.announce(now + 1, f"v{now + 1:06d}-e2")
    assert min(seen) >= step * N
