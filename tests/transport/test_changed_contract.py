"""A learner that changes what the run means, on both buffers: no earlier trajectory is trained on."""

from __future__ import annotations

from collections import Counter

import pytest

from cusearch_async.run.identity import Identity
from cusearch_async.transport.interface import MethodState, RolloutSlot
from tests.transport.filling import G, N, fill, filled, run_steps, started

OURS = Identity({"episode.temperature": "1.0"})
COLDER = Identity({"episode.temperature": "0.5"})


@pytest.mark.parametrize("step", [0, 1], ids=["from the checkpoint", "from where it was"])
async def test_no_trajectory_of_another_contract_is_trained_under_a_new_one(backend, step):
    """Before: 48 of 48 trajectories sampled at temperature 1 were trained at 0.5, with ratios of the wrong policy."""
    learner = await started(backend, OURS)
    slots = await learner.admit("w", 0, 2 * N * G)
    await fill(learner, [slot for slot in slots if slot.ticket < 2 * N - 2] + [RolloutSlot(2 * N - 2, 0)])
    first = await learner.claim(0)
    await learner.commit(first, first.trajectories)
    await learner.claim(1)
    await learner.release("w", [2 * N - 2], failed=True)  # in part, and requeued; ticket 2N - 1 is in flight

    heir = backend.make(COLDER)
    await heir.recover(step, accepts_changes=True)
    await heir.announce(step, f"v{step:06d}-e2")
    ledger, generated = await heir.ledger(), N * G * (1 if step else 0)
    assert (ledger.buffered, ledger.claimed, ledger.trained) == (0, 0, generated)
    assert ledger.quarantined == ledger.finished - generated > 0
    assert set((await heir.quarantined()).values()) == {
        "it was generated before the settings of the run were changed (--accept-changes)"
    }
    assert await heir.claim(step) is None
    again = await heir.admit("w", step, (2 - step) * N * G)
    assert [(slot.ticket, slot.rollout) for slot in again] == [
        (ticket, rollout) for ticket in range(step * N, 2 * N) for rollout in range(G)
    ]
    await fill(heir, again)
    assert len(await heir.claim(step)) == N * G
    assert (await heir.audit()).findings == ()
    assert (await heir.ledger()).closes


async def test_groups_that_are_generated_again_have_the_sizes_of_the_new_method(backend):
    """Those that AR3PO had planned stayed, for a method whose groups are all of one size."""
    before = backend.make(OURS)
    await before.recover(0, MethodState(sizes={0: 1, 1: 5, N: 3, N + 1: 1, 20 * N: 7}))
    await before.announce(0, "v000000-e1")
    await fill(before, [slot for slot in await before.admit("w", 0, 100) if slot.ticket < N])
    assert await before.claim(0) is not None
    heir = backend.make(COLDER)
    await heir.recover(0, MethodState(sizes={1: 2}), accepts_changes=True)
    await heir.announce(0, "v000000-e2")
    assert await backend.sizes() == {1: 2}
    sizes = Counter(slot.ticket for slot in await heir.admit("w", 0, 2 * N * G))
    assert sizes == {0: G, 1: 2, **dict.fromkeys(range(2, 2 * N), G)}
    assert (await heir.audit()).findings == ()


async def test_pools_that_stay_keep_their_sizes_under_another_contract(backend):
    before = backend.make(OURS)
    await before.recover(0, MethodState(sizes={0: 1, N: 3}))
    await before.announce(0, "v000000-e1")
    await fill(before, await before.admit("w", 0, N * G - 1))
    pool = await before.claim(0)
    await before.commit(pool, pool.trajectories)
    heir = backend.make(COLDER)
    await heir.recover(1, accepts_changes=True)
    assert await backend.sizes() == {0: 1}
    assert (await heir.audit()).findings == ()


async def test_trajectories_are_kept_by_a_learner_that_changes_nothing_of_the_contract(backend):
    await filled(backend, OURS)
    heir = backend.make(OURS)
    await heir.recover(0, accepts_changes=True)
    assert len(await heir.claim(0)) == N * G


async def test_no_worker_begins_with_the_weights_of_before(backend):
    """Between the take-over and the first announcement one was granted tickets of steps that the old learner had made:
    what it sampled then looked fresh, or was refused with an attempt of each group."""
    learner = await started(backend, OURS)
    await run_steps(learner, 2)
    heir = backend.make(COLDER)
    await heir.recover(0, accepts_changes=True)
    state = await heir.state()
    assert (state.weights, state.published) == ("", -1)
    assert await heir.admit("w", 2, 4 * N * G) == []
    await heir.announce(0, "v000000-e2")
    assert {slot.ticket for slot in await heir.admit("w", 0, 4 * N * G)} == {*range(2 * N)}
