"""The prose world: what its passages tell, what its questions ask, and how a search finds the next link."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from cusearch_async.algorithm.answers import exact_match
from cusearch_async.atlas import prose
from cusearch_async.atlas.facts import load_facts
from cusearch_async.atlas.questions import WORLDS, chains
from cusearch_async.atlas.teacher import Teacher
from cusearch_async.environments.search import parse_action
from cusearch_async.retrieval.bm25 import Bm25Index

PROSE = WORLDS["atlas-prose"]
FACTS = [fact for fact in load_facts().by_query.values() if fact.relation != "time zone"]
"""What the prose tells."""


@pytest.fixture(scope="module")
def index() -> Bm25Index:
    return Bm25Index.in_memory(prose.passages())


def test_the_passage_of_a_fact_tells_it():
    told = Counter()
    for fact in FACTS:
        passage = prose.passage_of(fact)
        assert passage.startswith(f'"{fact.entity}"\n')
        assert fact.value in passage
        told[passage] += 1
    contents = [passage["contents"] for passage in prose.passages()]
    assert len(set(contents)) == len(contents)
    assert set(told) < set(contents)
    assert len(contents) - len(told) == 625, "one of eight cities has a passage that tells nothing"


def test_a_passage_beside_the_facts_names_another_country_than_the_citys():
    facts = load_facts()
    of_facts = {prose.passage_of(fact) for fact in FACTS}
    for passage in prose.passages():
        if passage["contents"] not in of_facts:
            city = re.match(r'"(.+)"\n', passage["contents"])[1]
            named = [name for name in facts.countries if re.search(rf"\b{re.escape(name)}\b", passage["contents"])]
            assert set(named) - {facts.by_query["country", city].value}


def test_questions_name_their_first_entity_and_what_they_tell_is_true():
    for chain in chains("test", PROSE):
        text = chain.text
        assert text == chain.text
        assert text.endswith("?")
        assert chain.city in text
        assert "{" not in text
        assert set(chain.facts) <= set(FACTS)
        given, _, asked = text.rpartition(". ")
        assert bool(given) == chain.is_first_given
        if given:
            assert chain.city in given
            assert chain.facts[0].value in given
        for fact in chain.facts[1:]:
            assert not re.search(rf"\b{re.escape(fact.entity)}\b", asked.replace(chain.city, "")), (
                "a bridge must be found"
            )


def test_a_question_has_the_passages_that_it_needs_for_evidence():
    for chain in chains("test", PROSE)[:300]:
        question = chain.question()
        assert question.evidence == tuple(prose.passage_of(fact) for fact in chain.needed)
        assert question.category == f"{len(chain.needed)} link{'s' * (len(chain.needed) != 1)}"


def test_the_next_link_is_found_by_its_own_question_and_not_by_the_whole_one(index):
    """So a policy has to put the entity that it has read into its next query."""
    rng = random.Random(0)
    later = [(chain, fact) for chain in rng.sample(chains("train", PROSE), 300) for fact in chain.needed[1:]]
    found = Counter()
    for chain, fact in later:
        for kind, query in (("whole", chain.text), ("own", prose.asked(fact, rng)), ("brief", fact.query)):
            [[(passage, _)]] = index.search([query], 1)
            found[kind] += passage["contents"] == prose.passage_of(fact)
    assert found["whole"] < 0.02 * len(later)
    assert found["brief"] > 0.9 * len(later)
    assert 0.8 * len(later) < found["own"] < found["brief"], "the words of a query matter"


def test_the_teacher_searches_the_real_index_and_is_often_wrong(index):
    """A third of its episodes must be, so that its pupil's rollouts of one question differ."""
    rows = list(Teacher(topk=1, seed=0).write(200))
    assert rows == list(Teacher(topk=1, seed=0).write(200))
    assert rows != list(Teacher(topk=1, seed=1).write(200))
    trained = {chain.text for chain in chains("train", PROSE)}
    assert {row["question"] for row in rows} <= trained
    assert len({row["question"] for row in rows}) == len(rows)
    right = 0
    for row in rows:
        *searches, last = map(parse_action, row["turns"])
        assert last.kind == "answer"
        assert [action.kind for action in searches] == ["search"] * len(row["documents"])
        assert len(searches) <= 5
        for action, documents in zip(searches, row["documents"], strict=True):
            assert documents == [passage["contents"] for passage, _ in index.search([action.text], 1)[0]]
        right += exact_match(last.text, row["golden_answers"])
    assert 0.4 < right / len(rows) < 0.75
    assert {len(row["documents"]) for row in rows} == set(range(6))
