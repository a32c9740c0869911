"""Client and server understand each other: what one encodes the other decodes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.retrieval import protocol
from cusearch_async.retrieval.backend import Context
from cusearch_async.retrieval.protocol import Behaviour, Request

texts = st.text(st.characters(exclude_categories=["Cs"]))
contexts = st.builds(
    Context,
    question=texts.filter(str.strip),
    answers=st.lists(texts, min_size=1, max_size=3).map(tuple),
    step=st.integers(0, 10**6),
)
documents = st.lists(st.tuples(st.fixed_dictionaries({"id": texts, "contents": texts}), st.floats(0, 1)), max_size=4)


@st.composite
def requests(draw):
    count = draw(st.integers(0, 5))

    def one_each(values):
        return st.lists(values, min_size=count, max_size=count)

    seeds, asked_by = (draw(st.none() | one_each(each)) for each in (st.integers(0, 2**63), st.none() | contexts))
    return Request(draw(one_each(texts)), draw(st.integers(1, 100)), draw(st.booleans()), seeds, asked_by)


@given(requests())
def test_a_request_is_decoded_as_it_was_meant(request):
    assert protocol.decode_request(json.loads(json.dumps(protocol.encode_request(request))), 3) == request


@given(st.lists(documents, max_size=3))
def test_the_contents_of_an_answer_are_those_of_its_documents_in_their_order(found):
    body = json.loads(json.dumps(protocol.encode_answer(found, return_scores=True)))
    assert protocol.decode_answer(body) == [[passage["contents"] for passage, _ in rows] for rows in found]


def test_scores_of_an_own_backend_may_be_numpys():
    """Each of its answers was an error without a reason."""
    body = protocol.encode_answer([[({"id": "1", "contents": "x"}, np.float32(0.5))]], return_scores=True)
    assert json.loads(json.dumps(body))["result"][0][0]["score"] == 0.5


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("accepts_seed", [True, False])
def test_health_says_how_the_engine_behaves(deterministic, accepts_seed):
    behaviour = Behaviour(deterministic, accepts_seed)
    body = protocol.encode_health(behaviour, 7, {"passages": 3})
    assert (body["queries"], body["passages"]) == (7, 3)
    assert protocol.decode_health(json.dumps(body).encode()) == behaviour


def test_fields_of_ours_are_only_sent_where_they_say_something():
    """Servers of others may refuse a field that they do not know."""
    body = protocol.encode_request(Request(["q"], 3, True))
    assert body == {"queries": ["q"], "topk": 3, "return_scores": True}
