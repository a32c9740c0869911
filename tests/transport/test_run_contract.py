"""Who takes no part in a run, on both buffers: processes with other settings or data, and learners of other folders."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from cusearch_async.errors import ContractMismatch
from cusearch_async.run.identity import DATA, NOBODY, SERVED, Identity
from cusearch_async.transport.interface import MethodState, WorkerStatus
from tests.strategies import make_trajectory
from tests.transport.filling import G, N, all_raise, group, recovered, start, started

OURS = Identity({"run.seed": "0", "retriever.topk": "2", DATA: "3 (a)", SERVED: "bm25 (b)"})
OTHERS = {
    "run.seed": Identity({**OURS.terms, "run.seed": "7"}),
    DATA: Identity({**OURS.terms, DATA: "2 (c)"}),
    SERVED: OURS.with_retriever(None),
    "retriever.topk": Identity({key: text for key, text in OURS.terms.items() if key != "retriever.topk"}),
    "pool.rollouts": Identity({**OURS.terms, "pool.rollouts": "3"}),
}
"""Key -> one that differs in it; tests/run/test_identity.py has every key of a config."""


async def work(worker: Any) -> list[Any]:
    """What each of a worker's operations that takes or gives work answers."""
    answers = []
    for operation in (
        worker.check_identity(),
        worker.admit("w", 0, N * G),
        worker.put(make_trajectory(0, 0)),
        worker.heartbeat("w", [0], WorkerStatus()),
    ):
        try:
            answers.append(await operation)
        except ContractMismatch as error:
            answers.append(str(error))
    return answers


def assert_names(message: str, key: str, own: Identity, run: Identity) -> None:
    assert "\n" not in message
    assert f"{key} is {own.terms.get(key, 'not set')} here and {run.terms.get(key, 'not set')} in the run" in message
    assert "config.toml" in message
    assert ("cusearch reset" if key == "pool.rollouts" else "--accept-changes") in message


@pytest.mark.parametrize("key", OTHERS)
async def test_a_worker_with_another_value_is_refused_before_it_takes_a_ticket(backend, key):
    learner, worker = await started(backend, OURS), backend.make(OTHERS[key])
    before = await learner.state(), await learner.ledger()
    answers = await work(worker)
    assert len(set(answers)) == 1, "each says the same"
    assert_names(answers[0], key, OTHERS[key], OURS)
    assert (await learner.state(), await learner.ledger()) == before
    assert await learner.workers() == {}
    assert await backend.make(OURS).admit("v", 0, G) == group(0)


@pytest.mark.parametrize("key", OTHERS)
async def test_when_a_learner_changes_the_run_its_old_workers_are_refused_and_can_give_back(backend, key):
    await started(backend, OURS)
    worker = backend.make(OURS)
    assert await worker.check_identity()
    assert await worker.admit("w", 0, G) == group(0)
    heir = backend.make(OTHERS[key])
    await heir.recover(0, accepts_changes=True)
    await heir.announce(0, "v000000-e2")
    answers = await work(worker)
    assert len(set(answers)) == 1
    assert_names(answers[0], key, OURS, OTHERS[key])
    assert (await heir.ledger()).finished == 0
    await worker.leave("w", [0])
    fresh = backend.make(OTHERS[key])
    assert await fresh.check_identity()
    assert await fresh.admit("v", 0, G) == group(0)


@pytest.mark.parametrize("key", OTHERS)
async def test_a_second_learner_with_another_value_is_refused_and_the_first_continues(backend, key):
    learner, second = await started(backend, OURS), backend.make(OTHERS[key])
    before = await learner.state()
    with pytest.raises(ContractMismatch) as refused:
        await second.recover(0)
    assert_names(str(refused.value), key, OTHERS[key], OURS)
    assert await learner.state() == before
    assert await learner.identity() == OURS
    await learner.announce(1, "v000001-e1")
    assert await learner.claim(0) is None, "it is not fenced off"


