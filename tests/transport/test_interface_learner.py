"""What every buffer must do for learners, on both buffers: claims, commits, recovery, fencing."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from msgspec.structs import replace

from cusearch_async.errors import BufferLost, ConfigError, Fenced
from cusearch_async.transport.interface import ALIVE_S, LearnerStatus, MethodState, RolloutSlot
from cusearch_async.types import Pool
from tests.transport.filling import G, N, all_raise, fill, filled, group, recovered, start, started, train


async def test_a_pool_is_claimed_whole_or_not_at_all_and_again_the_same(backend):
    buffer = await started(backend)
    slots = await buffer.admit("w", 0, N * G)
    await fill(buffer, slots[:-1])
    assert await buffer.claim(0) is None
    await fill(buffer, slots[-1:])
    for _ in range(2):
        assert [(t.ticket, t.rollout) for t in await buffer.claim(0)] == [(t, r) for t in range(N) for r in range(G)]
    assert await buffer.capacities() == [0] * 6
    assert (await buffer.ledger()).claimed == N * G


async def test_a_claim_that_waits_leaves_alone_what_is_not_granted_yet(backend):
    buffer = await started(backend)
    await buffer.admit("w", 0, G)
    assert await buffer.claim(0) is None
    assert [slot.ticket for slot in await buffer.admit("w", 0, N * G)] == [1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("order", ["ticket", "oldest_complete"])
async def test_ticket_order_waits_for_a_straggler_and_oldest_complete_does_not(backend, order):
    buffer = await started(backend, order=order)
    slots = await buffer.admit("w", 0, 2 * N * G)
    await fill(buffer, [slot for slot in slots if slot.ticket != 0])
    pool = await buffer.claim(0)
    assert pool is None if order == "ticket" else {t.ticket for t in pool} == {1, 2, 3, 4}


async def test_commit_moves_step_phase_version_and_ledger_at_once_and_only_once(backend):
    buffer = await filled(backend)
    pool = await train(buffer, selected=3, method=MethodState(fields={"phase": 2}))
    await buffer.commit(pool, pool.trajectories[:2], MethodState(fields={"phase": 4}))
    state, ledger = await buffer.state(), await buffer.ledger()
    assert (state.step, state.fields) == (1, {"phase": 2})
    assert (ledger.trained, ledger.unselected, ledger.claimed, ledger.buffered) == (3, 5, 0, 0)
    assert ledger.closes


async def test_an_older_learner_is_fenced_off(backend):
    old, new = await started(backend), backend.make()
    await fill(old, await old.admit("w", 0, N * G))
    pool = await old.claim(0)
    await new.recover(0)
    commit = old.commit(pool, pool.trajectories)
    await all_raise(Fenced, old.claim(0), commit, old.announce(1, "x"), old.checkpoint(1), old.finish())
    assert await new.claim(0) is not None


async def test_recovery_gives_every_later_step_its_pool_again(backend):
    buffer = await filled(backend, max_staleness=3, pools=3)
    pools = [await train(buffer, step, selected=4) for step in range(3)]
    await buffer.checkpoint(1)
    resumed = await recovered(backend, max_staleness=3, step=1)
    ledger = await resumed.ledger()
    assert (ledger.trained, ledger.claimed, ledger.closes) == (4, 2 * N * G, True)
    for step in (1, 2):
        assert [t.id for t in await train(resumed, step, selected=4)] == [t.id for t in pools[step]]


async def test_a_commit_gives_coming_groups_their_size_and_keeps_what_the_method_remembers(backend):
    """Of the tickets that version 1 opens, 8 gets three rollouts and 9 gets one; the others have G."""
    buffer = await filled(backend, pools=2)
    await train(buffer, method=MethodState(memory='{"a": "\u00e9\n"}', sizes={8: 3, 9: 1}))
    await buffer.announce(1, "v000001-e1")
    opened = await buffer.admit("w", 1, 3 + 1 + G)
    assert opened == [*group(8), RolloutSlot(8, 2), RolloutSlot(9, 0), *group(10)]
    assert await backend.memory() == '{"a": "\u00e9\n"}'


async def test_a_commit_leaves_the_size_of_what_is_granted(backend):
    """Tickets 0 to 7 are granted, which version 0 opens."""
    buffer = await filled(backend, pools=2)
    await train(buffer, method=MethodState(sizes={5: 4, 7: 3, 8: 1}))
    assert await backend.sizes() == {8: 1}
    assert len(await train(buffer, step=1, method=MethodState(sizes={8: 3, 9: 3}))) == N * G
    assert await backend.sizes() == {8: 1, 9: 3}, "nor of what has one, as a recovery plans it again"


async def test_groups_of_any_size_are_claimed_whole_and_their_sizes_go_with_them(backend):
    buffer = backend.make(max_staleness=0)
    await buffer.recover(0, MethodState(sizes={0: 3, 1: 1}))
    await buffer.announce(0, "v000000-e1")
    slots = await buffer.admit("w", 0, 100)
    assert [p.ticket for p in slots] == [0, 0, 0, 1, 2, 2, 3, 3]
    await fill(buffer, [p for p in slots if p != RolloutSlot(0, 2)])
    assert await buffer.claim(0) is None, "ticket 0 has a third rollout to come"
    await fill(buffer, [RolloutSlot(0, 2)])
    pool = await buffer.claim(0)
    assert [(t.ticket, t.rollout) for t in pool] == [(p.ticket, p.rollout) for p in slots]
    await buffer.commit(pool, pool.trajectories, MethodState(sizes={4: 2}))
    await buffer.checkpoint(1)
    assert await backend.sizes() == {4: 2}
    assert (await buffer.ledger()).closes


async def test_the_state_has_the_step_from_which_its_learner_began(backend):
    """An evaluator tells by it which scores of earlier learners count."""
    buffer = await filled(backend, pools=3)
    assert (await buffer.state()).resumed == 0
    for step in range(2):
        await train(buffer, step=step)
    heir = backend.make()
    await heir.recover(1)
    assert (await heir.state()).resumed == 1
    await train(heir, step=1)
    state = await heir.state()
    assert (state.step, state.resumed) == (2, 1)


async def test_a_group_keeps_its_first_size_and_recovery_brings_the_memory_back(backend):
    buffer = backend.make()
    await buffer.recover(0, MethodState(memory="gone", fields={"gone": 1}, sizes={5: 4}))
    resumed = backend.make()
    await resumed.recover(0, MethodState(memory="kept", fields={"phase": 2, "share": 0.25}, sizes={5: 1, 6: 3}))
    assert await backend.memory() == "kept"
    assert await backend.sizes() == {5: 4, 6: 3}
    assert (await resumed.state()).fields == {"phase": 2, "share": 0.25}


async def test_a_recovery_gives_a_ticket_that_was_granted_no_other_size(backend):
    """A learner may plan with a smaller staleness bound than the tickets were granted under."""
    buffer = await started(backend)
    await fill(buffer, await buffer.admit("w", 0, G))
    heir = backend.make()
    await heir.recover(0, MethodState(sizes={0: 3, 1: 3}))
    assert await backend.sizes() == {1: 3}
    assert (await heir.audit()).closes


@pytest.mark.parametrize("name", ["step", "paused", "next_ticket", "run_id", "two words", "phase"])
def test_a_method_shows_finite_numbers_under_its_own_names(name):
    value = math.nan if name == "phase" else 1
    with pytest.raises(ValueError, match=f"{name!r}|must be finite, {name} is nan"):
        MethodState(fields={name: value})


async def test_recovery_before_forgotten_pools_is_refused(backend):
    buffer = await filled(backend)
    await train(buffer)
    await buffer.checkpoint(1)
    with pytest.raises(ConfigError, match="forgotten"):
        await buffer.recover(0)


async def test_a_pool_of_which_nothing_is_left_is_empty(backend):
    buffer = await started(backend, max_attempts=1, max_staleness=0)
    await buffer.admit("w", 0, N * G)
    await buffer.release("w", [0, 1, 2, 3], failed=True)
    pool = await buffer.claim(0)
    assert len(pool) == len(await buffer.claim(0)) == 0
    await buffer.commit(pool, [])
    await buffer.announce(1, "v000001-e1")
    assert (await buffer.state()).step == 1
    assert (await buffer.admit("w", 1, G))[0] == RolloutSlot(4, 0)


@pytest.mark.parametrize("until", ["ready", "claimed", "committed"])
async def test_the_next_learner_has_groups_without_any_success_generated_again(backend, until):
    """What failed them all, like a reward with an error, may be fixed now. A group with one success stays closed."""
    buffer = await started(backend, max_attempts=2, max_staleness=1)
    for _ in range(2):
        slots = await buffer.admit("w", 0, 2 * N * G)
        await fill(buffer, [slot for slot in slots if (slot.ticket, slot.rollout) == (N, 0)])
        await buffer.release("w", sorted({slot.ticket for slot in slots}), failed=True)
    if until != "ready":
        pool = await buffer.claim(0)
    if until == "committed":
        await buffer.commit(pool, [])
    heir = await recovered(backend, max_attempts=2, max_staleness=1)
    await heir.announce(0, "v000000-e2")
    assert await heir.claim(0) is None
    assert (await heir.ledger()).incomplete_groups == 1, "of ticket N"
    slots = await heir.admit("w", 0, 2 * N * G)
    assert {slot.ticket for slot in slots} == {*range(2 * N)} - {N}
    await heir.release("w", [0], failed=True)
    assert (await heir.ledger()).incomplete_groups == 1, "its attempts are counted from the start"
    slots += await heir.admit("w", 0, G)
    await fill(heir, slots)
    assert len(await heir.claim(0)) == N * G
    assert (await heir.audit()).closes
    assert (await heir.ledger()).closes


async def test_a_pool_behind_others_that_were_dissolved_is_found_by_every_later_learner(backend):
    """In pools 0 and 1 no episode has succeeded, so the next learner has them generated again; pool 2 stays. Learners
    that are killed before the first claim find it all the same."""
    buffer = await started(backend, max_attempts=1, max_staleness=2)
    slots = await buffer.admit("w", 0, 3 * N * G)
    await buffer.release("w", list(range(2 * N)), failed=True)
    await fill(buffer, [slot for slot in slots if slot.ticket >= 2 * N])
    for step in (0, 1):
        await buffer.commit(await buffer.claim(step), [])
    kept = await train(buffer, step=2)
    for _ in range(2):
        heir = await recovered(backend, max_attempts=1, max_staleness=2)
        assert (await heir.audit()).findings == ()
    await heir.announce(0, "v000000-e3")
    assert await heir.quarantine("8:0", "by an operator"), "what waits in the pool can be taken out of it"
    slots = await heir.admit("w", 0, 9 * N * G)
    assert {slot.ticket for slot in slots} == set(range(2 * N)), "nothing of pool 2 is generated a second time"
    await fill(heir, slots)
    for step in (0, 1):
        await train(heir, step=step)
    assert [t.id for t in await heir.claim(2)] == [t.id for t in kept][1:]
    assert (await heir.audit()).findings == ()
    assert (await heir.ledger()).closes


async def test_a_commit_of_a_step_that_is_not_the_next_says_that_something_is_lost(backend):
    buffer = await filled(backend, max_staleness=3, pools=2)
    pool = await buffer.claim(0)
    commit = buffer.commit(Pool(1, pool.trajectories), pool.trajectories)
    await all_raise(BufferLost, commit, buffer.claim(1))


async def test_an_epoch_never_goes_back_though_the_buffer_has_forgotten_it(backend):
    buffer = backend.make()
    await buffer.recover(0, least_epoch=7)
    assert buffer.epoch == 8
    heir = backend.make()
    await heir.recover(0, least_epoch=3)
    assert heir.epoch == 9


async def test_a_learner_is_alive_until_it_ends_or_another_takes_over(backend):
    older, newer = backend.make(), backend.make()
    await older.recover(0)
    assert await newer.learner() is None
    status = LearnerStatus(epoch=1, host="a", pid=7, step=3)
    await older.learner_heartbeat(status)
    told = await newer.learner()
    assert replace(told, heartbeat_age_s=0.0) == status
    assert 0 <= told.heartbeat_age_s < ALIVE_S
    await newer.recover(0)
    with pytest.raises(Fenced):
        await older.learner_heartbeat(status)
    await newer.learner_heartbeat(replace(status, epoch=2, pid=8))
    with pytest.raises(Fenced):
        await older.learner_leaves()
    assert (await older.learner()).pid == 8
    await newer.learner_leaves()
    assert await older.learner() is None


async def test_a_run_is_finished_until_the_next_learner_takes_over(backend):
    buffer, worker = backend.make(), backend.make()
    assert not (await worker.state()).is_finished, "there is no run yet"
    await start(buffer)
    assert not (await worker.state()).is_finished
    for _ in range(2):
        await buffer.finish()
        assert (await worker.state()).is_finished
    await recovered(backend)
    assert not (await worker.state()).is_finished
    with pytest.raises(Fenced):
        await buffer.finish()
    assert not (await worker.state()).is_finished


@pytest.mark.parametrize("order", ["ticket", "deferred", "oldest_complete"])
async def test_the_pool_that_is_trained_on_is_told_from_the_one_that_is_waited_for(backend, order):
    buffer = await filled(backend, order=order, pools=2)
    before = await buffer.queues(0)
    assert (before.is_claimed, before.ready_of_pool, before.ready) == (False, N, 2 * N)
    pool = await buffer.claim(0)
    while_training, following = await buffer.queues(0), await buffer.queues(1)
    assert while_training.is_claimed
    assert (following.is_claimed, following.ready_of_pool) == (False, N)
    await buffer.commit(pool, list(pool.trajectories))
    assert (await buffer.queues(0)).is_claimed
    assert not (await buffer.queues(1)).is_claimed


async def test_a_group_that_is_generated_again_keeps_its_size(redis_backend):
    """Redis has lost the list of a pool: its groups have the sizes that AR3PO gave them."""
    buffer = await filled(redis_backend)
    await train(buffer, method=MethodState(sizes={4: 4, 5: 1}))
    await fill(buffer, await buffer.admit("w", 0, 100))
    assert await buffer.claim(1) is not None
    await redis_backend.client.delete(redis_backend.keys.pool(1))
    heir = await recovered(redis_backend, step=1)
    await heir.announce(1, "v000001-e2")
    sizes = Counter(slot.ticket for slot in await heir.admit("w", 1, N * G + 1))
    assert (sizes[4], sizes[5], sizes[6]) == (4, 1, G)
