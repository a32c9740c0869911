"""Tickets: which question each visits, and when it may start."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.algorithm.staleness import question_index, ticket_limit

SIZE = st.integers(1, 200)
SEED = st.integers(0, 2**32)


@given(SIZE, SEED, st.integers(0, 1000))
def test_an_epoch_visits_every_question_exactly_once(num_questions, seed, epoch):
    tickets = range(epoch * num_questions, (epoch + 1) * num_questions)
    assert sorted(question_index(t, num_questions, seed) for t in tickets) == list(range(num_questions))


@given(SEED, st.lists(st.integers(0, 500), min_size=1, max_size=30))
def test_a_tickets_question_does_not_depend_on_what_was_asked_before(seed, tickets):
    expected = {t: question_index(t, 50, seed) for t in range(501)}
    for ticket in tickets:
        question_index(ticket + 7, 49, seed + 1)
        assert question_index(ticket, 50, seed) == expected[ticket]


def test_epochs_and_seeds_come_in_different_orders():
    orders = {
        tuple(question_index(epoch * 100 + place, 100, seed) for place in range(100))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


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