async def test_a_learner_continues_with_the_same_contract_and_with_another_only_when_told_to(backend):
    await start(backend.make(OURS))
    await backend.make(OURS).recover(0)
    other = OTHERS["run.seed"]
    with pytest.raises(ContractMismatch, match=r"run\.seed is 7 here and 0 in the run"):
        await backend.make(other).recover(0)
    await backend.make(other).recover(0, accepts_changes=True)
    assert await backend.make().identity() == other
    fewer = Identity({key: text for key, text in other.terms.items() if key != "retriever.topk"})
    await backend.make(fewer).recover(0, accepts_changes=True)
    assert await backend.make().identity() == fewer, "nothing of the old one stays"
    with pytest.raises(ContractMismatch, match=r"run\.seed is 0 here and 7 in the run"):
        await backend.make(OURS).recover(0)


@pytest.mark.parametrize("change", [{"questions": 8}, {"rollouts": 3}, {"order": "deferred"}, {"defer": 3}], ids=str)
async def test_n_g_and_order_do_not_change_while_there_are_tickets_whoever_accepts_it(backend, change):
    learner, other = backend.make(OURS), OTHERS["run.seed"]
    await start(learner)
    await learner.admit("w", 0, G)
    with pytest.raises(ContractMismatch, match="granted with"):
        await backend.make(other, **change).recover(0, accepts_changes=True)
    assert await learner.claim(0) is None, "it is not fenced off"
    assert await learner.identity() == OURS


async def test_a_run_that_redis_has_forgotten_gets_its_contract_from_the_next_learner(backend):
    await start(backend.make(OURS))
    await backend.forget_everything()
    worker = backend.make(OURS)
    assert not await worker.check_identity()
    assert await worker.admit("w", 0, G) == [], "it waits"
    await start(backend.make(OTHERS["run.seed"]))
    assert await backend.make().identity() == OTHERS["run.seed"]


async def test_who_has_no_contract_can_look_into_a_run_and_take_no_part_in_it(backend):
    await start(backend.make(OURS))
    operator = backend.make()
    assert await operator.identity() == OURS
    assert await operator.capacities() == [0] * 6
    await operator.pause(True)
    await operator.pause(False)
    attempts = operator.check_identity(), operator.admit("w", 0, G), operator.recover(0)
    await all_raise(ContractMismatch, *attempts, match=r"run\.seed is not set here and 0 in the run")


async def test_a_run_without_a_contract_is_waited_for_and_nothing_of_it_is_taken(backend):
    """Its buffer has lost it, and its learner has not been started again yet."""
    await start(backend.make(NOBODY))
    worker = backend.make(OURS)
    assert not await worker.check_identity()
    put, heartbeat = worker.put(make_trajectory(0, 0)), worker.heartbeat("w", [], WorkerStatus())
    lost = r"Redis has lost the contract of run .*; start the learner again, it writes it"
    await all_raise(ContractMismatch, worker.admit("w", 0, G), put, heartbeat, match=lost)
    await start(backend.make(OURS))
    assert await worker.check_identity()
    assert await worker.admit("w", 0, G)


# --- another folder -------------------------------------------------------------------------------------

# an id that Lua takes for a number, and a folder with a blank
HERE = replace(OURS, run_id="12345678901234567890123456789012", host="here", folder="/home/us/my runs/atlas")
THERE = replace(OURS, run_id="12345678901234567890123456789013", host="there", folder="/home/them/runs/atlas")


