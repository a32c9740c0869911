"""What an operator may do to a run; on both buffers."""

from __future__ import annotations

from cusearch_async.transport.interface import RolloutSlot
from tests.strategies import make_trajectory
from tests.transport.filling import G, fill, filled, group, start, started


async def test_an_operator_can_reopen_what_is_incomplete_or_is_stuck(backend):
    buffer = await started(backend, max_attempts=1)
    await buffer.admit("w", 0, 2 * G)
    await buffer.put(make_trajectory(0, 1))
    await buffer.release("w", [0], failed=True)
    assert await buffer.reopen(0)
    assert await buffer.reopen(1), "a lease is taken away"
    assert not await buffer.reopen(7)
    assert await buffer.admit("v", 0, 3) == [RolloutSlot(0, 0), RolloutSlot(1, 0), RolloutSlot(1, 1)]
    await fill(buffer, [RolloutSlot(0, 0)])
    assert not await buffer.reopen(0), "a complete group is left alone"
    ledger = await buffer.ledger()
    assert (ledger.incomplete_groups, ledger.failed_rollouts, ledger.finished) == (0, 0, 2)


async def test_a_quarantined_trajectory_of_an_open_group_is_generated_again(backend):
    buffer = await started(backend)
    await buffer.admit("w", 0, G)
    await buffer.put(make_trajectory(0, 0))
    assert await buffer.quarantine("0:0", "strange")
    assert not await buffer.quarantine("0:0", "again")
    assert not await buffer.quarantine("9:9", "never there")
    assert await buffer.quarantined() == {"0:0": "strange"}
    found = await buffer.fetch("0:0")
    assert found is not None
    assert (found[0].id, found[1]["state"]) == ("0:0", "quarantined")
    ledger = await buffer.ledger()
    assert (ledger.buffered, ledger.quarantined, ledger.bytes, ledger.closes) == (0, 1, 0, True)
    await buffer.release("w", [0], failed=False)
    assert await buffer.admit("v", 0, G) == group(0)
    await fill(buffer, group(0))
    assert await buffer.capacities() == [0, 2, 0, 0, 0, 0]


async def test_a_paused_run_admits_nobody_and_takes_what_is_in_flight(backend):
    buffer = await started(backend)
    slots = await buffer.admit("w", 0, G)
    await buffer.pause(True)
    assert (await buffer.state()).paused
    assert await buffer.admit("w", 0, G) == []
    await fill(buffer, slots)
    await buffer.pause(False)
    assert await buffer.admit("w", 0, G) == group(1)


async def test_a_run_that_no_learner_has_taken_over_does_not_exist(backend):
    buffer = backend.make()
    await buffer.pause(True)
    assert not (await buffer.state()).exists
    await start(buffer)
    assert (await buffer.state()).exists


async def test_a_claimed_trajectory_can_be_taken_out_by_an_operator(backend):
    """The way out for a learner that one trajectory ends at every start."""
    buffer = await filled(backend)
    pool = await buffer.claim(0)
    assert await buffer.quarantine("2:1", "the learner dies of it")
    assert not await buffer.quarantine("2:1", "again")
    again = await buffer.claim(0)
    assert [t.id for t in again] == [t.id for t in pool if t.id != "2:1"]
    await buffer.commit(pool, pool.trajectories[-4:])
    ledger = await buffer.ledger()
    assert (ledger.trained, ledger.unselected, ledger.quarantined, ledger.closes) == (3, 4, 1, True)
    assert not await buffer.quarantine("0:0", "it is trained on already")


async def test_a_group_of_which_one_was_taken_out_is_closed_when_all_are_there_again(backend):
    buffer = await started(backend)
    await buffer.admit("w", 0, G)
    await fill(buffer, [RolloutSlot(0, 0)])
    assert await buffer.quarantine("0:0", "strange")
    await fill(buffer, group(0))
    assert not await buffer.reopen(0), "it waits for a learner, and is leased no more"
