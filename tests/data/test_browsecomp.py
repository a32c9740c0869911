"""Rows of BrowseComp-Plus, which bring their evidence."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from cusearch_async.data.questions import load_questions
from cusearch_async.errors import ConfigError

BROWSE = {
    "query_id": "771",
    "query": "Which town did the botanist leave in 1911",
    "answer": "Pinsk",
    "gold_docs": [{"docid": "8", "text": "He left Pinsk.", "url": "u"}],
    "evidence_docs": [{"docid": "5", "text": "A botanist.", "url": "u"}, {"docid": "8", "text": "He left Pinsk."}],
    "negative_docs": [{"docid": "9", "text": "Nothing.", "url": "u"}],
}


@pytest.fixture
def write(tmp_path):
    def put(row, name):
        path = tmp_path / name
        if name.endswith(".parquet"):
            pd.DataFrame([row]).to_parquet(path)
        else:
            path.write_text(json.dumps(row))
        return str(path)

    return put


@pytest.mark.parametrize("name", ["browse.jsonl", "browse.parquet"])
def test_rows_of_browsecomp_plus_bring_their_evidence(write, name):
    (question,) = load_questions([write(BROWSE, name=name)])
    assert (question.id, question.category) == ("browse/771", "browse")
    assert question.text == "Which town did the botanist leave in 1911?"
    assert question.answers == ("Pinsk",)
    assert question.evidence == ("A botanist.", "He left Pinsk.")


def test_other_rows_know_no_evidence(write):
    assert load_questions([write({"question": "q", "answer": "a"}, name="plain.jsonl")])[0].evidence is None


@pytest.mark.parametrize("documents", ["text", [{"docid": "5"}], [{"text": " "}], [None], 7])
def test_evidence_that_is_no_list_of_texts_is_named(write, documents):
    with pytest.raises(ConfigError, match=r"line 1: 'evidence_docs' must be a list of \{'text'"):
        load_questions([write(BROWSE | {"evidence_docs": documents}, name="browse.jsonl")])