async def test_a_second_run_of_the_same_name_is_refused_before_anything_is_written(backend):
    """Also one with other settings, and one that accepts changes; and before its limits or its steps are named."""
    buffer = backend.make(HERE)
    await buffer.recover(0, MethodState(fields={"phase": 1}))
    await buffer.announce(0, "v0")
    await buffer.admit("w", 0, 2)
    await buffer.put(make_trajectory(0, 0))
    await buffer.recover(2)
    before = await buffer.state(), await buffer.ledger()
    for second in (THERE, replace(THERE, terms={"run.seed": "7"})):
        for accepts in (False, True):
            other = backend.make(second, questions=3, max_staleness=0)
            for attempt in (
                other.check_identity(accepts),
                other.recover(0, MethodState(sizes={0: 7}), least_epoch=9, accepts_changes=accepts),
            ):
                with pytest.raises(ContractMismatch) as refused:
                    await attempt
                assert re.fullmatch(
                    "this process does not match run '.*': run.folder is /home/them/runs/atlas on there here and "
                    "/home/us/my runs/atlas on here in the run; use .*, or another run.name and run.folder; "
                    "`cusearch reset CONFIG --run.folder '/home/us/my runs/atlas'` deletes that run",
                    str(refused.value),
                )
    assert (await buffer.state(), await buffer.ledger()) == before
    assert await backend.sizes() == {}
    await buffer.announce(2, "v2")  # is still the learner


async def test_a_run_continues_from_wherever_its_folder_is_now(backend):
    await backend.make(HERE).recover(0)
    moved = replace(HERE, host="elsewhere", folder="/mnt/atlas")
    heir = await recovered(backend, moved)
    assert heir.epoch == 2
    assert await heir.identity() == moved


async def test_a_worker_of_a_run_that_was_deleted_joins_no_later_one_of_its_name(backend):
    """Its weights have the new run's names, so it would load none of them."""
    await start(backend.make(HERE))
    worker = backend.make(OURS)
    assert await worker.check_identity()
    (slot, *_) = await worker.admit("w", 0, G)
    await backend.make(OURS).reset()
    await start(backend.make(replace(THERE, terms=OURS.terms)))
    put = worker.put(make_trajectory(slot.ticket, slot.rollout))
    for attempt in (worker.admit("w", 0, G), put, worker.heartbeat("w", [0], WorkerStatus()), worker.check_identity()):
        with pytest.raises(ContractMismatch, match="that this process joined is gone"):
            await attempt
    assert (await worker.ledger()).finished == 0
    assert await backend.make(OURS).check_identity()


async def test_a_worker_needs_no_folder_of_the_run(backend):
    await start(backend.make(HERE))
    assert await backend.make(OURS).check_identity()
    assert await backend.make(OURS).admit("w", 0, G)


# --- in Redis -------------------------------------------------------------------------------------------


async def test_redis_holds_it_as_text_that_a_person_reads(redis_backend):
    buffer = await started(redis_backend, OURS)
    kept = {k.decode(): v.decode() for k, v in (await redis_backend.client.hgetall(buffer.keys.contract)).items()}
    assert kept == OURS.terms | {"digest": OURS.digest}
    assert kept["retriever.topk"] == "2"


async def test_a_put_that_is_refused_leaves_nothing_behind(redis_backend):
    learner, worker = await started(redis_backend, OURS), redis_backend.make(OTHERS["run.seed"])
    with pytest.raises(ContractMismatch):
        await worker.put(make_trajectory(0, 0))
    assert not [key async for key in redis_backend.client.scan_iter(match=learner.keys.staged("*"))]


async def test_limits_and_contract_that_are_gone_come_from_the_next_learner(redis_backend):
    buffer = await started(redis_backend, OURS)
    limits = await redis_backend.client.hgetall(buffer.keys.limits)
    await buffer.admit("w", 0, G)
    await redis_backend.client.delete(buffer.keys.limits, buffer.keys.contract)
    heir = await recovered(redis_backend, OURS)
    await heir.announce(0, "v000000-e2")
    assert await redis_backend.client.hgetall(heir.keys.limits) == limits
    assert await heir.identity() == OURS
    assert await heir.admit("w", 0, G) == group(1)


async def test_limits_that_are_gone_are_found_and_written_again(redis_backend):
    buffer = await started(redis_backend, OURS)
    await redis_backend.client.delete(buffer.keys.limits)
    assert (await buffer.audit()).findings == ("limits are missing: the next learner writes them again",)
    await buffer.recover(0)
    assert (await buffer.audit()).closes
