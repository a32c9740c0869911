"""What a learner claims, whatever workers, late commands and Redis have done to it; on both buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cusearch_async.errors import BufferLost, ConfigError, Fenced
from cusearch_async.transport.interface import Buffer, RolloutSlot
from tests.strategies import make_trajectory
from tests.transport.filling import G, N, all_raise, fill, filled, group, recovered, run_steps, start, started, train


@pytest.mark.parametrize(
    "belief",
    [{"max_staleness": 6}, {"rollouts": 1}, {"rollouts": 3}, {"questions": 32}, {"max_attempts": 1}, {"limit": 10**9}],
    ids=str,
)
async def test_what_a_worker_believes_of_the_run_changes_nothing(backend, belief):
    learner, worker = backend.make(limit=1), backend.make(**({"limit": 1} | belief))
    await start(learner)
    slots = await worker.admit("w", 0, 1000)
    assert slots == group(*range(2 * N)), "N, G and the bound are the learner's"
    assert await worker.put(make_trajectory(0, G)) == "late"
    await worker.release("w", [2 * N - 1], failed=True)
    await fill(worker, [slot for slot in slots if slot.ticket < N])
    assert await worker.put(make_trajectory(N, 0)) == "full"
    pool = await learner.claim(0)
    assert [(t.ticket, t.rollout) for t in pool] == [(t, r) for t in range(N) for r in range(G)]
    ledger = await learner.ledger()
    assert (ledger.requeued, ledger.incomplete_groups) == (1, 0)


@pytest.mark.parametrize("change", [{"questions": 8}, {"rollouts": 3}, {"order": "deferred"}, {"defer": 3}], ids=str)
async def test_a_learner_whose_pools_would_be_others_is_refused(backend, change):
    await start(learner := backend.make())
    await backend.make(**change).recover(0)
    heir = await recovered(backend)
    await heir.announce(0, "v000000-e3")
    await heir.admit("w", 0, G)
    with pytest.raises(ConfigError, match="granted with"):
        await backend.make(**change).recover(0)
    with pytest.raises(Fenced):
        await learner.claim(0)
    assert await heir.claim(0) is None


def versions(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


BAD = {
    "too old": ({"versions": versions(0, 3, 3, 3)}, "staleness 3 at step 3, pool.max_staleness is 1"),
    "from the future": ({"versions": versions(3, 3, 4, 3)}, "sampled by version 4"),
    "before all versions": ({"versions": versions(-1, 3, 3, 3)}, "sampled by version -1"),
    "outside the vocabulary": ({"token_ids": np.array([5] * 8 + [100], np.int32)}, "below 100"),
    "too deep": ({"depth": 9}, "depth must be at most 5, got 9"),
    "another question": ({"question_id": "atlas/2/Minsk"}, "answer different questions"),
}


async def at_step_3(backend: Any, **limits: Any) -> Buffer:
    """A run that has trained three steps, and whose worker may begin the tickets of version 3."""
    buffer = await started(backend, **limits)
    await run_steps(buffer, 3)
    return buffer


@pytest.mark.parametrize("name", BAD)
async def test_what_must_not_be_trained_on_is_quarantined_and_generated_again(backend, name):
    """Whatever put it there: a worker with another config, model or clock, or a grant that was answered late."""
    changes, reason = BAD[name]
    learner, worker = await at_step_3(backend, vocab_size=100), backend.make(s_max=9)
    slots = await worker.admit("w", 3, N * G)
    assert {p.ticket for p in slots} == set(range(12, 16))
    await fill(worker, [p for p in slots if p != RolloutSlot(13, 1)], versions=versions(3, 3, 3, 2))
    await fill(worker, [RolloutSlot(13, 1)], **({"versions": versions(3, 3, 3, 3)} | changes))
    assert await learner.claim(3) is None
    again = group(13) if name == "another question" else [RolloutSlot(13, 1)]
    assert set(await backend.quarantined()) == {f"{p.ticket}:{p.rollout}" for p in again}
    assert reason in (await backend.quarantined())["13:1"]
    ledger = await learner.ledger()
    left = N * G - len(again)
    assert (ledger.quarantined, ledger.requeued, ledger.buffered) == (len(again), 1, left)
    assert ledger.closes
    assert await worker.admit("w", 3, G) == again
    await fill(worker, again, versions=versions(3, 3, 3, 3))
    assert len(await learner.claim(3)) == N * G


async def test_any_age_may_be_trained_on_where_the_order_promises_no_bound(backend):
    learner = await at_step_3(backend, order="oldest_complete")
    await fill(learner, await learner.admit("w", 3, N * G), versions=versions(0, 0, 0, 0))
    assert len(await learner.claim(3)) == N * G


async def test_the_wrong_question_for_a_ticket_is_quarantined(backend):
    learner = await filled(backend, max_staleness=0)
    asked = {0: "atlas/2/Pinsk", 1: "atlas/2/Pinsk", 2: "atlas/1/Brest", 3: "atlas/2/Pinsk"}
    assert await learner.claim(0, asked.__getitem__) is None
    assert set(await backend.quarantined()) == {"2:0", "2:1"}
    assert await learner.admit("w", 0, G) == group(2)
    await fill(learner, group(2), question_id="atlas/1/Brest")
    assert len(await learner.claim(0, asked.__getitem__)) == N * G


async def test_after_max_attempts_a_group_continues_without_what_must_not_be_trained_on(backend):
    learner, worker = await started(backend, max_attempts=2, max_staleness=0), backend.make(s_max=9)
    await fill(worker, [p for p in await worker.admit("w", 0, N * G) if p != RolloutSlot(2, 1)])
    for _ in range(2):
        await fill(worker, [RolloutSlot(2, 1)], depth=9)
        assert await learner.claim(0) is None
        await worker.admit("w", 0, G)
    ids = [f"{slot.ticket}:{slot.rollout}" for slot in group(*range(N))]
    assert [t.id for t in await learner.claim(0)] == [id_ for id_ in ids if id_ != "2:1"]
    ledger = await learner.ledger()
    assert (ledger.incomplete_groups, ledger.failed_rollouts, ledger.quarantined, ledger.closes) == (1, 1, 2, True)


async def test_what_has_gone_before_the_claim_is_counted_as_lost_and_generated_again(backend):
    buffer = await filled(backend, max_staleness=0)
    await backend.vanish("1:0", "1:1", "3:1")
    assert await buffer.claim(0) is None
    ledger = await buffer.ledger()
    assert (ledger.lost, ledger.buffered, ledger.requeued, ledger.closes) == (3, N * G - 3, 2, True)
    assert await buffer.capacities() == [0, N * G - 3, 0, 0, 0, 0]
    again = await buffer.admit("v", 0, N * G)
    assert again == [RolloutSlot(1, 0), RolloutSlot(1, 1), RolloutSlot(3, 1)]
    await fill(buffer, again)
    pool = await buffer.claim(0)
    assert len(pool) == N * G
    await buffer.commit(pool, pool.trajectories)
    assert (await buffer.ledger()).bytes == 0


async def test_a_loss_from_a_group_in_flight_is_found_at_the_claim(backend):
    buffer = await started(backend, max_staleness=0)
    slots = await buffer.admit("w", 0, N * G)
    await fill(buffer, slots[:1])
    await backend.vanish("0:0")
    await fill(buffer, slots[1:])
    assert await buffer.claim(0) is None
    await fill(buffer, await buffer.admit("w", 0, N * G))
    assert len(await buffer.claim(0)) == N * G
    assert (await buffer.ledger()).lost == 1


async def test_an_announcement_that_arrives_late_changes_nothing_and_a_second_copy_replaces_the_first(backend):
    buffer = await started(backend)
    for version, name in ((9, "v000009-e1"), (9, "v000009-e1-2"), (6, "v000006-e1")):  # the first copy was damaged
        await buffer.announce(version, name)
    state = await buffer.state()
    assert (state.published, state.weights) == (9, "v000009-e1-2")
    heir = await recovered(backend)
    await heir.announce(4, "v000004-e2")
    assert (await heir.state()).published == 4, "another learner may begin at an older version"


async def test_a_redis_behind_the_checkpoint_drops_what_the_learner_is_past(backend):
    """A replica that was three steps behind has been promoted, and no older checkpoint is left."""
    buffer = await started(backend, max_staleness=4)
    slots = await buffer.admit("w", 0, 5 * N * G)
    await fill(buffer, [p for p in slots if p not in (RolloutSlot(6, 1), RolloutSlot(17, 0))])
    await train(buffer, selected=3)
    heir = await recovered(backend, max_staleness=4, step=3)
    ledger = await heir.ledger()
    assert (ledger.trained, ledger.lost, ledger.buffered, ledger.closes) == (3, 2 * N * G - 1, 2 * N * G - 1, True)
    assert await heir.put(make_trajectory(6, 1)) == "late"
    state = await heir.state()
    assert (state.checkpoint, state.next_ticket) == (3, 5 * N)
    assert len(await heir.claim(3)) == N * G
    with pytest.raises(ConfigError, match="forgotten"):
        await heir.recover(2)


async def test_a_learner_that_redis_has_forgotten_is_told_so_and_not_that_it_was_replaced(backend):
    buffer = await filled(backend, max_staleness=0)
    pool = await buffer.claim(0)
    await backend.forget_everything()
    commit = buffer.commit(pool, pool.trajectories)
    await all_raise(BufferLost, buffer.claim(0), commit, buffer.announce(1, "x"), buffer.checkpoint(1))
    assert await buffer.admit("w", 0, G) == [], "a worker waits for the next learner"
    assert await buffer.put(make_trajectory(0, 0)) == "late"
    heir = backend.make(max_staleness=0)
    await heir.recover(0, least_epoch=buffer.epoch)
    with pytest.raises(Fenced):
        await buffer.claim(0)
