"""How right an answer is, by hand-worked tables."""

from __future__ import annotations

import re
import string
from collections import Counter

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


@pytest.mark.parametrize("metric", ["squad", "strict"])
@pytest.mark.parametrize(
    ("prediction", "answer", "em", "sub_em"),
    [
        ("1939–1945。", "1939–1945", 1, 1),
        ("1939–1945", "1939–1945。", 1, 1),
        ("The Lord of the Rings（指环王）", "Lord of the Rings", 0, 1),
        ("The Beatles", "The Beatles（乐队）", 0, 0),
        ("“北京”", "北京", 1, 1),
    ],
)
def test_both_texts_of_a_pair_have_the_same_rules(prediction, answer, em, sub_em, metric):
    """A Chinese full stop in one of them made a right answer wrong: only that one lost its dash."""
    assert exact_match(prediction, [answer], metric) == em
    assert sub_exact_match(prediction, [answer], metric) == sub_em
    assert (f1_score(prediction, [answer], metric) == 1) == (em == 1)


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


# Scores of text in Latin letters, as published.


def normalize_squad(text):
    """SQuAD's normalize_answer, which HotpotQA's is too."""
    kept = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def squad_f1(prediction, gold):
    found, right = normalize_squad(prediction).split(), normalize_squad(gold).split()
    same = sum((Counter(found) & Counter(right)).values())
    return 2 * same / (len(found) + len(right)) if same else 0


ENGLISH = st.text(st.sampled_from("aeinorsTHE the.,-'’“”–—$€%½²³°é Éßﬁβ5 0\u00a0\u0301\u200b…"), max_size=20)


@given(ENGLISH, ENGLISH)
def test_english_text_has_squads_scores_whatever_marks_are_in_it(prediction, gold):
    assert normalize_answer(prediction) == normalize_squad(prediction)
    assert f1_score(prediction, [gold]) == pytest.approx(squad_f1(prediction, gold))


# Other scripts.


@pytest.mark.parametrize("metric", ["squad", "strict"])
@pytest.mark.parametrize(
    ("prediction", "answer", "em", "sub_em", "f1"),
    [
        ("北京市", "北京", 0, 1, 4 / 5),
        ("北京。", "北京", 1, 1, 1),
        ("《红楼梦》", "红楼梦", 1, 1, 1),
        ("東京 都", "東京都", 1, 1, 1),
        ("京都", "東京", 0, 0, 1 / 2),
        ("レオナルド・ダ・ヴィンチ", "レオナルドダヴィンチ", 1, 1, 1),
        ("ﾄｳｷｮｳ", "トウキョウ", 1, 1, 1),  # half width
        ("か\u3099", "が", 1, 1, 1),  # its mark apart
        ("２００８年", "2008年", 1, 1, 1),
        ("2008年", "2008", 0, 1, 2 / 3),  # a number is a word
        ("A型", "型", 0, 1, 2 / 3),  # no article
        ("iPhone手机", "手机", 0, 1, 4 / 5),
        ("กรุงเทพฯ", "กรุงเทพ", 0, 1, 12 / 13),
        ("น้ํา", "น้ำ", 1, 1, 1),  # two spellings of a vowel
        ("ວຽງຈັນ\u200b.", "ວຽງຈັນ", 1, 1, 1),
        ("ភ្នំពេញ។", "ភ្នំពេញ", 1, 1, 1),
        ("서울 특별시", "서울", 0, 1, 2 / 3),  # words, as Korean has spaces
        ("«Москва»", "москва", 1, 1, 1),
        ("القاهرة؟", "القاهرة", 1, 1, 1),
        ("दिल्ली।", "दिल्ली", 1, 1, 1),
        ("。。", "。", 0, 0, 0),
    ],
)
def test_text_in_other_scripts_is_compared_by_words_or_characters_without_its_punctuation(
    prediction, answer, em, sub_em, f1, metric
):
    assert exact_match(prediction, [answer], metric) == em
    assert sub_exact_match(prediction, [answer], metric) == sub_em
    assert f1_score(prediction, [answer], metric) == pytest.approx(f1)
    assert f1_score(answer, [prediction], metric) == pytest.approx(f1)


# The strict metric.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3.5", "3.5"),
        ("(−1,200.50).", "-1200.50"),
        ("12,34,567", "1234567"),
        ("1,5", "1,5"),
        ("-5", "-5"),
        ("–5 °C", "-5 °c"),
        ("5-10", "5-10"),
        ("1990–1995", "1990-1995"),
        ("5 - 3", "5 3"),
        ("-$1,000", "-1000"),
        ("$.5", ".5"),
        ("9/11", "9/11"),
        ("10⁵", "10^5"),
        ("10⁻¹²", "10^-12"),
        ("2½", "2 1/2"),
        ("H₂O", "h2o"),
        ("COVID-19.", "covid19"),
        ("U.S.A.", "usa"),
        ("the “Big” Apple’s", "big apples"),
        ("v2.0,", "v2.0"),
        ("３．５", "3.5"),
        ("ﬁve", "five"),
        ("3.5亿", "3.5 亿"),
        ("!?…", ""),
    ],
)
def test_strictly_numbers_keep_their_marks_and_words_lose_all(text, expected):
    assert normalize_answer(text, "strict") == expected


@pytest.mark.parametrize(
    ("prediction", "answer", "squad", "strict"),
    [
        ("35", "3.5", 1, 0),
        ("-5", "5", 1, 0),
        ("15 million", "1.5 million", 1, 0),
        ("5,000", "5000", 1, 1),
        ("19901995", "1990-1995", 1, 0),
        ("“Lima”", "Lima", 0, 1),
    ],
)
def test_numbers_that_differ_are_equal_in_squads_metric_and_not_strictly(prediction, answer, squad, strict):
    for one, other in ((prediction, answer), (answer, prediction)):
        assert exact_match(one, [other]) == squad
        assert exact_match(one, [other], "strict") == strict


@pytest.mark.parametrize("whole", ["yes", "no", "noanswer"])
def test_strictly_yes_and_no_must_be_the_whole_answer(whole):
    hedged = "yes no noanswer"
    assert f1_score(hedged, [whole]) == pytest.approx(1 / 2)
    assert f1_score(hedged, [whole], "strict") == f1_score(whole, [hedged], "strict") == 0
    assert sub_exact_match(hedged, [whole], "strict") == 0
    for metric in (exact_match, sub_exact_match, f1_score):
        assert metric(f"{whole.title()}.", [whole], "strict") == 1


def test_strictly_an_answer_contains_whole_words():
    assert sub_exact_match("about 1350 km", ["35"]) == 1
    assert sub_exact_match("about 1350 km", ["35"], "strict") == 0
    assert sub_exact_match("it is -5 there", ["5"], "strict") == 0
    assert sub_exact_match("it is -5 there", ["−5"], "strict") == 1
    assert sub_exact_match("Lima", ["", "!"], "strict") == 0


@given(st.text(max_size=20), st.text(max_size=20), st.sampled_from(["squad", "strict"]))
def test_scores_of_any_text_are_numbers_that_agree_with_each_other(one, other, metric):
    assert f1_score(one, [other], metric) == f1_score(other, [one], metric)
    em = exact_match(one, [other], metric)
    assert em <= sub_exact_match(one, [other], metric) <= 1
    assert em <= f1_score(one, [other], metric) <= 1
    found = normalize_answer(one, metric)
    assert found == " ".join(found.split())
