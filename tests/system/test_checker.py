"""The judge of the chaos campaigns finds every planted fault, and none where there is none."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.conftest import SLOW
from tests.system.chaos.campaign import EVERYTHING, is_raw, plan
from tests.system.chaos.checker import Event, Expected, judge, judge_files, judge_keys, judge_memory
from tests.system.chaos.faults import KINDS
from tests.system.chaos.proxy import end_of_commands
from tests.system.chaos.scene import fresh_folder

pytestmark = pytest.mark.system

N, G, STEPS = 2, 2, 3
EXPECTED = Expected(
    questions=N, rollouts=G, max_staleness=1, defer=0, vocabulary=384, question_of=lambda ticket: f"question {ticket}"
)


def trajectory(ticket: int, rollout: int, step: int) -> Event:
    return {
        "id": f"{ticket}:{rollout}",
        "question": f"question {ticket}",
        "oldest": max(0, step - 1),
        "newest": step,
        "tokens": [3, 383],
        "special": 0,
        "digest": f"digest of {ticket}:{rollout}",
    }


def clean_run() -> list[Event]:
    """Three steps of one learner, epoch 1."""
    events: list[Event] = [{"event": "recover", "epoch": 1, "step": 0}]
    for step in range(STEPS):
        tickets = [*range(step * N, (step + 1) * N)]
        pool = [trajectory(ticket, rollout, step) for ticket in tickets for rollout in range(G)]
        events += [{"event": "put", "id": t["id"], "digest": t["digest"]} for t in pool]
        facts = {"tickets": tickets, "lacking": {}, "counted": []}
        events.append({"event": "claim", "epoch": 1, "step": step, "pool": pool, **facts})
        events.append({"event": "commit", "epoch": 1, "step": step, "selected": [pool[0]["id"]]})
    return events


def claim(events: list[Event], step: int) -> Any:
    return next(e for e in events if e["event"] == "claim" and e["step"] == step)


def test_a_clean_run_is_clean():
    verdict = judge(clean_run(), STEPS, EXPECTED)
    assert not verdict.counts.total()
    assert (verdict.staleness_max, verdict.trajectories) == (1, STEPS * N * G)


def foreign_trajectory(events: list[Event]) -> None:
    claim(events, 1)["pool"].append(trajectory(99, 0, 1))


def trajectory_nobody_put(events: list[Event]) -> None:
    claim(events, 1)["pool"][0]["digest"] = "another"


def trajectory_lost(events: list[Event]) -> None:
    claim(events, 1)["pool"].pop()


def group_lost(events: list[Event]) -> None:
    del claim(events, 1)["pool"][2:]


def trained_in_two_steps(events: list[Event]) -> None:
    claim(events, 2)["pool"][0] = dict(claim(events, 1)["pool"][0])


def too_old(events: list[Event]) -> None:
    claim(events, 2)["pool"][3]["oldest"] = 0


def from_the_future(events: list[Event]) -> None:
    claim(events, 1)["pool"][3]["newest"] = 2


def token_outside_the_vocabulary(events: list[Event]) -> None:
    claim(events, 1)["pool"][3]["tokens"] = [0, 384]


def special_token_in_a_passage(events: list[Event]) -> None:
    claim(events, 1)["pool"][3]["special"] = 1


def another_question(events: list[Event]) -> None:
    claim(events, 1)["pool"][2]["question"] = "question 0"


def ticket_taken_again(events: list[Event]) -> None:
    claim(events, 2)["tickets"].append(1)
    claim(events, 2)["lacking"] = {"1": G}


def ticket_too_few(events: list[Event]) -> None:
    claim(events, 2)["tickets"].pop()
    del claim(events, 2)["pool"][G:]


def selected_from_elsewhere(events: list[Event]) -> None:
    next(e for e in events if e["event"] == "commit" and e["step"] == 1)["selected"] = ["0:0"]


def step_nobody_committed(events: list[Event]) -> None:
    events[:] = [e for e in events if not (e["event"] == "commit" and e["step"] == 1)]


def committed_by_an_old_learner(events: list[Event]) -> None:
    for event in events:
        if event.get("step") == 1 and event["event"] in ("claim", "commit"):
            event["epoch"] = 2


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (foreign_trajectory, {"wrong_pools", "foreign"}),
        (trajectory_nobody_put, {"foreign"}),
        (trajectory_lost, {"lost"}),
        (group_lost, {"lost"}),
        (trained_in_two_steps, {"lost", "wrong_pools", "trained_twice", "beyond_bound"}),
        (too_old, {"beyond_bound"}),
        (from_the_future, {"beyond_bound"}),
        (token_outside_the_vocabulary, {"foreign"}),
        (special_token_in_a_passage, {"foreign"}),
        (another_question, {"wrong_pools"}),
        (selected_from_elsewhere, {"wrong_pools"}),
        (ticket_taken_again, {"wrong_pools"}),
        (ticket_too_few, {"wrong_pools"}),
        (step_nobody_committed, {"not_committed"}),
        (committed_by_an_old_learner, {"old_learner_committed"}),
    ],
)
def test_a_planted_fault_is_found(plant: Callable[[list[Event]], None], found: set[str]):
    events = clean_run()
    plant(events)
    assert {name for name, count in judge(events, STEPS, EXPECTED).counts.items() if count} == found


@pytest.mark.parametrize(("defer", "wrong"), [(0, 1), (1, 0)])
def test_a_ticket_may_miss_as_many_pools_as_its_order_allows(defer: int, wrong: int):
    """Ticket 3 is in the pool of step 2, and 5 in that of step 1."""
    events = clean_run()
    for step, old, new in ((1, 3, 5), (2, 5, 3)):
        own = claim(events, step)
        own["tickets"] = [new if ticket == old else ticket for ticket in own["tickets"]]
        own["pool"] = [trajectory(ticket, rollout, step) for ticket in own["tickets"] for rollout in range(G)]
    expected = dataclasses.replace(EXPECTED, defer=defer)
    assert judge(events, STEPS, expected).counts["wrong_pools"] == wrong


def test_what_a_pool_says_it_lacks_is_no_loss():
    events = clean_run()
    claim(events, 1)["pool"].pop()
    claim(events, 1)["lacking"] = {"3": 1}
    verdict = judge(events, STEPS, EXPECTED)
    assert not verdict.counts.total()
    assert verdict.incomplete_groups == 1


def test_the_pool_of_a_step_is_the_one_that_the_last_learner_committed():
    """The learner of epoch 2 takes over at step 1; what the first one did of it does not count, whatever it was."""
    events = clean_run()
    repeated = [dict(e, epoch=2) for e in events if e.get("step", 0) >= 1]
    claim(events, 1)["pool"] = []
    verdict = judge([*events, {"event": "recover", "epoch": 2, "step": 1}, *repeated], STEPS, EXPECTED)
    assert not verdict.counts.total()


def test_what_was_trained_behind_the_end_of_the_run_does_not_count():
    """The learner of epoch 2 goes back to step 1 and is stopped after it; the first one had done step 2 as well."""
    events = clean_run()
    events += [dict(e, epoch=2) for e in events if e.get("step") == 1]
    assert not judge(events, 2, EXPECTED).counts.total()
    assert judge(events, 3, EXPECTED).counts == {"old_learner_committed": 1}


@pytest.mark.parametrize(("kept", "lost"), [(True, 0), (False, 1)])
def test_only_of_a_pool_that_was_taken_before_may_a_trajectory_be_counted_as_lost(kept: bool, lost: int):
    events = clean_run()
    if kept:
        events += [dict(e, epoch=2) for e in events if e.get("step") == 1]
    last = [e for e in events if e["event"] == "claim" and e["step"] == 1][-1]
    last |= {"pool": last["pool"][1:], "counted": [last["pool"][0]["id"]]}
    verdict = judge(events, 2, EXPECTED)
    assert (verdict.counts["lost"], verdict.counted_lost) == (lost, 1 - lost)


def test_what_an_earlier_learner_counted_of_a_pool_is_not_counted_again():
    """It took the pool, found one deleted, and died; the next one found the pool as it was then."""
    events = clean_run()
    of_first = [dict(e) for e in events if e.get("step") == 1]
    for epoch in (2, 3):
        events += [dict(e, epoch=epoch) for e in of_first if e["event"] == "claim" or epoch == 3]
    second, third = [e for e in events if e["event"] == "claim" and e["step"] == 1][1:]
    second |= {"pool": second["pool"][1:], "counted": [second["pool"][0]["id"]]}
    third |= {"pool": third["pool"][1:]}
    verdict = judge(events, 2, EXPECTED)
    assert (verdict.counts["lost"], verdict.counted_lost) == (0, 1)


def lay_out(client: redis.Redis) -> str:
    """One pool of two trained trajectories and one that waits, as the scripts leave them."""
    prefix = "cusearch:{judged}:"
    client.delete(*client.keys(prefix.replace("{", "[{]").replace("}", "[}]") + "*") or ["none"])
    for id_, state in (("0:0", "trained"), ("0:1", "unselected"), ("1:0", "buffered")):
        client.hset(f"{prefix}traj:{id_}", "state", state)
        client.set(f"{prefix}payload:{id_}", "bytes")
    client.rpush(f"{prefix}pool:0", "0:0", "0:1")
    client.zadd(f"{prefix}depth:2", {"1:0": 1})
    client.hset(f"{prefix}ledger", mapping={"finished": 3, "trained": 1, "unselected": 1, "buffered": 1})
    return prefix


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (lambda c, p: None, None),
        (lambda c, p: c.delete(f"{p}traj:1:0"), "payloads without hash"),
        (lambda c, p: c.delete(f"{p}payload:0:1"), "hashes without payload"),
        (lambda c, p: c.zrem(f"{p}depth:2", "1:0"), "buffered by hash 1, in buckets 0"),
        (lambda c, p: c.hincrby(f"{p}ledger", "buffered", 1), "ledger 2, buckets 1"),
        (lambda c, p: c.lpop(f"{p}pool:0"), "neither in a pool nor in a bucket"),
        (lambda c, p: c.set(f"{p}staged:x", "bytes"), "never expire"),
        (lambda c, p: c.hincrby(f"{p}ledger", "finished", 1), "does not close"),
    ],
)
def test_redis_is_counted_key_by_key(redis_url: str, plant: Callable[[Any, str], Any], named: str | None):
    client = redis.Redis.from_url(redis_url)
    prefix = lay_out(client)
    plant(client, prefix)
    facts, wrong = judge_keys(client, prefix)
    assert facts["states"].items() <= {"trained": 1, "unselected": 1, "buffered": 1}.items()
    assert any(named in told for told in wrong) if named else wrong == []


def row(step: int, epoch: int = 1) -> str:
    return f'{{"step": {step}, "epoch": {epoch}}}\n'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (row(0) + row(1) + row(1, epoch=2), None),
        (row(0) + row(1, epoch=2) + row(1), None),
        (row(0) + '{"st\n' + row(1, epoch=2), None),
        (row(0), "missing [(1, 2)]"),
        (row(0) + row(1), "missing [(1, 2)], strange [(1, 1)]"),
        (row(0) + row(1, epoch=2) + row(2, epoch=2), "strange [(2, 2)]"),
    ],
)
def test_metrics_hold_every_step_once_by_the_learner_that_committed_it(tmp_path: Path, text: str, named: str | None):
    (tmp_path / "metrics.jsonl").write_text(text)
    _, wrong = judge_files(tmp_path, {0: 1, 1: 2})
    assert any(named in told for told in wrong) if named else wrong == []


def test_what_is_half_written_is_found(tmp_path: Path):
    (tmp_path / "weights" / ".unfinished-v000003-e1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step000002").mkdir(parents=True)
    _, wrong = judge_files(tmp_path, {})
    assert "weights/.unfinished-v000003-e1" in wrong[0]
    assert "checkpoints/step000002 (no state.json)" in wrong[0]
    _, wrong = judge_files(tmp_path, {}, {"step000002"})
    assert "step000002" not in wrong[0]


def test_a_process_that_grew_too_large_is_found():
    assert judge_memory({"redis": 20.0, "worker": 700.0}) == []
    assert "worker: 7000.0 MiB" in judge_memory({"redis": 20.0, "worker": 7000.0})[0]


@pytest.mark.parametrize(
    ("said", "raw"),
    [
        ("10:11:12 learner: Redis at 127.0.0.1:1 cannot be reached", False),
        ("learner: another learner has taken over run 'chaos'; this one stops", False),
        ("15635:M 21 Nov 14:33:52.772 # Can't recover from AOF write error", False),
        ("    +------------------------------------", True),
        ("TypeError: argument must be str", True),
        ("json.decoder.JSONDecodeError: Expecting value", True),
        ("redis.exceptions.ResponseError: wrong type", True),
    ],
)
def test_last_words_for_people_are_told_from_a_traceback(said: str, raw: bool):
    assert is_raw(said) == raw


def test_a_plan_has_every_kind_and_is_a_function_of_its_seed():
    kinds = [kind for kind in KINDS if kind.lane in EVERYTHING]
    planned = plan(kinds, 300, 7)
    assert {kind for of_lane in planned.values() for kind in of_lane} == set(kinds)
    assert 290 <= sum(map(len, planned.values())) <= 310
    assert planned == plan(kinds, 300, 7) != plan(kinds, 300, 8)


def test_commands_are_found_in_what_a_client_has_sent():
    one, other = b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n", b"*1\r\n$4\r\nPI\r\n\r\n"
    assert end_of_commands(one + other) == len(one + other)
    assert end_of_commands(one + other[:-1]) == len(one)
    assert end_of_commands(one[:-1]) == end_of_commands(b"") == 0


def test_a_folder_that_these_tests_have_not_made_is_left_alone(tmp_path):
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "thesis.txt").write_text("five years")
    with pytest.raises(SystemExit, match="was not made by these tests"):
        fresh_folder(mine)
    assert (mine / "thesis.txt").exists()
    (fresh_folder(tmp_path / "out") / "old").touch()
    assert not (fresh_folder(tmp_path / "out") / "old").exists()


NO_FILE_MAY_GROW = """
import resource, threading
from tests.system.chaos.record import Record

record, (_, hard) = Record("process"), resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (9, hard))
threading.Timer(0.3, resource.setrlimit, (resource.RLIMIT_FSIZE, (hard, hard))).start()
record.write("claim", step=1)
"""


def test_a_record_waits_while_no_file_may_grow(tmp_path):
    """The fault is meant for the run: a learner that could not write its record ended by a traceback."""
    command = [sys.executable, "-c", NO_FILE_MAY_GROW]
    subprocess.run(command, env=os.environ | {"CHAOS_RECORD": str(tmp_path)}, check=True, timeout=60 * SLOW)
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text()) == {"event": "claim", "step": 1}
