"""Which question a ticket visits: permutations of each environment's questions, and environments in their shares."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.algorithm.tickets import RunQuestions, question_index, ticket_limit
from cusearch_async.types import Question

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


# Environments.


def questions(environment, count):
    return [
        Question(id=f"{environment}{i}", text="?", answers=("a",), category="x", environment=environment)
        for i in range(count)
    ]


@given(st.integers(1, 30), SEED)
def test_one_environment_is_its_questions_in_the_order_of_their_visits(count, seed):
    own = questions("a", count)
    run = RunQuestions([(1, own)], seed)
    assert [run.of(t) for t in range(100)] == [own[question_index(t, count, seed)] for t in range(100)]


def test_environments_of_the_same_questions_ask_them_in_other_orders():
    """Each step trained on half as many questions as it had groups."""
    run = RunQuestions([(1, questions("a", 1000)), (1, questions("b", 1000))], 0)
    asked = [run.of(ticket).id[1:] for ticket in range(64)]
    assert len(set(asked)) > 55


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4), st.integers(0, 2**20), SEED)
def test_each_cycle_gives_every_environment_its_share(parts, first, seed):
    run = RunQuestions([(share, questions(str(i), count)) for i, (share, count) in enumerate(parts)], seed)
    cycle = sum(share for share, _ in parts)
    found = Counter(run.of(first + t).environment for t in range(cycle))
    assert found == {str(i): share for i, (share, _) in enumerate(parts)}


@given(st.integers(1, 9), st.integers(1, 9), SEED)
def test_shares_are_kept_in_any_stretch_of_tickets_to_within_one_in_each(share, other, seed):
    run = RunQuestions([(share, questions("a", 3)), (other, questions("b", 5))], seed)
    ones = [run.of(t).environment == "a" for t in range(3 * (share + other))]
    expected = share / (share + other)
    for length, so_far in enumerate(itertools.accumulate(ones), start=1):
        assert abs(so_far - expected * length) <= 1


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 12), SEED)
def test_an_epoch_of_each_environment_visits_all_of_its_questions_once(share, other, count, seed):
    run = RunQuestions([(share, questions("a", count)), (other, questions("b", 7))], seed)
    visits = [run.id_of(t) for t in range(2 * count * (share + other)) if run.of(t).environment == "a"]
    assert len(visits) >= 2 * count
    for epoch in range(2):
        assert len(set(visits[epoch * count : (epoch + 1) * count])) == count


def test_all_questions_are_those_of_one_environment_after_the_other():
    a, b = questions("a", 2), questions("b", 3)
    assert RunQuestions([(1, a), (4, b)], 0).all == [*a, *b]


# Admission.


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
