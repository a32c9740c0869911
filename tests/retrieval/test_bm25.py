"""BM25: what is found, in which order, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cusearch_async.retrieval import bm25
from cusearch_async.retrieval.bm25 import Bm25Index

PASSAGES = [
    {"id": "0", "contents": '"Peru"\nThe capital of Peru is Lima.'},
    {"id": "1", "contents": '"Peru"\nThe currency of Peru is Sol.'},
    {"id": "2", "contents": '"Chile"\nThe capital of Chile is Santiago.'},
    {"id": "3", "contents": '"Łódź"\nThe country of Łódź is Poland.'},
]
INDEX = Bm25Index.in_memory(PASSAGES)


def ids(query, topk=4):
    return [passage["id"] for passage, _ in INDEX.search([query], topk)[0]]


@pytest.mark.parametrize(
    ("query", "best"),
    [("capital of Peru", "0"), ("currency of Peru", "1"), ("capital of Chile", "2"), ("country of Łódź", "3")],
)
def test_the_passage_that_shares_most_words_is_best(query, best):
    assert ids(query)[0] == best


@pytest.mark.parametrize("query", ["", " ", "?!", "zebra", "zebra unicorn", "京都", "\ud800", "x" * 10_000])
def test_a_query_without_a_known_word_finds_nothing(query):
    assert ids(query) == []


def test_only_passages_that_share_a_word_are_found():
    assert ids("Santiago") == ["2"]
    assert set(ids("Peru")) == {"0", "1"}


def test_topk_bounds_the_result_and_may_exceed_the_corpus():
    assert len(ids("the of is", 1)) == 1
    assert len(ids("the of is", 100)) == 4
    assert ids("capital of Peru", 2) == ids("capital of Peru", 4)[:2]


WORDS = st.lists(st.sampled_from(["capital", "of", "Peru", "Chile", "Łódź", "zebra", "the", "Sol"]), max_size=6)


@settings(deadline=None)
@given(st.lists(WORDS.map(" ".join), max_size=5), st.integers(1, 10))
def test_results_are_sorted_distinct_and_the_same_alone_and_together(queries, topk):
    found = INDEX.search(queries, topk)
    assert found == [INDEX.search([query], topk)[0] for query in queries]
    assert found == Bm25Index.in_memory(PASSAGES).search(queries, topk)
    for result in found:
        scores = [score for _, score in result]
        assert scores == sorted(scores, reverse=True)
        assert all(score > 0 for score in scores)
        numbers = [passage["id"] for passage, _ in result]
        assert len(numbers) == len(set(numbers)) <= topk


def test_a_very_long_query_is_cut(monkeypatch):
    """Each of its words is a pass over passages: one of megabytes kept all searches waiting until workers ended."""
    asked, index = [], Bm25Index.in_memory(PASSAGES)
    retrieve = index._index.retrieve
    monkeypatch.setattr(
        index._index, "retrieve", lambda words, **options: asked.extend(words) or retrieve(words, **options)
    )
    index.search(["lima " * 100_000], 1)
    assert [len(words) for words in asked] == [256]


@pytest.mark.parametrize("contents", ["?", "a b c"])
def test_a_corpus_without_a_single_word_is_refused_in_words(contents):
    """A word has two letters at least."""
    with pytest.raises(ValueError, match="word"):
        Bm25Index.in_memory([{"id": "0", "contents": contents}])


def test_jax_is_kept_off_the_gpu(tmp_path):
    """bm25s computes with JAX where it finds it; it then took 59 of the 80 GB of a GPU that vLLM was to have."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("import os\nprint(os.environ.get('JAX_PLATFORMS'))\n", "utf-8")
    (tmp_path / "jax" / "lax.py").write_text("top_k = lambda scores, k: (scores[:k], scores[:k])\n", "utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", "import cusearch_async.retrieval.bm25"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    seen = subprocess.run(command, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert seen.stdout.split() == ["cpu"]


@given(st.lists(st.lists(st.lists(st.integers(0, 10**6), max_size=4), min_size=1, max_size=4), max_size=4))
def test_the_words_of_many_passages_are_read_passage_by_passage(chunks):
    """All of them as Python's numbers were most of the memory that an index of Wikipedia took to make."""
    rows = bm25._Rows()
    for chunk in chunks:
        flat = np.array([word for row in chunk for word in row], np.int32)
        rows.append(flat, np.cumsum([len(row) for row in chunk]))
    assert list(rows) == [row for chunk in chunks for row in chunk]
    assert len(rows) == sum(map(len, chunks))
