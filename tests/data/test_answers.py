"""Gold answers in the forms in which files hold them: never several in one text."""

from __future__ import annotations

import re

import pytest

from cusearch_async.data.columns import read_literal
from cusearch_async.data.rows import answers_of
from cusearch_async.errors import ConfigError

TWO = ["14 May 1911 UTC", "May 1911"]


def truth(value):
    return {"reward_model": {"style": "rule", "ground_truth": value}}


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"golden_answers": ["a", "b"]}, ["a", "b"]),
        ({"golden_answers": "['a', 'b']"}, ["a", "b"]),
        ({"golden_answers": '["a", "b"]'}, ["a", "b"]),
        ({"golden_answers": "['a' \"b's\"\n 'c, d']"}, ["a", "b's", "c, d"]),
        ({"golden_answers": "array(['a', 'b'], dtype=object)"}, ["a", "b"]),
        ({"golden_answers": "('a', 'b')"}, ["a", "b"]),
        ({"golden_answers": ["['a', 'b']"]}, ["a", "b"]),
        ({"golden_answers": ["a<|answer_split|>b", "c"]}, ["a", "b", "c"]),
        ({"golden_answers": ["a", "a", "b"]}, ["a", "b"]),
        ({"answer": "a [SEP] b<split>c"}, ["a", "b", "c"]),
        ({"answer": "a", "answers": ["b", "c"]}, ["a", "b", "c"]),
        ({"answer": "a", "answers": ["b", "a"]}, ["a", "b"]),
        ({"answer": "b, c", "answers": ["b", "c"]}, ["b", "c"]),
        ({"golden_answers": ["a"], "answer": "A long worked answer."}, ["a"]),
        ({"answer": 3.700000047683716}, ["3.7"]),
        ({"answer": 0.1}, ["0.1"]),
        ({"answer": 1200000.0}, ["1200000"]),
        ({"answer": 123456.789}, ["123456.789"]),
        ({"golden_answers": '"[\\"a\\", \\"b\\"]"'}, ["a", "b"]),
        ({"ground_truth": "a"}, ["a"]),
        ({"answers": ["a"]}, ["a"]),
        ({"answers": {"text": ["a", "b"], "answer_start": [3, 9]}}, ["a", "b"]),
        ({"answer": {"value": "a", "aliases": ["b"], "normalized_aliases": ["x"]}}, ["a", "b"]),
        (truth("a<|answer_split|>b<|answer_split|>"), ["a", "b"]),
        (truth({"target": "['a', 'b']"}), ["a", "b"]),
        (truth('{"target": ["a", "b"]}'), ["a", "b"]),
        ({"reward_model": "{'ground_truth': {'target': array(['a', 'b'], dtype=object)}}"}, ["a", "b"]),
        (truth("14 May 1911 UTC, May 1911") | {"extra_info": {"answer": TWO}}, TWO),
        (truth("14 May 1911 UTC and May 1911") | {"extra_info": str({"answers": TWO})}, TWO),
        (truth("May 1911") | {"extra_info": {"golden_answers": TWO}}, ["May 1911", TWO[0]]),
        (truth(["May 1911"]) | {"answers": TWO}, ["May 1911", TWO[0]]),
        ({"answer": "The Pale Kites", "answer_aliases": ["Kites", "Herons"]}, ["The Pale Kites", "Kites", "Herons"]),
        ({"answer": "a", "aliases": "['b']"}, ["a", "b"]),
        ({"answer": "a", "aliases": None, "answer_aliases": [], "acceptable_answers": ["", "b"]}, ["a", "b"]),
        ({"answer": "a, b", "answer_aliases": ["a", "b"]}, ["a", "b"]),
        ({"answer": "Ann Lee", "answer_aliases": ["Lee", "Ann"]}, ["Ann Lee", "Lee", "Ann"]),
        (
            {"answer": "Trinidad and Tobago", "aliases": ["Trinidad", "Tobago"]},
            ["Trinidad and Tobago", "Trinidad", "Tobago"],
        ),
        ({"answer": "US", "aliases": ["U", "S"]}, ["US", "U", "S"]),
        ({"answer": "Coca-Cola", "aliases": ["Coca", "Cola"]}, ["Coca-Cola", "Coca", "Cola"]),
        (truth("Ann Lee") | {"extra_info": {"answers": ["Ann Lee", "Ann", "Lee"]}}, ["Ann Lee", "Ann", "Lee"]),
        ({"golden_answers": ["a"], "metadata": {"answer_aliases": ["b"], "s_aliases": ["c"]}}, ["a", "b"]),
        ({"answer": "a", "extra_info": {"aliases": ["b"]}, "alternative_answers": ["c"]}, ["a", "c", "b"]),
        (truth("a, b, b") | {"extra_info": {"answer": ["a", "b", "b"]}}, ["a", "b"]),
        ({"possible_answers": '["clerk", "office clerk"]'}, ["clerk", "office clerk"]),
        ({"answer": 42}, ["42"]),
        ({"answer": 42.0}, ["42"]),
        ({"answer": -3.5}, ["-3.5"]),
        ({"answer": [42, "43", 3.5]}, ["42", "43", "3.5"]),
        ({"golden_answers": "[1990, 1991]"}, ["1990", "1991"]),
        ({"answer": 42, "answer_aliases": [42, "forty-two"]}, ["42", "forty-two"]),
        (truth({"target": 10**400}), ["1" + "0" * 400]),
        (truth(42) | {"extra_info": {"answer": [42, 42.5]}}, ["42", "42.5"]),
    ],
)
def test_every_form_of_several_answers_is_several_answers(row, wanted):
    assert answers_of(row, "line 1") == wanted


@pytest.mark.parametrize(
    "text", ["(500) Days", "('68)", "('Heroes')", "(1990, 1991)", "a, b and c", "Mr. [X] and Co.", "it's", "{", "a|b"]
)
def test_a_text_that_is_one_answer_stays_as_it_is(text):
    assert answers_of({"answer": text, "extra_info": {"answer": text}}, "line 1") == [text]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"golden_answers": "[a, b]"}, "'golden_answers' looks like a list, but cannot be read as one: '[a, b]'"),
        (truth("{a: b}"), "'reward_model.ground_truth' looks like a list"),
        ({"answer": "a<|im_end|>"}, "'answer' holds <|im_end|>, which is no part of an answer: 'a<|im_end|>'"),
        ({"answer": "<|answer_split|>"}, "'answer' holds <|answer_split|>, which is no part of an answer"),
        ({"answer": {"spans": ["a"]}}, "'answer' has none of target, value, text, answers, answer in it, got {'spans'"),
        ({"answer": {"target": [{"a": 1}]}}, "'answer' must be a list of non-blank texts, got [{'a'"),
        ({"answer": True}, "'answer' must be a list of non-blank texts, got True"),
        (truth("a") | {"extra_info": {"answer": ["b", "c"]}}, "'reward_model.ground_truth' and 'extra_info.answer' do"),
        (
            {"gold": "a"},
            "'golden_answers' must be a list of non-blank texts, got None; the row has gold; it needs 'quest",
        ),
    ],
)
def test_what_may_be_several_answers_and_cannot_be_read_is_named(row, said):
    with pytest.raises(ConfigError, match=re.escape(f"line 1: {said}")):
        answers_of(row, "line 1")


@pytest.mark.parametrize(
    "text", ["[" * 10_000 + "]" * 10_000, "[open('x')]", "['a', b]", "[...]", "{**{}}", "[f'{1}']"]
)
def test_text_that_is_no_literal_is_never_run_and_stays_text(text):
    assert read_literal(text) == text
