"""The buffer's contract, on a real Redis."""

from __future__ import annotations

import asyncio

import pytest

from cusearch_async.algorithm.methods import State
from cusearch_async.errors import BufferUnavailable, ConfigError, CorruptPayload, Fenced, InvalidTrajectory
from cusearch_async.transport.buffer import Buffer, Place, Shape, connect
from tests.conftest import wait_until_async
from tests.strategies import make_trajectory

N, G = 4, 2


async def start(buffer: Buffer) -> None:
    """As a learner does: take over, announce the first weights."""
    await buffer.recover(0, State(), {})
    await buffer.announce(0, "v000000-e1")


async def fill(buffer: Buffer, places: list[Place], depth: int = 1) -> None:
    for place in places:
        assert await buffer.put(make_trajectory(place.ticket, place.rollout, depth=depth)) == "stored"


async def test_nothing_is_admitted_before_weights_are_announced(make_buffer):
    buffer = make_buffer()
    await buffer.recover(0, State(), {})
    assert await buffer.admit("w", 0, 8 * G) == []


async def test_tickets_come_in_order_each_with_all_its_rollouts(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    assert await buffer.admit("w", 0, 2 * G) == [Place(0, 0), Place(0, 1), Place(1, 0), Place(1, 1)]
    assert await buffer.admit("w", 0, G) == [Place(2, 0), Place(2, 1)]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_admission_stops_at_the_staleness_bound(make_buffer, max_staleness):
    buffer = make_buffer(max_staleness=max_staleness)
    await start(buffer)
    places = await buffer.admit("w", 0, 1000)
    assert len({place.ticket for place in places}) == (max_staleness + 1) * N
    assert await buffer.admit("w", 0, G) == []
    assert await buffer.admit("w", 5, G) == [], "a version that was never announced grants nothing"


async def test_newer_weights_open_the_next_tickets(make_buffer):
    buffer = make_buffer(max_staleness=0)
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, N * G))
    pool = await buffer.claim(0)
    await buffer.commit(pool, pool.trajectories[:3], State(phase=0), {})
    await buffer.announce(1, "v000001-e1")
    assert await buffer.admit("w", 0, N * G) == [], "the worker still has the old weights"
    assert {place.ticket for place in await buffer.admit("w", 1, N * G)} == {4, 5, 6, 7}


async def test_two_workers_never_get_the_same_ticket(make_buffer):
    learner = make_buffer(max_staleness=10)
    await start(learner)
    workers = [make_buffer(max_staleness=10) for _ in range(6)]
    grants = await asyncio.gather(
        *(worker.admit(f"w{i}", 0, 3 * G) for i, worker in enumerate(workers) for _ in range(2))
    )
    places = [place for grant in grants for place in grant]
    assert len(places) == len(set(places)) == 6 * 2 * 3 * G - max(0, 6 * 2 * 3 - 11 * N) * G


