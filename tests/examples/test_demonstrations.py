"""The script of docs/examples that makes demonstrations: what it writes is usable, and only what searches found."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cusearch_async.config import load_config
from cusearch_async.data.files import write_questions
from cusearch_async.data.questions import load_questions
from cusearch_async.errors import RetrievalUnavailable
from cusearch_async.models import load_tokenizer
from cusearch_async.warmstart.demonstrations import Sources, read_demonstrations
from docs.examples.demonstrations import demonstration, searches, write
from tests.fakes import FakeSearch

ROW: dict[str, Any] = {
    "question": "What is the currency of the country of Pinsk?",
    "golden_answers": ["Ruble"],
    "metadata": {
        "decomposition": [
            {"question": "country of Pinsk", "answer": "Belarus"},
            {"question": "currency >> of #1", "answer": "Ruble"},
        ]
    },
}
FOUND = {
    "country of Pinsk": ['"Pinsk"\nThe country of Pinsk is Belarus.'],
    "currency of Belarus": ['"Belarus"\nThe currency of Belarus is the ruble.'],
}


def test_each_link_is_searched_with_the_answer_of_the_one_before(tmp_path: Path):
    found = asyncio.run(demonstration(ROW, 0, FakeSearch(FOUND)))
    assert found is not None
    assert [turn.partition("<search>")[2] for turn in found["turns"][:2]] == [
        "country of Pinsk</search>",
        "currency of Belarus</search>",
    ]
    assert found["documents"] == list(FOUND.values())
    path = tmp_path / "demonstrations.jsonl"
    path.write_text(json.dumps(found) + "\n")
    config = load_config(Path("atlas"))
    read = read_demonstrations(Sources((str(path),)), load_tokenizer(config.model.location), config)
    assert [(t.depth, t.em, t.format_valid) for t in read.trajectories] == [(2, 1.0, True)]


def test_a_question_whose_search_does_not_find_its_answer_is_left_out():
    assert asyncio.run(demonstration(ROW, 0, FakeSearch(FOUND | {"currency of Belarus": ["nothing"]}))) is None


def test_a_row_of_musique_is_searched_link_by_link(tmp_path: Path):
    """Its column has another name; the whole question was the only search then."""
    links = [
        {"id": 1, "question": "Green >> performer", "answer": "Steve Hillage", "paragraph_support_idx": 0},
        {"id": 2, "question": "#1 >> spouse", "answer": "Miquette Giraudy", "paragraph_support_idx": 1},
    ]
    row = {"id": "2hop__1_2", "question": "Who is the spouse of the performer of Green?", "answer": "Miquette Giraudy"}
    path, converted = tmp_path / "musique.jsonl", tmp_path / "questions.jsonl"
    path.write_text(json.dumps(row | {"question_decomposition": links, "answerable": True}) + "\n")
    write_questions(load_questions([str(path)]), converted)
    (line,) = converted.read_text().splitlines()
    assert [query for query, _ in searches(json.loads(line))] == ["Green performer", "Steve Hillage spouse"]


@pytest.mark.parametrize(
    ("row", "queries"),
    [
        ({"question": "who had the most #1 hits"}, ["who had the most #1 hits"]),
        ({"question": "?", "metadata": None}, ["?"]),
        (
            {"question": "?", "metadata": {"decomposition": [{"question": "the #1 album of 1990", "answer": "a"}]}},
            ["the #1 album of 1990"],
        ),
    ],
)
def test_what_is_no_answer_of_before_stays(row, queries):
    """Such a question ended the script, and all answers so far were lost."""
    assert [query for query, _ in searches(row | {"golden_answers": ["a"]})] == queries


def test_without_a_retriever_what_was_written_before_stays(tmp_path: Path):
    target = tmp_path / "demonstrations.jsonl"
    target.write_text("before")
    options = ["--retriever.url", "http://127.0.0.1:9", "--run.wait_s", "0.1"]
    with pytest.raises(RetrievalUnavailable):
        asyncio.run(write([ROW], load_config(Path("atlas"), options), target))
    assert target.read_text() == "before"


def test_without_a_decomposition_the_question_is_the_only_search():
    row = {"question": "country of Pinsk", "golden_answers": ["Belarus"]}
    found = asyncio.run(demonstration(row, 0, FakeSearch(FOUND)))
    assert found is not None
    assert len(found["turns"]) == 2
