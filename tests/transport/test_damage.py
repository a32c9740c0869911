"""A Redis that evicts, keeps nothing, or holds what no script of ours has written."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from redis import exceptions

from cusearch_async.errors import BufferLost, ConfigError, Fenced
from cusearch_async.transport.buffer import RedisBuffer
from cusearch_async.transport.connection import check_server
from cusearch_async.transport.interface import Filter, MethodState, RolloutSlot, WorkerStatus
from tests.strategies import make_trajectory
from tests.transport.conftest import make_limits
from tests.transport.filling import G, N, all_raise, fill, filled, group, recovered, run_steps, start, started, train


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_redis_that_evicts_is_refused_before_anything_is_stored(redis_backend, policy):
    buffer = redis_backend.make()
    await redis_backend.client.config_set("maxmemory-policy", policy)
    try:
        with pytest.raises(ConfigError, match=rf"maxmemory-policy {policy}.*CONFIG SET maxmemory-policy noeviction"):
            await buffer.recover(0)
    finally:
        await redis_backend.client.config_set("maxmemory-policy", "noeviction")
    assert not (await buffer.state()).exists


class Asked:
    """A connection whose server answers INFO so, or refuses to."""

    def __init__(self, **sections: Any) -> None:
        self.client = self
        self._sections = sections

    async def info(self, section: str) -> Any:
        if not self._sections:
            raise exceptions.NoPermissionError("this user has no permissions to run the 'info' command")
        return self._sections[section]

    async def run(self, command: Any) -> Any:
        return await command()


async def test_a_redis_that_keeps_nothing_on_disk_is_warned_of_once(caplog):
    with caplog.at_level(logging.WARNING):
        await check_server(Asked(memory={"maxmemory_policy": "noeviction"}, persistence={"aof_enabled": 1}))
        assert not caplog.records
        await check_server(Asked(memory={"maxmemory_policy": "noeviction"}, persistence={"aof_enabled": 0}))
    assert [record.getMessage()[:29] for record in caplog.records] == ["Redis has appendonly off: buf"]


async def test_a_user_who_may_not_ask_is_warned(caplog):
    await check_server(Asked())
    assert "make sure that maxmemory-policy is noeviction" in caplog.text


@pytest.mark.parametrize(
    "key", ["ledger", "lease", "waiting", "ready", "requeue", "groups", "depth_by_version", "next_ticket", "owner"]
)
async def test_a_key_of_another_type_is_named_and_recovery_does_nothing_by_halves(redis_backend, key):
    buffer = await filled(redis_backend, max_staleness=0)
    await train(buffer)
    client = redis_backend.client
    name = getattr(buffer.keys, key)
    await client.delete(name)
    await (client.rpush(name, "x") if key == "next_ticket" else client.set(name, "x"))
    before = await redis_backend.dump()
    with pytest.raises(BufferLost, match=rf"Redis has lost data of run .*{key} is a (list|string) now"):
        await redis_backend.make(max_staleness=0).recover(0)
    assert await redis_backend.dump() == before


@pytest.mark.parametrize("value", ["x", "", "1.5"])
async def test_a_step_that_is_no_number_is_named(redis_backend, value):
    buffer = await started(redis_backend)
    await redis_backend.client.hset(buffer.keys.state, "step", value)
    with pytest.raises(BufferLost, match=r"is damaged, or was written by another program .*step = "):
        await buffer.state()
    await all_raise(BufferLost, buffer.claim(0), redis_backend.make().recover(0))


async def test_a_counter_that_is_no_number_is_named(redis_backend):
    buffer = await started(redis_backend)
    await redis_backend.client.hset(buffer.keys.ledger, "claimed", "x")
    with pytest.raises(BufferLost, match="claimed = 'x'"):
        await buffer.ledger()
    with pytest.raises(BufferLost, match="a counter of the ledger is 'x' now"):
        await redis_backend.make().recover(0)


DAMAGE = {
    "next_ticket is 3000000 now": lambda c, k: c.set(k.next_ticket, 3_000_000),
    "a ticket is 99999999 now": lambda c, k: c.zadd(k.lease, {"99999999": 1}),
    "next_ticket is no number": lambda c, k: c.set(k.next_ticket, "1.5"),
    "next_ticket is no .*number": lambda c, k: c.set(k.next_ticket, "1e300"),
    "ready holds 'x'": lambda c, k: c.zadd(k.ready, {"x": 1}),
    "requeue holds '007'": lambda c, k: c.zadd(k.requeue, {"007": 7}),
    "waiting holds 'x' = '1:0:5'": lambda c, k: c.hset(k.waiting, "x", "1:0:5"),
    "waiting holds '5:0' = 'garbage'": lambda c, k: c.hset(k.waiting, "5:0", "garbage"),
    "waiting holds '5:0' = '1:0:9{30}'": lambda c, k: c.hset(k.waiting, "5:0", "1:0:" + "9" * 30),
    "a counter of the ledger is '1.5'": lambda c, k: c.hset(k.ledger, "claimed", "1.5"),
    "a counter of the ledger is '9{18}'": lambda c, k: c.hset(k.ledger, "lost", "9" * 18),
    "a count of incomplete is '0.5'": lambda c, k: c.hset(k.incomplete, "4", "0.5"),
    "a count of groups is 'x'": lambda c, k: c.hset(k.groups, "4", "x"),
    "a size is '0'": lambda c, k: c.hset(k.sizes, "4", "0"),
    "a size is '1000000'": lambda c, k: c.hset(k.sizes, "4", "1000000"),
    "the clock is 'inf'": lambda c, k: c.hset(k.clock, "run", "inf"),
    "step is 999999999999, after checkpoint 0": lambda c, k: c.hset(k.state, "step", 999999999999),
    "published is 'x'": lambda c, k: c.hset(k.state, "published", "x"),
    "WRONGTYPE": lambda c, k: c.set(k.pool_info(1), "x"),
}


@pytest.mark.parametrize("found", DAMAGE)
async def test_garbage_is_named_before_anything_is_written_and_no_restart_is_advised(redis_backend, found):
    buffer = await started(redis_backend, max_staleness=1)
    await fill(buffer, (await buffer.admit("w", 0, 2 * N * G))[:-3])
    await train(buffer)
    await DAMAGE[found](redis_backend.client, buffer.keys)
    before = await redis_backend.dump()
    for _ in range(2):
        with pytest.raises(BufferLost, match=rf"{found}.*(a restart does not help.*`cusearch reset`)|\(.*{found}"):
            await redis_backend.make(max_staleness=1).recover(0)
    assert await redis_backend.dump() == before


async def test_a_run_far_ahead_of_its_checkpoint_is_not_taken_for_damaged(redis_backend):
    """Also when `state` has disappeared, and only pools and tickets say how far it was."""
    buffer = await started(redis_backend, max_staleness=1)
    await run_steps(buffer, 8, pools=2)
    await buffer.admit("w", 8, 2 * N * G)
    kept = await redis_backend.dump()
    for lost in ([], [buffer.keys.state], [buffer.keys.ready, buffer.keys.lease, buffer.keys.owner]):
        await redis_backend.restore(kept)
        if lost:
            await redis_backend.client.delete(*lost)
        await redis_backend.make(max_staleness=0).recover(0)


async def test_the_audit_ends_also_with_a_next_ticket_that_somebody_has_written(redis_backend):
    buffer = await filled(redis_backend)
    await redis_backend.client.set(buffer.keys.next_ticket, 10**13)
    findings = (await buffer.audit()).findings
    assert any(finding.startswith("next_ticket: 10000000000000, more than") for finding in findings)
    await redis_backend.client.hset(buffer.keys.waiting, "0:0", "99999999999:0:5")
    assert not (await buffer.audit()).closes
    await redis_backend.client.hset(buffer.keys.waiting, "0:0", "x")
    with pytest.raises(BufferLost, match="waiting holds '0:0' = 'x'"):
        await buffer.audit()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c, k: c.xadd(k.news, {"of": 1}, id="18446744073709551615-18446744073709551615"),
        lambda c, k: c.set(k.news, "x"),
        lambda c, k: c.set(k.depth(77), "x"),
    ],
)
async def test_what_the_next_learner_can_make_again_is_no_reason_to_refuse(redis_backend, spoil):
    buffer = await started(redis_backend)
    slots = await buffer.admit("w", 0, N * G)
    await fill(buffer, slots[:-1])
    await redis_backend.client.hset(buffer.keys.waiting, "0:0", "77:0:5")
    await redis_backend.client.delete(buffer.keys.news)
    await spoil(redis_backend.client, buffer.keys)
    heir = await recovered(redis_backend)
    await heir.announce(0, "v000000-e2")
    await fill(heir, slots[-1:])
    assert len(await heir.claim(0)) == N * G


async def test_run_limits_that_are_gone_are_written_by_the_next_learner(redis_backend):
    """The message told to reset the run."""
    buffer = await filled(redis_backend)
    await redis_backend.client.delete(buffer.keys.limits)
    for attempt in (
        buffer.claim(0),
        buffer.admit("w", 0, 1),
        buffer.heartbeat("w", [0], WorkerStatus()),
        buffer.put(make_trajectory(0, 0)),
        buffer.release("w", [0], failed=False),
        buffer.reopen(0),
        buffer.quarantine("0:0", "odd"),
    ):
        with pytest.raises(BufferLost, match=r"the run limits are missing.*start the learner again"):
            await attempt
    assert len(await (await recovered(redis_backend)).claim(0)) == N * G


async def test_a_ledger_that_is_gone_after_a_learner_went_back_is_counted_again(redis_backend):
    """Of pools above the step it has, none was counted."""
    buffer = await started(redis_backend)
    await run_steps(buffer, 2)
    await recovered(redis_backend)
    await redis_backend.client.delete(buffer.keys.ledger)
    heir = await recovered(redis_backend)
    assert (await heir.ledger()).claimed == 2 * N * G
    assert (await heir.audit()).findings == ()


async def test_a_ledger_that_is_gone_is_counted_again_by_the_next_learner(redis_backend):
    buffer = await started(redis_backend, max_staleness=1)
    await run_steps(buffer, 2, pools=2, selected=3)
    await buffer.quarantine(f"{2 * N}:0", "odd")
    await buffer.claim(2)
    before = await buffer.ledger()
    await redis_backend.client.delete(buffer.keys.ledger)
    heir = await recovered(redis_backend, max_staleness=1, step=2)
    found = await heir.ledger()
    assert found.closes
    for name in ("trained", "unselected", "quarantined", "buffered", "bytes", "finished"):
        assert getattr(found, name) == getattr(before, name)
    assert (await heir.audit()).findings == ()


@pytest.mark.parametrize("key", ["trajectory", "payload"])
async def test_a_trajectory_of_another_type_has_disappeared_and_is_generated_again(redis_backend, key):
    buffer = await filled(redis_backend, max_staleness=0)
    name = getattr(buffer.keys, key)("1:0")
    await redis_backend.client.delete(name)
    await redis_backend.client.rpush(name, "x")
    assert await buffer.claim(0) is None
    await fill(buffer, await buffer.admit("w", 0, N * G))
    assert len(await buffer.claim(0)) == N * G
    assert (await buffer.ledger()).lost == 1


async def test_lists_that_a_worker_has_written_keep_redis_busy_for_no_longer_than_its_own(redis_backend):
    buffer = await started(redis_backend, max_staleness=0)
    client, token = redis_backend.client, "life/7"

    async def admit(room):
        return await buffer.run_script("admit", "w", token, room, 0, buffer._identity.joined)

    assert len(await admit(G)) == G
    await client.hset(buffer.keys.worker("w"), "admit_tickets", "0," * 100_000)
    assert len(await admit(10**9)) < 100 * N * G
    token = "life/8"
    await client.zadd(buffer.keys.requeue, {str(10**6 + ticket): 1 for ticket in range(10_000)})
    assert len(await admit(10**9)) < 100 * N * G


async def test_a_requeued_ticket_that_is_none_ends_a_worker_with_one_line(redis_backend):
    buffer = await started(redis_backend)
    await redis_backend.client.zadd(buffer.keys.requeue, {"x": 0})
    with pytest.raises(BufferLost, match="a ticket = 'x'"):
        await buffer.admit("w", 0, N * G)


@pytest.mark.parametrize(
    ("field", "value"), [("version", "x"), ("reward", "high"), ("turns", "\x1b[31m"), ("depth", "")]
)
async def test_fields_that_are_no_numbers_are_named_by_a_listing(redis_backend, field, value):
    buffer = await started(redis_backend)
    await fill(buffer, (await buffer.admit("w", 0, N * G))[:1])
    await redis_backend.client.hset(buffer.keys.trajectory("0:0"), field, value)
    with pytest.raises(BufferLost, match=f"{field} of 0:0 = "):
        [row async for row in buffer.rows(Filter())]


async def test_tickets_that_are_nowhere_are_generated_again(redis_backend):
    """As when an operator, or an eviction, has deleted a whole key."""
    buffer = await started(redis_backend, max_staleness=0)
    slots = await buffer.admit("w", 0, N * G)
    await fill(buffer, [p for p in slots if p.ticket < 2])
    await redis_backend.client.delete(buffer.keys.ready, buffer.keys.lease, buffer.keys.owner)
    assert await buffer.claim(0) is None
    assert await buffer.admit("v", 0, N * G) == group(2, 3)
    await fill(buffer, [p for p in slots if p.ticket >= 2])
    assert len(await buffer.claim(0)) == N * G
    assert (await buffer.audit()).closes


@pytest.mark.parametrize(
    "key", ["depth", "depth_by_version", "groups", "attempts", "requeue", "ready", "next_ticket", "waiting"]
)
async def test_a_deleted_key_is_found_by_the_audit_and_repaired_by_the_next_learner(redis_backend, key):
    buffer = await started(redis_backend, max_staleness=1)
    slots = await buffer.admit("w", 0, 2 * N * G)
    await buffer.release("w", [7], failed=True)
    await fill(buffer, [p for p in slots if p.ticket not in (6, 7)] + [RolloutSlot(6, 0)])
    assert (await buffer.audit()).closes
    name = buffer.keys.depth(1) if key == "depth" else getattr(buffer.keys, key)
    await redis_backend.client.delete(name)
    assert (await buffer.audit()).closes == (key in ("attempts", "next_ticket"))
    heir = await recovered(redis_backend, max_staleness=1)
    assert (await heir.state()).next_ticket == 8
    await heir.announce(0, "v000000-e2")
    await redis_backend.expire_leases()
    for _ in range(4):
        await fill(heir, await heir.admit("v", 0, 2 * N * G))
        if pool := await heir.claim(0):
            break
        await redis_backend.expire_leases()
    assert len(pool) == N * G
    if key != "waiting":  # the hashes that it named are orphaned, until their tickets run again
        assert (await heir.audit()).findings == ()


async def test_a_pool_whose_list_is_gone_is_generated_again_by_the_next_learner(redis_backend):
    buffer = await filled(redis_backend, max_staleness=0)
    pool = await buffer.claim(0)
    await redis_backend.client.delete(buffer.keys.pool(0))
    with pytest.raises(BufferLost, match="part of pool 0 is gone"):
        await buffer.claim(0)
    heir = await recovered(redis_backend, max_staleness=0)
    await heir.announce(0, "v000000-e2")
    assert (await heir.ledger()).lost == N * G
    await fill(heir, await heir.admit("w", 0, N * G))
    assert [t.id for t in await heir.claim(0)] == [t.id for t in pool]
    assert (await heir.audit()).findings == ()


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda c, k: c.hincrby(k.ledger, "buffered", 1), "buffered: 3 by keys, 4 by counters"),
        (lambda c, k: c.hincrby(k.ledger, "trained", 1), "trained: 3 by keys, 4 by counters"),
        (lambda c, k: c.delete(k.trajectory("4:0")), "missing, and not counted as lost: 1 (4:0)"),
        (lambda c, k: c.delete(k.payload("0:0")), "missing, and not counted as lost: 1 (0:0)"),
        (lambda c, k: c.set(k.payload("77:1"), "x"), "orphaned: 1 (77:1)"),
        (lambda c, k: c.zrem(k.depth(1), "4:0"), "in the depth buckets: 2 by keys, 3 by counters"),
        (lambda c, k: c.lpop(k.pool(0)), "pool 0: 7 by keys, 8 by counters"),
        (lambda c, k: c.zrem(k.lease, 6), "tickets that are nowhere: 1 (6)"),
        (lambda c, k: c.zadd(k.ready, {"6": 6}), "tickets that are in two places: 1 (6)"),
        (lambda c, k: c.hincrby(k.groups, 5, 1), "open tickets with a wrong count: 1 (5)"),
        (lambda c, k: c.hset(k.depth_by_version, "3:0", 2), "depth_by_version 3:0: 0 by keys, 2 by counters"),
    ],
)
async def test_the_audit_counts_keys_and_not_only_counters(redis_backend, change, finding):
    buffer = await started(redis_backend)
    slots = await buffer.admit("w", 0, 2 * N * G)
    await fill(buffer, [p for p in slots if p.ticket < N] + [RolloutSlot(4, 0), RolloutSlot(4, 1), RolloutSlot(5, 0)])
    await train(buffer, selected=3)
    found = await buffer.audit()
    assert (found.closes, found.kept) == (True, N * G + 3)
    await change(redis_backend.client, buffer.keys)
    assert finding in (await buffer.audit()).findings


async def test_a_second_copy_that_is_not_the_same_is_refused_while_its_payload_is_gone(redis_backend):
    buffer = await started(redis_backend)
    await buffer.admit("w", 0, G)
    await buffer.put(make_trajectory(0, 0))
    await redis_backend.client.delete(buffer.keys.payload("0:0"))
    assert await buffer.put(make_trajectory(0, 0)) == "duplicate"
    assert (await buffer.ledger()).finished == 1


async def test_the_audit_finds_the_keys_of_a_run_whose_name_looks_like_a_pattern(redis_backend):
    made = redis_backend.make()
    buffer = RedisBuffer(made.connection, "t[1]", make_limits())
    await start(buffer)
    await redis_backend.client.set(buffer.keys.payload("77:1"), "x")
    assert (await buffer.audit()).findings == ("orphaned: 1 (77:1)",)
    await buffer.reset()


async def test_a_commit_is_refused_of_foreign_trajectories_and_after_redis_has_lost_a_part_of_the_pool(redis_backend):
    """Also where only one is missing that was not selected: the ledger would not close."""
    buffer = await filled(redis_backend, pools=2)
    pool = await buffer.claim(0)
    with pytest.raises(BufferLost, match=f"{N}:0 is gone from pool 0"):
        await buffer.commit(pool, [*pool.trajectories[:2], make_trajectory(N)])
    assert (await buffer.ledger()).trained == 0
    await redis_backend.client.lrem(buffer.keys.pool(0), 1, pool.trajectories[-1].id)
    with pytest.raises(BufferLost, match="part of pool 0 is gone"):
        await buffer.commit(pool, pool.trajectories[:3])


async def test_a_learner_that_redis_does_not_know_yet_says_that_redis_has_lost_it(redis_backend):
    """A replica that was behind has been promoted: no other learner has taken over."""
    buffer = await started(redis_backend)
    buffer.epoch = 5
    with pytest.raises(BufferLost, match="newest learner has epoch 1, this one has 5"):
        await buffer.announce(1, "x")


async def test_a_replaced_learner_quarantines_nothing(redis_backend):
    old, new = await started(redis_backend), redis_backend.make()
    await fill(old, await old.admit("w", 0, N * G))
    await new.recover(0)
    with pytest.raises(Fenced):
        await old.run_script("quarantine", old.epoch, old.next_name(), "0:0", "it is bad")
    assert (await new.ledger()).quarantined == 0


async def test_a_trajectory_is_quarantined_from_whichever_pool_has_it(redis_backend):
    """After a recovery several pools wait to be trained on again."""
    buffer = await filled(redis_backend, max_staleness=3, pools=2)
    for step in range(2):
        await train(buffer, step=step, selected=4, method=MethodState(fields={"gone": 1}))
    await buffer.recover(0)
    assert not await redis_backend.client.hexists(buffer.keys.state, "gone"), "nothing is left of another method"
    assert (await buffer.fetch("0:0"))[1]["state"] == "claimed"
    assert await buffer.quarantine(f"{N}:1", "it is bad")
    assert (await buffer.ledger()).claimed == 2 * N * G - 1
    await train(buffer)
    assert len(await buffer.claim(1)) == N * G - 1


async def test_a_lost_next_ticket_is_the_one_after_the_last_that_is_somewhere(redis_backend):
    """The last one is in flight."""
    buffer = await started(redis_backend)
    await fill(buffer, (await buffer.admit("w", 0, (N + 2) * G))[:-G])
    await redis_backend.client.delete(buffer.keys.next_ticket)
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e2")
    assert [slot.ticket for slot in await buffer.admit("v", 0, G)] == [N + 2] * G


async def test_a_clock_that_is_gone_does_not_keep_the_leases_of_dead_workers(redis_backend):
    """It began at 0: a lease ended when the run had lasted as long again as before."""
    buffer = await started(redis_backend)
    await redis_backend.client.hset(buffer.keys.clock, "run", 10**9)
    await buffer.admit("w", 0, G)
    await redis_backend.client.delete(buffer.keys.clock)
    for _ in range(3):
        await buffer.heartbeat("other", [], WorkerStatus())
        await redis_backend.client.hincrby(buffer.keys.clock, "wall", -3_600_000)
    assert 0 in {slot.ticket for slot in await buffer.admit("other", 0, 4 * N * G)}


async def test_incomplete_groups_of_a_pool_that_is_gone_are_no_more(redis_backend):
    """They are generated again, and were counted twice."""
    buffer = await started(redis_backend, max_attempts=1)
    slots = await buffer.admit("w", 0, N * G)
    await fill(buffer, [slot for slot in slots if (slot.ticket, slot.rollout) != (0, 1)])
    await buffer.release("w", [0], failed=True)
    assert await buffer.claim(0) is not None
    assert (await buffer.ledger()).incomplete_groups == 1
    await redis_backend.client.delete(buffer.keys.pool(0))
    heir = await recovered(redis_backend, max_attempts=1)
    ledger = await heir.ledger()
    assert (ledger.incomplete_groups, ledger.failed_rollouts) == (0, 0)
    assert (await heir.audit()).findings == ()