async def test_a_trajectory_lies_in_the_bucket_of_its_depth(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    places = await buffer.admit("w", 0, 3 * G)
    for depth, place in enumerate(places):
        await buffer.put(make_trajectory(place.ticket, place.rollout, depth=depth))
    assert await buffer.capacities() == [1, 1, 1, 1, 1, 1]


async def test_a_trajectory_deeper_than_the_last_bucket_is_refused_by_name(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    await buffer.admit("w", 0, G)
    with pytest.raises(InvalidTrajectory, match=r"trajectory 0:1: depth must be at most episode.s_max \(5\), got 6"):
        await buffer.put(make_trajectory(0, 1, depth=6))
    assert (await buffer.ledger()).finished == 0


async def test_a_second_put_of_the_same_rollout_is_refused_and_counted(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    await buffer.admit("w", 0, G)
    assert await buffer.put(make_trajectory(0, 0)) == "stored"
    assert await buffer.put(make_trajectory(0, 0, reward=0.0)) == "duplicate"
    ledger = await buffer.ledger()
    assert (ledger.finished, ledger.duplicates_refused) == (1, 1)


async def test_a_put_for_a_group_that_was_trained_and_forgotten_is_late(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, N * G))
    pool = await buffer.claim(0)
    await buffer.commit(pool, pool.trajectories, State(phase=0), {})
    await buffer.checkpoint(1)
    assert await buffer.put(make_trajectory(0, 0)) == "late"
    assert (await buffer.ledger()).late_refused == 1


async def test_a_put_without_a_ticket_is_late(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    assert await buffer.put(make_trajectory(77, 0)) == "late"


async def test_a_pool_is_claimed_whole_or_not_at_all(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    places = await buffer.admit("w", 0, N * G)
    await fill(buffer, places[:-1])
    assert await buffer.claim(0) is None
    await fill(buffer, places[-1:])
    pool = await buffer.claim(0)
    assert [(t.ticket, t.rollout) for t in pool] == [(t, r) for t in range(N) for r in range(G)]
    assert await buffer.capacities() == [0] * 6


async def test_claiming_a_step_again_gives_the_same_pool(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, 2 * N * G))
    first = await buffer.claim(0)
    again = await buffer.claim(0)
    assert [t.id for t in first] == [t.id for t in again]
    assert (await buffer.ledger()).claimed == N * G


async def test_ticket_order_waits_for_the_oldest_tickets(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    places = await buffer.admit("w", 0, 2 * N * G)
    await fill(buffer, [place for place in places if place.ticket != 0])
    assert await buffer.claim(0) is None


async def test_oldest_complete_order_passes_a_straggler(make_buffer):
    buffer = make_buffer(order="oldest_complete")
    await start(buffer)
    places = await buffer.admit("w", 0, 2 * N * G)
    await fill(buffer, [place for place in places if place.ticket != 0])
    pool = await buffer.claim(0)
    assert {t.ticket for t in pool} == {1, 2, 3, 4}


async def test_commit_moves_step_phase_version_and_ledger_at_once(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, N * G))
    pool = await buffer.claim(0)
    await buffer.commit(pool, pool.trajectories[:3], State(phase=2), {})
    state, ledger = await buffer.state(), await buffer.ledger()
    assert (state.step, state.phase) == (1, 2)
    assert (ledger.trained, ledger.unselected, ledger.claimed, ledger.buffered) == (3, 5, 0, 0)
    assert ledger.closes


async def test_a_repeated_commit_changes_nothing(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, N * G))
    pool = await buffer.claim(0)
    await buffer.commit(pool, pool.trajectories[:3], State(phase=1), {})
    before = await buffer.ledger()
    await buffer.commit(pool, pool.trajectories[:2], State(phase=4), {})
    assert await buffer.ledger() == before
    assert (await buffer.state()).phase == 1


async def test_an_older_learner_is_fenced_off(make_buffer):
    old, new = make_buffer(), make_buffer()
    await start(old)
    await fill(old, await old.admit("w", 0, N * G))
    pool = await old.claim(0)
    await new.recover(0, State(), {})
    for attempt in (
        old.claim(0),
        old.commit(pool, pool.trajectories, State(phase=0), {}),
        old.announce(1, "x"),
        old.checkpoint(1),
    ):
        with pytest.raises(Fenced):
            await attempt
    assert await new.claim(0) is not None


async def test_recovery_gives_every_later_step_its_pool_again(make_buffer):
    buffer = make_buffer(max_staleness=3)
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, 3 * N * G))
    pools = []
    for step in range(3):
        pools.append(await buffer.claim(step))
        await buffer.commit(pools[-1], pools[-1].trajectories[:4], State(phase=1), {})
    await buffer.checkpoint(1)
    resumed = make_buffer(max_staleness=3)
    await resumed.recover(1, State(), {})
    ledger = await resumed.ledger()
    assert (ledger.trained, ledger.claimed, ledger.closes) == (4, 2 * N * G, True)
    for step in (1, 2):
        assert [t.id for t in await resumed.claim(step)] == [t.id for t in pools[step]]


async def test_a_group_is_granted_only_as_a_whole(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    assert await buffer.admit("w", 0, G - 1) == []
    assert await buffer.admit("w", 0, 2 * G + 1) == [Place(0, 0), Place(0, 1), Place(1, 0), Place(1, 1)]


async def test_a_commit_gives_coming_groups_their_size_and_keeps_what_the_method_remembers(make_buffer, redis_url):
    """Of the tickets that version 1 opens, 8 gets three rollouts and 9 gets one; the others have G."""
    buffer = make_buffer()
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, 2 * N * G))
    pool = await buffer.claim(0)
    state = State(visits={"atlas/2/Pinsk": ((1, 2), (0, 3)), "another question": ((1, 1),)})
    await buffer.commit(pool, pool.trajectories, state, {8: 3, 9: 1})
    await buffer.announce(1, "v000001-e1")
    opened = await buffer.admit("w", 1, 3 + 1 + G)
    assert opened == [Place(8, 0), Place(8, 1), Place(8, 2), Place(9, 0), Place(10, 0), Place(10, 1)]
    client = connect(redis_url, None)
    remembered = await client.hgetall(buffer.keys.visits)
    await client.aclose()
    assert remembered == {b"atlas/2/Pinsk": b"1/2 0/3"}, "of the questions of this pool"


async def test_groups_of_any_size_are_claimed_whole_and_their_sizes_go_with_them(make_buffer, redis_url):
    buffer = make_buffer(max_staleness=0)
    await buffer.recover(0, State(), {0: 3, 1: 1})
    await buffer.announce(0, "v000000-e1")
    places = await buffer.admit("w", 0, 100)
    assert [p.ticket for p in places] == [0, 0, 0, 1, 2, 2, 3, 3]
    await fill(buffer, [p for p in places if p != Place(0, 2)])
    assert await buffer.claim(0) is None, "ticket 0 has a third rollout to come"
    await fill(buffer, [Place(0, 2)])
    pool = await buffer.claim(0)
    assert [(t.ticket, t.rollout) for t in pool] == [(p.ticket, p.rollout) for p in places]
    await buffer.commit(pool, pool.trajectories, State(), {4: 2})
    await buffer.checkpoint(1)
    client = connect(redis_url, None)
    sizes = await client.hgetall(buffer.keys.sizes)
    await client.aclose()
    assert sizes == {b"4": b"2"}
    assert (await buffer.ledger()).closes


