"""Pauses between attempts."""

from __future__ import annotations

from cusearch_async.retry import doubling_pause_s


def test_each_pause_is_twice_as_long_as_the_one_before_up_to_a_bound():
    assert [doubling_pause_s(failed, 0.5, 3.0) for failed in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_it_can_fail_for_ever():
    assert doubling_pause_s(10**9, 0.1, 2.0) == 2.0
