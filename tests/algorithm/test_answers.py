"""How right an answer is, by hand-worked tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.algorithm.answers import exact_match, f1_score, normalize_answer, sub_exact_match

WORDS = st.lists(st.sampled_from(["Lima", "peru", "The", "a", "city", "of", "1998", "é", "-", "?"]), max_size=8)
PHRASES = WORDS.map(" ".join)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Beatles!", "beatles"),
        ("an apple a day", "apple day"),
        ("Theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("well-known", "wellknown"),
        ("don't", "dont"),
        ("(the) answer", "answer"),
        ("a.m.", "am"),
        ("\tNew\nYork ", "new york"),
        ("LIMA", "lima"),
        ("the", ""),
        ("?!", ""),
        ("", ""),
        ("São Tomé", "são tomé"),
        ("Łódź — “Poland”", "łódź — “poland”"),  # only ASCII punctuation goes, as in SQuAD
    ],
)
def test_answers_are_normalised_as_in_squad(text, expected):
    assert normalize_answer(text) == expected


@given(st.text(max_size=40))
def test_normalisation_leaves_single_spaces_and_no_outer_ones(text):
    found = normalize_answer(text)
    assert found == " ".join(found.split())


@pytest.mark.parametrize(
    ("prediction", "answers", "em", "sub_em", "f1"),
    [
        ("Lima", ["Lima"], 1, 1, 1),
        ("the city of Lima", ["Lima"], 0, 1, 2 * (1 / 3) / (4 / 3)),  # 1 common of 3 and 1
        ("Lima Peru", ["Peru, Lima"], 0, 0, 1),  # a bag of words
        ("New York New York", ["New York"], 0, 1, 2 / 3),  # common counts as often as both have it: 2 of 4 and 2
        ("Paris", ["Lima", "paris!", "Rome"], 1, 1, 1),
        ("Great Lima", ["Lima Norte", "Lima"], 0, 1, 2 / 3),
        ("Rome", ["Lima"], 0, 0, 0),
        ("", ["Lima"], 0, 0, 0),
        ("", [""], 0, 0, 0),
        ("the", ["a"], 0, 0, 0),
        ("Lima", [""], 0, 0, 0),
        ("Lima", ["", "the"], 0, 0, 0),
        ("Lima", [], 0, 0, 0),
        ("“Lima”", ["Lima"], 0, 1, 0),
        ("5.000", ["5,000"], 1, 1, 1),
    ],
)
def test_metrics_by_hand(prediction, answers, em, sub_em, f1):
    assert exact_match(prediction, answers) == em
    assert sub_exact_match(prediction, answers) == sub_em
    assert f1_score(prediction, answers) == pytest.approx(f1)


@given(PHRASES, PHRASES)
def test_f1_is_symmetric_and_between_zero_and_one(one, other):
    assert 0 <= f1_score(one, [other]) <= 1
    assert f1_score(one, [other]) == f1_score(other, [one])


@given(PHRASES, st.lists(PHRASES, max_size=4))
def test_an_exact_match_has_full_f1_and_contains_the_answer(prediction, answers):
    if exact_match(prediction, answers):
        assert f1_score(prediction, answers) == 1
        assert sub_exact_match(prediction, answers) == 1
    assert exact_match(prediction, [*answers, prediction]) == float(normalize_answer(prediction) != "")


@given(PHRASES, st.lists(PHRASES, max_size=4), PHRASES)
def test_another_gold_answer_never_lowers_a_score(prediction, answers, another):
    for metric in (exact_match, sub_exact_match, f1_score):
        assert metric(prediction, [*answers, another]) >= metric(prediction, answers)
        assert metric(prediction, answers[::-1]) == metric(prediction, answers)


@given(WORDS, st.lists(st.sampled_from([" ", "  ", "\n", "\t", " \r\n "]), min_size=9, max_size=9), PHRASES)
def test_white_space_changes_nothing(words, spaces, answer):
    spread = spaces[-1] + "".join(word + space for word, space in zip(words, spaces, strict=False))
    for metric in (exact_match, sub_exact_match, f1_score):
        assert metric(spread, [answer]) == metric(" ".join(words), [answer])
        assert metric(answer, [spread]) == metric(answer, [" ".join(words)])
