"""What only the buffer in Redis has: payloads that may be damaged, workers to look at, a server that may be gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cusearch_async.algorithm.methods import State
from cusearch_async.config import RedisConfig
from cusearch_async.errors import BufferUnavailable, EmptyPool
from cusearch_async.transport.buffer import RedisBuffer
from cusearch_async.transport.connection import Connection
from cusearch_async.transport.contract import LEARNER_ALIVE_S, Place
from tests.strategies import make_trajectory
from tests.transport.conftest import make_shape
from tests.transport.test_contract import G, N, fill, start


def recorded(buffer: RedisBuffer) -> dict[str, Any]:
    """By script: its newest call, to be delivered again."""
    sent: dict[str, Any] = {}
    run = buffer._run

    async def record(script: str, *arguments: Any) -> Any:
        sent[script] = lambda: run(script, *arguments)
        return await run(script, *arguments)

    buffer._run = record  # type: ignore[method-assign]
    return sent


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("payload", b"CUS\x01rubbish", "checksum"),
        ("payload", b"", "does not start like a trajectory"),
        ("payload", b"CUS\x00old!", "schema 0"),
        ("payload", None, "the payload is missing"),
        ("payload", b"x" * 2_000_000, "payload of 2000000 bytes"),
        ("depth", None, ""),
    ],
)
async def test_what_cannot_be_read_is_quarantined_and_the_pool_goes_on_without_it(redis_backend, field, value, reason):
    buffer = redis_backend.make(max_staleness=0)
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, N * G))
    if field == "depth":
        await redis_backend.client.hdel(buffer.keys.trajectory("2:1"), field)
    elif value is None:
        await redis_backend.client.delete(buffer.keys.payload("2:1"))
    else:
        await redis_backend.client.set(buffer.keys.payload("2:1"), value)
    pool = await buffer.claim(0)
    ledger = await buffer.ledger()
    assert ledger.closes
    if field == "depth":
        assert len(pool) == N * G, "the payload itself is whole"
        return
    assert [t.id for t in pool] == [f"{t}:{r}" for t in range(N) for r in range(G) if (t, r) != (2, 1)]
    assert (ledger.claimed, ledger.quarantined) == (N * G - 1, 1)
    assert reason in (await redis_backend.client.hget(buffer.keys.quarantine, "2:1")).decode()
    assert await redis_backend.client.hget(buffer.keys.quarantined("2:1"), "state") == b"quarantined"
    assert await redis_backend.client.get(buffer.keys.quarantined_payload("2:1")) == value
    again = await buffer.claim(0)
    assert [t.id for t in again] == [t.id for t in pool]


async def test_a_payload_of_another_trajectory_is_quarantined(redis_backend):
    buffer = redis_backend.make(max_staleness=0)
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, N * G))
    foreign = await redis_backend.client.get(buffer.keys.payload("0:0"))
    await redis_backend.client.set(buffer.keys.payload("3:1"), foreign)
    await buffer.claim(0)
    reason = await redis_backend.client.hget(buffer.keys.quarantine, "3:1")
    assert reason == b"the payload is of trajectory 0:0"


async def test_a_pool_of_rubbish_is_an_error_that_says_where_to_look(redis_backend):
    buffer = redis_backend.make(max_staleness=0)
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, N * G))
    for ticket in range(N):
        for rollout in range(G):
            await redis_backend.client.set(buffer.keys.payload(f"{ticket}:{rollout}"), "?")
    with pytest.raises(EmptyPool, match="cusearch buffer quarantine"):
        await buffer.claim(0)


async def test_heat_counts_what_waits_by_depth_and_version(redis_backend):
    buffer = redis_backend.make()
    await start(buffer)
    await fill(buffer, await buffer.admit("w", 0, N * G), depth=2)
    await buffer.admit("w", 0, G)
    await buffer.put(make_trajectory(N, 0, depth=4))
    assert await redis_backend.client.hgetall(buffer.keys.heat) == {b"2:0": b"8", b"4:0": b"1"}
    await buffer.claim(0)
    assert await redis_backend.client.hgetall(buffer.keys.heat) == {b"4:0": b"1"}


async def test_heartbeats_show_who_works_on_what(redis_backend):
    buffer = redis_backend.make()
    await start(buffer)
    await buffer.heartbeat("w7", [], {"version": 3, "busy_s": 1.5})
    workers = await buffer.workers()
    assert workers["w7"]["version"] == "3"
    assert float(workers["w7"]["heartbeat_age_s"]) < 5


async def test_a_worker_that_leaves_gives_its_tickets_back_and_is_not_shown(redis_backend):
    buffer = redis_backend.make()
    await start(buffer)
    await buffer.admit("w", 0, G)
    await buffer.heartbeat("w", [0], {"version": 0})
    await buffer.leave("w", [0])
    assert await buffer.workers() == {}
    assert await buffer.admit("other", 0, G) == [Place(0, 0), Place(0, 1)]


async def test_reset_deletes_this_run_and_no_other(redis_backend):
    buffer = redis_backend.make()
    await start(buffer)
    client = redis_backend.client
    await client.set("cusearch:{other}:state", "kept")
    assert await buffer.reset() > 0
    assert await client.exists(buffer.keys.state) == 0
    assert await client.get("cusearch:{other}:state") == b"kept"


async def test_no_redis_is_one_clear_error():
    connection = Connection(RedisConfig(url="redis://127.0.0.1:1/0"), patience_s=0.1)
    with pytest.raises(BufferUnavailable, match=r"127\.0\.0\.1:1 cannot be reached.*cusearch redis"):
        await RedisBuffer(connection, "x", make_shape()).state()


async def test_a_grant_that_is_asked_for_again_with_its_token_is_the_same(redis_backend):
    buffer = redis_backend.make()
    await start(buffer)
    buffer._numbers = iter([7, 7, 8])
    first = await buffer.admit("w", 0, 2 * G)
    assert await buffer.admit("w", 0, 2 * G) == first
    assert (await buffer.state()).next_ticket == 2
    assert await buffer.admit("w", 0, G) == [Place(2, 0), Place(2, 1)]


async def test_concurrent_puts_go_together_and_each_gets_its_own_answer(redis_backend):
    buffer = redis_backend.make(max_staleness=9)
    await start(buffer)
    places = await buffer.admit("w", 0, 10 * N * G)
    twice = [make_trajectory(p.ticket, p.rollout, worker=w) for p in places for w in ("first", "second")]
    before = (await redis_backend.client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    outcomes = await asyncio.gather(*(buffer.put(t) for t in twice), buffer.put(make_trajectory(10**6, 0)))
    calls = (await redis_backend.client.info("commandstats"))["cmdstat_evalsha"]["calls"] - before
    assert outcomes == ["stored", "duplicate"] * len(places) + ["late"]
    assert calls < len(twice) / 4
    assert not [key async for key in redis_backend.client.scan_iter(match=buffer.keys.staged("*"))]


async def test_a_put_that_is_cancelled_takes_no_other_with_it(redis_backend):
    buffer = redis_backend.make(max_staleness=9)
    await start(buffer)
    places = await buffer.admit("w", 0, 10 * N * G)
    puts = [asyncio.create_task(buffer.put(make_trajectory(p.ticket, p.rollout))) for p in places]
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
    pool = await buffer.claim(0)
    await buffer.commit(pool, pool.trajectories, State(), {})
    before = await buffer.state()
    assert await sent["recover"]() == buffer.epoch
    assert await buffer.state() == before


async def test_a_learner_that_says_nothing_any_more_is_gone_by_itself(redis_backend):
    buffer = redis_backend.make()
    await buffer.recover(0, State(), {})
    await buffer.learner_heartbeat({"pid": 7})
    left_ms = await redis_backend.client.pttl(redis_backend.keys.learner)
    assert 0 < left_ms <= LEARNER_ALIVE_S * 1000
