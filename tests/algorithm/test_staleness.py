"""Tickets: when each may start."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.algorithm.staleness import ticket_limit


@given(st.integers(0, 1000), st.integers(0, 20), st.integers(1, 512), st.data())
def test_a_granted_ticket_is_trained_within_the_staleness_bound(version, max_staleness, n, data):
    limit = ticket_limit(version, max_staleness, n)
    granted = data.draw(st.integers(0, limit - 1))
    assert granted // n <= version + max_staleness


@given(st.integers(0, 1000), st.integers(0, 20), st.integers(1, 512))
def test_every_ticket_within_the_bound_is_granted(version, max_staleness, n):
    limit = ticket_limit(version, max_staleness, n)
    assert (limit - 1) // n == version + max_staleness
    assert limit // n == version + max_staleness + 1


def test_without_staleness_only_the_pool_of_the_loaded_version_is_open():
    assert ticket_limit(0, 0, 64) == 64
    assert ticket_limit(3, 0, 64) == 4 * 64


def test_the_paper_sized_run_opens_three_pools_before_the_first_step():
    assert ticket_limit(0, 2, 64) == 192
