"""The script of docs/examples that makes demonstrations: what it writes is usable, and only what searches found."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from cusearch_async.config import load_config
from cusearch_async.models import load_tokenizer
from cusearch_async.warmstart.demonstrations import Sources, read_demonstrations
from docs.examples.demonstrations import demonstration
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


def test_without_a_decomposition_the_question_is_the_only_search():
    row = {"question": "country of Pinsk", "golden_answers": ["Belarus"]}
    found = asyncio.run(demonstration(row, 0, FakeSearch(FOUND)))
    assert found is not None
    assert len(found["turns"]) == 2
