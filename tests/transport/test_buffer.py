"""What only the buffer in Redis has: payloads that may be damaged, workers to look at, a server that may be gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cusearch_async.config import RedisConfig
from cusearch_async.errors import BufferLost, BufferUnavailable
from cusearch_async.transport.buffer import RedisBuffer
from cusearch_async.transport.connection import Connection
from cusearch_async.transport.interface import ALIVE_S, LearnerStatus, RolloutSlot, WorkerStatus
from cusearch_async.types import PAYLOAD_SCHEMA
from tests.strategies import make_trajectory
from tests.transport.conftest import make_limits
from tests.transport.filling import G, N, fill, filled, group, recovered, run_steps, start, started, train


def recorded(buffer: RedisBuffer) -> dict[str, Any]:
    """By script: its newest call, to be delivered again."""
    sent: dict[str, Any] = {}
    run = buffer.run_script

    async def record(script: str, *arguments: Any) -> Any:
        sent[script] = lambda: run(script, *arguments)
        return await run(script, *arguments)

    buffer.run_script = record  # type: ignore[method-assign]
    return sent


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"CUS" + bytes([PAYLOAD_SCHEMA]) + b"rubbish", "checksum"),
        (b"", "does not start with the header of a trajectory"),
        (b"CUS\x00old!", "schema 0"),
        (b"x" * 2_000_000, "payload has 2000000 bytes"),
        (None, "the payload belongs to trajectory 0:0"),
    ],
)
async def test_a_payload_that_cannot_be_read_is_quarantined_and_generated_again(redis_backend, value, reason):
    buffer = await filled(redis_backend, max_staleness=0)
    client = redis_backend.client
    value = await client.get(buffer.keys.payload("0:0")) if value is None else value
    await client.set(buffer.keys.payload("2:1"), value)
    assert await buffer.claim(0) is None
    ledger = await buffer.ledger()
    assert (ledger.claimed, ledger.quarantined, ledger.buffered, ledger.closes) == (0, 1, N * G - 1, True)
    assert reason in (await client.hget(buffer.keys.quarantine, "2:1")).decode()
    assert await client.hget(buffer.keys.quarantined("2:1"), "state") == b"quarantined"
    assert await client.get(buffer.keys.quarantined_payload("2:1")) == value
    assert (await buffer.audit()).closes, "its ticket waits for a worker, and nowhere else"
    await fill(buffer, await buffer.admit("w", 0, N * G))
    assert len(await buffer.claim(0)) == N * G
    assert (await buffer.audit()).closes


async def test_a_pool_of_rubbish_is_generated_again_and_in_the_end_trained_as_an_empty_one(redis_backend):
    """As after an upgrade that changed the schema, with workers that were left at the old version."""
    buffer = await started(redis_backend, max_staleness=0, max_attempts=2)
    for attempt in range(2):
        await fill(buffer, await buffer.admit("w", 0, N * G))
        for key in [key async for key in redis_backend.client.scan_iter(match=buffer.keys.payload("*"))]:
            await redis_backend.client.set(key, "?")
        assert await buffer.claim(0) is None, f"attempt {attempt}"
    pool = await buffer.claim(0)
    assert len(pool) == 0
    await buffer.commit(pool, [])
    ledger = await buffer.ledger()
    assert (ledger.quarantined, ledger.incomplete_groups, ledger.closes) == (2 * N * G, N, True)
    assert (await buffer.audit()).closes


async def test_of_a_pool_that_was_taken_before_what_has_gone_is_counted_and_left_out(redis_backend):
    """The learner resumes from a checkpoint; the rest of the pool stays what it was."""
    buffer = await filled(redis_backend, max_staleness=0)
    pool = await train(buffer, selected=4)
    client, keys = redis_backend.client, buffer.keys
    await client.delete(keys.trajectory("0:0"))
    await client.delete(keys.payload("1:1"))
    await client.set(keys.payload("2:0"), "?")
    heir = await recovered(redis_backend, max_staleness=0)
    again = await heir.claim(0)
    assert [t.id for t in again] == [t.id for t in pool if t.id not in ("0:0", "1:1", "2:0")]
    assert [t.id for t in await heir.claim(0)] == [t.id for t in again]
    ledger = await heir.ledger()
    assert (ledger.lost, ledger.quarantined, ledger.claimed, ledger.trained, ledger.closes) == (2, 1, 5, 0, True)
    assert await client.exists(keys.trajectory("0:0")) == 0, "no stub is left where it was"
    await heir.commit(again, again.trajectories[:1])
    assert (await heir.audit()).closes


async def test_an_outage_longer_than_a_lease_costs_no_attempt(redis_backend):
    """Nobody could ask while Redis was away, so its clock seems to have jumped."""
    buffer = await started(redis_backend, lease_s=60.0)
    await buffer.admit("w", 0, G)
    for jump_s in (3600, -7200):
        wall, before = map(int, await redis_backend.client.hmget(buffer.keys.clock, "wall", "run"))
        await redis_backend.client.hset(buffer.keys.clock, "wall", wall - jump_s * 1000)
        assert RolloutSlot(0, 0) not in await buffer.admit("other", 0, G)
        assert 0 <= int(await redis_backend.client.hget(buffer.keys.clock, "run")) - before <= 30_000
        await buffer.heartbeat("w", [0], WorkerStatus())
    assert (await buffer.ledger()).requeued == 0
    deadline = await redis_backend.client.zscore(buffer.keys.lease, "0")
    assert deadline - int(await redis_backend.client.hget(buffer.keys.clock, "run")) <= 60_000


async def test_an_older_admission_that_arrives_late_takes_no_leases(redis_backend):
    buffer = await started(redis_backend)
    sent = recorded(buffer)
    await buffer.admit("w", 0, G)
    late = sent["admit"]
    await buffer.admit("w", 0, G)
    assert await late() == []
    assert (await buffer.state()).next_ticket == 2


async def test_an_admission_that_is_answered_again_after_the_learner_went_back_keeps_the_bound(redis_backend):
    buffer = await started(redis_backend, max_staleness=0)
    sent = recorded(buffer)
    await run_steps(buffer, 2)
    assert len(await buffer.admit("w", 2, 2 * G)) == 2 * G
    late = sent["admit"]
    heir = await recovered(redis_backend, max_staleness=0)
    await heir.announce(0, "v000000-e2")
    assert await late() == []
    assert (await redis_backend.tickets())["requeue"] == {2 * N, 2 * N + 1}


async def test_a_payload_that_is_dropped_on_its_way_is_sent_again(redis_backend):
    buffer = await started(redis_backend)
    slots = await buffer.admit("w", 0, 2 * G)
    send, drops = buffer._send, iter([2, 1, 0])

    async def send_with_a_loss(batch, client):
        for put in list(batch)[: next(drops)]:
            staged = put.staged
            object.__setattr__(put, "staged", staged + "-elsewhere")
        outcomes = await send(batch, client)
        for put in batch:
            object.__setattr__(put, "staged", put.staged.removesuffix("-elsewhere"))
        return outcomes

    buffer._send = send_with_a_loss
    made = [make_trajectory(p.ticket, p.rollout) for p in slots]
    assert await asyncio.gather(*(buffer.put(t) for t in made)) == ["stored"] * len(made)
    assert (await buffer.ledger()).finished == len(made)


async def test_a_server_that_drops_every_payload_is_named(redis_backend):
    buffer = await started(redis_backend)
    await buffer.admit("w", 0, G)

    async def send_to_nowhere(batch, client):
        return [b"unstaged"] * len(batch)

    buffer._send = send_to_nowhere
    with pytest.raises(BufferLost, match=r"dropped the payload of trajectory 0:0 .* 3 times.*maxmemory-policy"):
        await buffer.put(make_trajectory(0, 0))


async def test_workers_that_have_been_silent_for_an_hour_are_forgotten(redis_backend):
    buffer = await started(redis_backend)
    client = redis_backend.client
    await buffer.admit("dead", 0, G)
    await buffer.heartbeat("dead", [], WorkerStatus(version=0))
    beat = await client.zscore(buffer.keys.workers, "dead")
    await client.zadd(buffer.keys.workers, {"dead": beat - 3_601_000})
    await buffer.heartbeat("alive", [], WorkerStatus(version=0))
    assert (await buffer.workers()).keys() == {"alive"}
    assert 3590 < await client.ttl(buffer.keys.worker("dead")) <= 3600


@pytest.mark.system
async def test_the_newest_thousand_of_the_quarantine_are_kept(redis_backend):
    buffer = await started(redis_backend, questions=1001, rollouts=1)
    client = redis_backend.client
    await fill(buffer, await buffer.admit("w", 0, 1001))
    for ticket in range(1001):
        assert await buffer.quarantine(f"{ticket}:0", "strange")
    reasons = await client.hkeys(buffer.keys.quarantine)
    assert len(reasons) == 1000
    assert b"0:0" not in reasons
    assert await client.exists(buffer.keys.quarantined("0:0"), buffer.keys.quarantined_payload("0:0")) == 0
    assert (await buffer.ledger()).quarantined == 1001


async def test_what_waits_is_counted_by_depth_and_version(redis_backend):
    buffer = await started(redis_backend)
    await fill(buffer, await buffer.admit("w", 0, N * G), depth=2)
    await buffer.admit("w", 0, G)
    await buffer.put(make_trajectory(N, 0, depth=4))
    assert await redis_backend.client.hgetall(buffer.keys.depth_by_version) == {b"2:0": b"8", b"4:0": b"1"}
    await buffer.claim(0)
    assert await redis_backend.client.hgetall(buffer.keys.depth_by_version) == {b"4:0": b"1"}


async def test_heartbeats_show_who_works_on_what(redis_backend):
    buffer = await started(redis_backend)
    await buffer.heartbeat("w7", [], WorkerStatus(version=3, busy_s=1.5))
    workers = await buffer.workers()
    assert workers["w7"].version == 3
    assert workers["w7"].heartbeat_age_s < 5 < ALIVE_S
    assert workers["w7"].is_alive
    day_ms = 86_400_000
    seconds, _ = await redis_backend.client.time()
    await redis_backend.client.zadd(buffer.keys.workers, {"w7": 1000 * seconds + day_ms})
    assert not (await buffer.workers())["w7"].is_alive, "the server's clock was a day ahead"
    await buffer.heartbeat("w8", [], WorkerStatus())
    assert set(await buffer.workers()) == {"w8"}


@pytest.mark.parametrize("who", ["worker", "learner"])
async def test_a_status_that_nobody_of_ours_has_written_is_damage(redis_backend, who):
    buffer = await started(redis_backend)
    await buffer.heartbeat("w", [], WorkerStatus())
    await buffer.learner_heartbeat(LearnerStatus(epoch=1, host="a", pid=7, step=0))
    key, field = (buffer.keys.worker("w"), "version") if who == "worker" else (buffer.keys.learner, "pid")
    await redis_backend.client.hset(key, field, "soon")
    with pytest.raises(BufferLost, match=f"is damaged, or was written by another program .*{field}"):
        await (buffer.workers() if who == "worker" else buffer.learner())


async def test_a_worker_that_leaves_gives_its_tickets_back_and_is_not_shown(redis_backend):
    buffer = await started(redis_backend)
    await buffer.admit("w", 0, G)
    await buffer.heartbeat("w", [0], WorkerStatus(version=0))
    await buffer.leave("w", [0])
    assert await buffer.workers() == {}
    assert await buffer.admit("other", 0, G) == group(0)


async def test_reset_deletes_this_run_and_no_other(redis_backend):
    buffer = await started(redis_backend)
    client = redis_backend.client
    await client.set("cusearch:{other}:state", "kept")
    assert await buffer.reset() > 0
    assert await client.exists(buffer.keys.state) == 0
    assert await client.get("cusearch:{other}:state") == b"kept"


async def test_no_redis_is_one_clear_error():
    connection = Connection(RedisConfig(url="redis://127.0.0.1:1/0"), patience_s=0.1)
    with pytest.raises(BufferUnavailable, match=r"127\.0\.0\.1:1 cannot be reached.*cusearch redis"):
        await RedisBuffer(connection, "x", make_limits()).state()


async def test_a_grant_that_is_asked_for_again_with_its_token_is_the_same(redis_backend):
    buffer = await started(redis_backend)
    buffer._numbers = iter([7, 7, 8])
    first = await buffer.admit("w", 0, 2 * G)
    assert await buffer.admit("w", 0, 2 * G) == first
    assert (await buffer.state()).next_ticket == 2
    assert await buffer.admit("w", 0, G) == group(2)


async def test_a_release_that_arrives_late_ends_no_later_lease(redis_backend):
    """One whose answer is lost is sent again; where both arrive, the second one counted as another failed attempt."""
    buffer = await started(redis_backend)
    await buffer.admit("w", 0, G)
    released = ["release", "w", buffer.next_name(), 1, 0, 0]
    await buffer.run_script(*released)
    assert await buffer.admit("w", 0, G) == group(0)
    await buffer.run_script(*released)
    assert await buffer.admit("other", 0, G) == group(1)
    await buffer.release("w", [0], failed=True)
    assert await buffer.admit("other", 0, G) == group(0)


async def test_concurrent_puts_go_together_and_each_gets_its_own_answer(redis_backend):
    buffer = await started(redis_backend, max_staleness=9)
    slots = await buffer.admit("w", 0, 10 * N * G)
    twice = [make_trajectory(p.ticket, p.rollout, worker=w) for p in slots for w in ("first", "second")]
    before = (await redis_backend.client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    outcomes = await asyncio.gather(*(buffer.put(t) for t in twice), buffer.put(make_trajectory(10**6, 0)))
    calls = (await redis_backend.client.info("commandstats"))["cmdstat_evalsha"]["calls"] - before
    assert outcomes == ["stored", "duplicate"] * len(slots) + ["late"]
    assert calls < len(twice) / 4
    assert not [key async for key in redis_backend.client.scan_iter(match=buffer.keys.staged("*"))]


async def test_a_put_that_is_cancelled_takes_no_other_with_it(redis_backend):
    buffer = await started(redis_backend, max_staleness=9)
    slots = await buffer.admit("w", 0, 10 * N * G)
    puts = [asyncio.create_task(buffer.put(make_trajectory(p.ticket, p.rollout))) for p in slots]
    await asyncio.sleep(0)
    for put in puts[::2]:  # the first of them is sending for all
        put.cancel()
    assert await asyncio.gather(*puts[1::2]) == ["stored"] * len(puts[1::2])
    ledger = await buffer.ledger()
    assert ledger.closes
    assert ledger.finished >= len(puts[1::2])


async def test_a_recover_that_is_delivered_again_takes_over_once(redis_backend):
    """Redis gets the very same command again after the learner has gone on."""
    buffer = redis_backend.make(max_staleness=0)
    sent = recorded(buffer)
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, N * G))
    await train(buffer)
    before = await buffer.state()
    assert await sent["recover"]() == buffer.epoch
    assert await buffer.state() == before


async def test_a_quarantine_that_is_delivered_again_leaves_what_came_after_it(redis_backend):
    """The good trajectory that was generated in its place was quarantined for the reason of the bad one."""
    buffer = await started(redis_backend, max_staleness=0)
    sent = recorded(buffer)
    await fill(buffer, await buffer.admit("w", 0, N * G))
    assert await buffer.quarantine("0:1", "it is bad")
    first = sent["quarantine"]
    (slot,) = await buffer.admit("w", 0, N * G)
    await fill(buffer, [slot])
    assert await buffer.quarantine("0:0", "it is bad, too")
    assert await first() == 1, "as it was answered"
    assert (await buffer.ledger()).quarantined == 2
    assert await redis_backend.client.exists(buffer.keys.payload("0:1"), buffer.keys.quarantined_payload("0:1")) == 2
    assert await buffer.quarantine("0:1", "another is bad")


async def test_after_a_step_back_of_the_servers_clock_a_dead_learner_is_not_alive(redis_backend):
    """Its last word was valid for as long as the clock had gone back, and commands refused the run meanwhile."""
    buffer = await recovered(redis_backend)
    await buffer.learner_heartbeat(LearnerStatus(epoch=1, host="a", pid=7, step=0))
    assert await buffer.learner() is not None
    await redis_backend.client.pexpire(redis_backend.keys.learner, 3_600_000)
    assert await buffer.learner() is None


async def test_a_learner_that_says_nothing_any_more_is_gone_by_itself(redis_backend):
    buffer = await recovered(redis_backend)
    await buffer.learner_heartbeat(LearnerStatus(epoch=1, host="a", pid=7, step=0))
    left_ms = await redis_backend.client.pttl(redis_backend.keys.learner)
    assert 0 < left_ms <= ALIVE_S * 1000


async def test_a_payload_that_is_stored_does_not_expire(redis_backend):
    """One that is on its way does."""
    buffer = await started(redis_backend)
    await fill(buffer, (await buffer.admit("w", 0, G))[:1])
    for key in (buffer.keys.payload("0:0"), buffer.keys.trajectory("0:0")):
        assert await redis_backend.client.ttl(key) == -1


async def test_failed_attempts_are_forgotten_with_the_claim(redis_backend):
    """The keys of a run do not grow with its steps."""
    buffer = await started(redis_backend, max_attempts=3)
    slots = await buffer.admit("w", 0, N * G)
    await buffer.release("w", [0], failed=True)
    assert (await redis_backend.tickets())["attempts"] == {0: 1}
    await fill(buffer, [*slots[G:], *await buffer.admit("w", 0, G)])
    assert len(await buffer.claim(0)) == N * G
    assert (await redis_backend.tickets())["attempts"] == {}


async def test_a_pool_that_changes_while_it_is_checked_is_not_taken(redis_backend):
    """In the order of completion: an older group is ready before the pool that was looked at is taken."""
    buffer = await started(redis_backend, order="oldest_complete")
    slots = await buffer.admit("w", 0, 2 * N * G)
    late = [slot for slot in slots if slot.ticket == 0]
    await fill(buffer, [slot for slot in slots if slot.ticket > 0])
    run = buffer.run_script

    async def with_a_late_group(script: str, *arguments: Any) -> Any:
        if "take" in arguments and late:
            await fill(buffer, [late.pop() for _ in range(G)])
        return await run(script, *arguments)

    buffer.run_script = with_a_late_group  # type: ignore[method-assign]
    assert await buffer.claim(0) is None
    assert {t.ticket for t in await buffer.claim(0)} == set(range(N))


async def test_a_pool_that_grows_while_it_is_checked_is_not_taken(redis_backend):
    """An operator requeues its incomplete group, the last one, and a worker generates the missing rollouts."""
    buffer = await started(redis_backend, max_attempts=1)
    last = RolloutSlot(N - 1, G - 1)
    await fill(buffer, [slot for slot in await buffer.admit("w", 0, N * G) if slot != last])
    await buffer.release("w", [last.ticket], failed=True)
    run = buffer.run_script
    lacking = [last]

    async def with_what_it_lacks(script: str, *arguments: Any) -> Any:
        if "take" in arguments and lacking:
            assert await buffer.reopen(last.ticket)
            assert (await buffer.admit("w", 0, 1)) == [lacking.pop()]
            await fill(buffer, [last])
        return await run(script, *arguments)

    buffer.run_script = with_what_it_lacks  # type: ignore[method-assign]
    assert await buffer.claim(0) is None
    assert len(await buffer.claim(0)) == N * G


async def test_redis_shows_the_policys_version_beside_the_step(redis_backend):
    buffer = await filled(redis_backend)
    await train(buffer)
    assert await redis_backend.client.hmget(buffer.keys.state, "step", "version") == [b"1", b"1"]
    await redis_backend.make().recover(0)
    assert await redis_backend.client.hmget(buffer.keys.state, "step", "version") == [b"0", b"0"]


async def test_a_requeue_that_is_sent_again_takes_no_lease_of_another_worker(redis_backend):
    """Its first answer was lost: the second said that nothing was done, or ended the lease that came after it."""
    buffer = await started(redis_backend)
    await buffer.admit("w", 0, G)
    sent = recorded(buffer)
    assert await buffer.reopen(0)
    await buffer.admit("v", 0, G)
    assert await sent["reopen"]() == 1
    assert await redis_backend.client.hget(buffer.keys.owner, 0) == b"v"
    assert await buffer.reopen(0), "a later one is another"
