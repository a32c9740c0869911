"""Deferred order: pools that a learner dissolves at its start, because they are generated again. No learner waits
for tickets that nobody is granted."""

from __future__ import annotations

import pytest

from cusearch_async.run.identity import Identity
from tests.strategies import make_trajectory
from tests.transport.filling import G, N, fill, recovered, started, train
from tests.transport.test_deferred import deferred

BEFORE, AFTER = Identity({"pool.max_staleness": "3"}), Identity({"pool.max_staleness": "0"})
LATE = (0, 1, 2)


async def with_a_late_pool(backend, *identity, **limits):
    """Step 0 has trained tickets 3 to 6, because those before were slow; later ones wait."""
    buffer = await started(backend, *identity, **deferred(max_staleness=3, **limits))
    slots = await buffer.admit("w", 0, 100 * N * G)
    await fill(buffer, [slot for slot in slots if slot.ticket not in LATE])
    assert {t.ticket for t in await train(buffer, 0)} == {3, 4, 5, 6}
    return buffer


async def test_after_a_change_to_less_staleness_the_step_takes_others(backend):
    await with_a_late_pool(backend, BEFORE)
    heir = backend.make(AFTER, **deferred(max_staleness=0))
    await heir.recover(0, accepts_changes=True)
    await heir.announce(0, "v000000-e2")
    await fill(heir, await heir.admit("w", 0, 100 * N * G))
    assert (await heir.queues(0)).ready_of_pool == N
    assert {t.ticket for t in await heir.claim(0)} == {0, 1, 2, 3}
    heir = await recovered(backend, AFTER, **deferred(max_staleness=0))
    assert {t.ticket for t in await heir.claim(0)} == {0, 1, 2, 3}
    assert (await heir.audit()).closes


async def test_a_pool_beyond_the_steps_of_a_shorter_run_is_not_waited_for(backend):
    await with_a_late_pool(backend, steps=10)
    await backend.vanish(*(f"{ticket}:{rollout}" for ticket in (3, 4, 5, 6) for rollout in range(G)))
    shorter = await recovered(backend, **deferred(max_staleness=3, steps=1))
    assert len(await shorter.claim(0)) == 0
    shorter = await recovered(backend, **deferred(max_staleness=3, steps=1))
    await shorter.announce(0, "v000000-e3")
    await fill(shorter, await shorter.admit("w", 0, 100 * N * G))
    assert len(await shorter.claim(0)) == N * G, "of those that wait; the others are of no step any more"


async def test_no_step_takes_the_tickets_that_are_kept_for_a_later_one(backend):
    """Both were emptied, and the first cannot have its own again: those of the second were trained twice."""
    buffer = await started(backend, **deferred(max_staleness=3, steps=10))
    slots = await buffer.admit("w", 0, 100 * N * G)
    for step, tickets in ((0, (5, 6, 7, 8)), (1, (0, 1, 2, 3))):
        await fill(buffer, [slot for slot in slots if slot.ticket in tickets])
        assert {t.ticket for t in await train(buffer, step)} == {*tickets}
    await fill(buffer, [slot for slot in slots if slot.ticket == 4])
    await backend.vanish(*(f"{ticket}:{rollout}" for ticket in (0, 1, 2, 3, 5, 6, 7, 8) for rollout in range(G)))
    emptied = await recovered(backend, **deferred(max_staleness=3, steps=10))
    assert len(await train(emptied, 0)) == 0
    assert len(await emptied.claim(1)) == 0
    shorter = await recovered(backend, **deferred(max_staleness=3, steps=2))
    await shorter.announce(0, "v000000-e3")
    await fill(shorter, await shorter.admit("w", 0, 100 * N * G))
    first = {t.ticket for t in await train(shorter, 0)}
    assert first == {4, 5, 6, 7}
    assert {t.ticket for t in await train(shorter, 1)} == {0, 1, 2, 3}
    assert (await shorter.audit()).closes


async def test_the_pool_that_is_generated_again_is_accepted_by_a_full_buffer(backend):
    buffer = await with_a_late_pool(backend)
    held = (await buffer.ledger()).bytes
    await backend.vanish(*(f"{ticket}:{rollout}" for ticket in (3, 4, 5, 6) for rollout in range(G)))
    await buffer.leave("w", [])
    small = deferred(max_staleness=3, limit_bytes=held)
    assert len(await (await recovered(backend, **small)).claim(0)) == 0
    heir = await recovered(backend, **small)
    await heir.announce(0, "v000000-e3")
    for slot in await heir.admit("w", 0, 100 * N * G):
        await heir.put(make_trajectory(slot.ticket, slot.rollout))
    assert (await heir.queues(0)).ready_of_pool == N
    assert {t.ticket for t in await heir.claim(0)} == {3, 4, 5, 6}


@pytest.mark.parametrize("restarts", [1, 2])
async def test_a_pool_that_may_have_its_tickets_again_has_them(backend, restarts):
    await with_a_late_pool(backend)
    await backend.vanish(*(f"{ticket}:{rollout}" for ticket in (3, 4, 5, 6) for rollout in range(G)))
    assert len(await (await recovered(backend, **deferred(max_staleness=3))).claim(0)) == 0
    for _ in range(restarts):
        heir = await recovered(backend, **deferred(max_staleness=3))
    await heir.announce(0, "v000000-e3")
    await fill(heir, await heir.admit("w", 0, 100 * N * G))
    assert {t.ticket for t in await heir.claim(0)} == {3, 4, 5, 6}