async def test_a_group_keeps_its_first_size_and_recovery_brings_the_memory_back(make_buffer, redis_url):
    buffer = make_buffer()
    await buffer.recover(0, State(visits={"gone": ((1, 1),)}), {5: 4})
    resumed = make_buffer()
    await resumed.recover(0, State(phase=2, visits={"kept": ((0, 2), (2, 2))}), {5: 1, 6: 3})
    client = connect(redis_url, None)
    found = await client.hgetall(resumed.keys.visits), await client.hgetall(resumed.keys.sizes)
    await client.aclose()
    assert found == ({b"kept": b"0/2 2/2"}, {b"5": b"4", b"6": b"3"})
    assert (await resumed.state()).phase == 2


async def test_recovery_before_forgotten_pools_is_refused_with_the_remedy(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, N * G))
    pool = await buffer.claim(0)
    await buffer.commit(pool, pool.trajectories, State(phase=0), {})
    await buffer.checkpoint(1)
    with pytest.raises(ConfigError, match="cusearch reset"):
        await buffer.recover(0, State(), {})


async def test_an_expired_lease_passes_to_another_worker_without_what_is_there(make_buffer):
    buffer = make_buffer(lease_s=0.05)
    await start(buffer)
    assert Place(0, 1) in await buffer.admit("dead", 0, G)
    assert await buffer.put(make_trajectory(0, 0)) == "stored"
    granted: list[Place] = []

    async def is_granted() -> bool:
        granted.extend(await buffer.admit("alive", 0, G))
        return any(place.ticket == 0 for place in granted)

    await wait_until_async(is_granted, timeout_s=5)
    assert [place for place in granted if place.ticket == 0] == [Place(0, 1)]
    assert (await buffer.ledger()).requeued >= 1


async def test_a_ticket_given_back_is_granted_again_at_once(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    await buffer.admit("w", 0, G)
    await buffer.give_back("w", [0])
    assert await buffer.admit("other", 0, G) == [Place(0, 0), Place(0, 1)]


async def test_a_worker_cannot_renew_what_was_passed_on(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    await buffer.admit("first", 0, G)
    await buffer.give_back("first", [0])
    await buffer.admit("second", 0, G)
    await buffer.give_back("first", [0])
    assert Place(0, 0) not in await buffer.admit("third", 0, G)


async def test_a_full_buffer_refuses_all_but_the_pool_that_is_waited_for(make_buffer):
    buffer = make_buffer(limit=G)
    await start(buffer)
    places = await buffer.admit("w", 0, 2 * N * G)
    later = [place for place in places if place.ticket >= N]
    await fill(buffer, later[:G])
    assert await buffer.put(make_trajectory(later[G].ticket, later[G].rollout)) == "full"
    await fill(buffer, [place for place in places if place.ticket < N])
    assert (await buffer.ledger()).finished == G + N * G


async def test_a_corrupt_payload_is_named_by_its_trajectory(make_buffer, redis_url):
    buffer = make_buffer()
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, N * G))
    client = connect(redis_url, None)
    await client.hset(buffer.keys.trajectory("2:1"), "payload", b"CUS\x01rubbish")
    await client.aclose()
    with pytest.raises(CorruptPayload, match="trajectory 2:1"):
        await buffer.claim(0)


async def test_heartbeats_show_who_works_on_what(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    await buffer.heartbeat("w7", [], {"version": 3, "busy_s": 1.5})
    workers = await buffer.workers()
    assert workers["w7"]["version"] == "3"
    assert float(workers["w7"]["heartbeat_age_s"]) < 5


async def test_a_worker_that_leaves_gives_its_tickets_back_and_is_not_shown(make_buffer):
    buffer = make_buffer()
    await start(buffer)
    await buffer.admit("w", 0, G)
    await buffer.heartbeat("w", [0], {"version": 0})
    await buffer.leave("w", [0])
    assert await buffer.workers() == {}
    assert await buffer.admit("other", 0, G) == [Place(0, 0), Place(0, 1)]


async def test_reset_deletes_this_run_and_no_other(make_buffer, redis_url):
    buffer = make_buffer()
    await start(buffer)
    client = connect(redis_url, None)
    await client.set("cusearch:{other}:state", "kept")
    assert await buffer.reset() > 0
    assert await client.exists(buffer.keys.state) == 0
    assert await client.get("cusearch:{other}:state") == b"kept"
    await client.aclose()


async def test_no_redis_is_one_clear_error():
    buffer = Buffer(connect("redis://127.0.0.1:1/0", None), "x", SHAPE)
    with pytest.raises(BufferUnavailable, match=r"127\.0\.0\.1:1 cannot be reached.*cusearch redis"):
        await buffer.wait_until_reachable(0.1)


SHAPE = Shape(questions=1, rollouts=1, max_staleness=0, order="ticket", s_max=1, lease_s=1.0, limit=1)
