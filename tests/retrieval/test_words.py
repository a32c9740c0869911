"""The words of a text: as bm25s finds them in English, and characters with their neighbours elsewhere."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.config import RetrieverConfig
from cusearch_async.errors import ConfigError
from cusearch_async.retrieval import indexing
from cusearch_async.retrieval.bm25 import Bm25Index, identity, tokenizer_named, unicode_words, words_of
from tests.retrieval import tokenizers


def words(text):
    return words_of(text, unicode_words)


@given(st.text(st.characters(max_codepoint=127), max_size=60))
def test_english_words_are_those_that_bm25s_finds(text):
    assert words(text) == re.findall(r"(?u)\b\w\w+\b", text.lower())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Łódź, São-Tomé", ["łódź", "são", "tomé"]),
        ("秘鲁", ["秘", "鲁", "秘鲁"]),
        ("水", ["水"]),
        ("iPhone手机。", ["iphone", "手", "机", "手机"]),
        ("2008年", ["2008", "年"]),
        ("「ペルー」", ["ペ", "ル", "ー", "ペル", "ルー"]),
        ("ﾍﾟﾙｰ", ["ペ", "ル", "ー", "ペル", "ルー"]),
        ("ＬＩＭＡ", ["lima"]),
        ("ลิมา", ["ลิ", "ม", "า", "ลิม", "มา"]),
        ("서울은", ["서", "울", "은", "서울", "울은"]),
        ("हिन्दी में", ["हिन्दी", "में"]),  # vowel signs belong to the word
        ("e\u0301te\u0301", ["été"]),
        ("می\u200cخواهم", ["میخواهم"]),
        ("co\u00adoperate", ["cooperate"]),
        ("a é 5 I", []),
        ("?! \ud800", []),
    ],
)
def test_words_of_other_scripts(text, expected):
    assert words(text) == expected


CORPUS = [
    "秘鲁的首都是利马。",
    "日本の首都は東京です。",
    "페루의 수도는 리마이다.",
    "เมืองหลวงของเปรูคือลิมา",
    "ເມືອງຫຼວງຂອງເປຣູແມ່ນລີມາ",
    "पेरू की राजधानी लीमा है।",
    "عاصمة بيرو هي ليما.",
    "Столица Перу — Лима.",
]


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("秘鲁首都", 0),
        ("利", 0),
        ("日本の首都", 1),
        ("トウキョウは東京？", 1),
        ("페루 수도", 2),
        ("เปรู", 3),
        ("ເປຣູ", 4),
        ("राजधानी", 5),
        ("بيرو؟", 6),
        ("«ПЕРУ»", 7),
    ],
)
def test_a_passage_is_found_in_its_own_script(query, best):
    index = Bm25Index.in_memory([{"id": str(i), "contents": text} for i, text in enumerate(CORPUS)])
    found = index.search([query], 3)[0]
    assert found
    assert found[0][0]["id"] == str(best)


@given(st.text(max_size=30))
def test_words_are_never_blank_and_do_not_depend_on_the_form_of_the_text(text):
    found = words(text)
    assert all(word.strip() for word in found)
    assert words(f" {text}。") == found


# A user's own.


def test_an_own_tokenizer_gets_the_folded_text_and_its_blanks_are_left_out():
    assert words_of("Ａ b\u200b.", tokenizers.letters) == ["a", "b", "."]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.retrieval.tokenizers:nothing", r"must give the words of a text as a list of texts \(TypeError"),
        ("tests.retrieval.tokenizers:numbers", r"must give the words of a text as a list of texts \(AttributeError"),
        ("tests.retrieval.tokenizers:spaced", r"must give the words .* \(TypeError: it gave one text, '"),
        ("tests.retrieval.tokenizers:fails", r"must give the words .* \(KeyError: 'dictionary'\)"),
        ("tests.retrieval.tokenizers:missing", "has no 'missing'"),
    ],
)
def test_a_tokenizer_that_gives_no_words_is_named(name, said):
    with pytest.raises(ConfigError, match=r"retriever\.bm25\.tokenizer.*" + said):
        tokenizer_named(name)


def test_the_config_names_the_tokenizer():
    settings = RetrieverConfig(bm25={"tokenizer": "tests.retrieval.tokenizers:letters"})
    index = indexing.in_memory([{"id": "0", "contents": "Lima"}], settings)
    assert len(index.search(["l"], 1)[0]) == 1
    with pytest.raises(ValueError, match=r"must be 'unicode', or your own function .* got 'jieba'"):
        RetrieverConfig(bm25={"tokenizer": "jieba"})


def test_a_tokenizer_is_known_by_its_name_and_by_what_it_does():
    assert identity(unicode_words) == identity(tokenizer_named("unicode"))
    assert identity(tokenizers.letters) not in (identity(unicode_words), identity(list))
