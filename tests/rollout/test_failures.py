"""How a worker counts and logs its failed episodes."""

from __future__ import annotations

import pytest

from cusearch_async.rollout import failures
from cusearch_async.rollout.failures import Failures


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(failures.time, "monotonic", lambda: now[0])
    return now


def test_equal_failures_are_one_counted_line_every_few_seconds(clock, caplog):
    """Before: 320 equal lines."""
    found = Failures()
    for number in range(320):
        clock[0] += 1 / 32
        found.add("episode", number // 5, number % 5, "the reward mine:reward must give a finite number, got nan")
    found.finish()
    assert [record.message for record in caplog.records] == [
        "episode 0:0 failed, its ticket will be requeued: the reward mine:reward must give a finite number, got nan",
        "failed episodes: 160 more, 161 in total: the reward mine:reward must give a finite number, got nan",
        "failed episodes: 159 more, 320 in total: the reward mine:reward must give a finite number, got nan",
    ]
    assert found.by_kind == {"episode": 320}
    assert found.most_frequent == "320 x the reward mine:reward must give a finite number, got nan"


def test_reasons_that_differ_in_more_than_numbers_are_told_apart(clock, caplog):
    found = Failures()
    for number in (17, 4000):
        found.add("episode", number, 0, f"question 'q{number}' makes a prompt of {number} tokens")
    found.add("search", 3, 0, "it is refused (422)")
    found.finish()
    assert [record.message for record in caplog.records] == [
        "episode 17:0 failed, its ticket will be requeued: question 'q17' makes a prompt of 17 tokens",
        "episode 3:0 failed, its ticket will be requeued: it is refused (422)",
        "failed episodes: 1 more, 2 in total: question 'q17' makes a prompt of 17 tokens",
    ]
    assert found.most_frequent == "2 x question 'q17' makes a prompt of 17 tokens"


def test_reasons_without_end_are_counted_by_kind(clock, caplog):
    found = Failures()
    for number in range(1000):
        found.add("search", number, 0, "the search for " + "ab" * number)
    found.finish()
    assert found.by_kind == {"search": 1000}
    assert len(caplog.records) < 200
    assert Failures().most_frequent == ""


def test_a_huge_reason_is_cut():
    """It went to Redis with each heartbeat."""
    found = Failures()
    found.add("episode", 0, 0, "x" * 3_000_000)
    assert len(found.most_frequent) < 3000


def test_half_a_character_in_a_reason_can_be_reported():
    """A program elsewhere may say anything; before, it ended the worker."""
    found = Failures()
    found.add("episode", 0, 0, "no city \ud83d")
    assert found.most_frequent.encode() == b"1 x no city ?"
