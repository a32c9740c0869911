"""The shipped facts: a few well-known ones, and the shape of all of them."""

from __future__ import annotations

import pytest

from cusearch_async.atlas.facts import CITY_RELATIONS, COUNTRY_RELATIONS, Fact, load_facts
from cusearch_async.retrieval.bm25 import Bm25Index

FACTS = load_facts()


@pytest.mark.parametrize(
    ("relation", "entity", "value"),
    [
        ("country", "Pinsk", "Belarus"),
        ("time zone", "Pinsk", "Europe/Minsk"),
        ("capital", "Peru", "Lima"),
        ("largest neighbour", "Belarus", "Russia"),
        ("smallest neighbour", "Belarus", "Latvia"),
        ("largest neighbour", "Portugal", "Spain"),
        ("currency", "Peru", "Sol"),
        ("internet domain", "Poland", ".pl"),
        ("continent", "Japan", "Asia"),
    ],
)
def test_a_well_known_fact_is_there(relation, entity, value):
    assert FACTS.find(relation, entity) == Fact(relation, entity, value)


@pytest.mark.parametrize(
    ("relation", "entity"),
    [
        ("capital", "Atlantis"),
        ("capital", "Pinsk"),
        ("time zone", "Peru"),
        ("river", "Peru"),
        ("largest neighbour", "Japan"),
        ("smallest neighbour", "Portugal"),
    ],
)
def test_what_is_not_a_fact_is_not_found(relation, entity):
    assert FACTS.find(relation, entity) is None


def test_the_world_has_5000_cities_and_243_countries():
    assert len(FACTS.cities) == len(set(FACTS.cities)) == 5000
    assert len(FACTS.countries) == len(set(FACTS.countries)) == 243
    assert not set(FACTS.cities) & set(FACTS.countries), "no name means two entities"


def test_every_city_has_every_city_relation_and_no_other():
    cities = set(FACTS.cities)
    relations = {(f.relation, f.entity) for f in FACTS.by_query.values() if f.entity in cities}
    assert relations == {(relation, city) for relation in CITY_RELATIONS for city in cities}


def test_facts_about_countries_use_the_country_relations():
    used = {f.relation for f in FACTS.by_query.values() if f.entity in set(FACTS.countries)}
    assert used == set(COUNTRY_RELATIONS)


def test_countries_and_neighbours_are_countries_of_the_world():
    countries = set(FACTS.countries)
    for fact in FACTS.by_query.values():
        if fact.relation in ("country", "largest neighbour", "smallest neighbour"):
            assert fact.value in countries
            assert fact.value != fact.entity


def test_a_neighbour_has_neighbours_too():
    neighbours = [f for f in FACTS.by_query.values() if f.relation in ("largest neighbour", "smallest neighbour")]
    assert [f for f in neighbours if FACTS.find("largest neighbour", f.value) is None] == []


def test_every_value_is_clean_text():
    texts = {text for fact in FACTS.by_query.values() for text in (fact.entity, fact.value)}
    assert [text for text in texts if text != " ".join(text.split()) or not text or set(text) & set('<>{}"')] == []


def test_each_fact_is_one_passage_with_a_quoted_title():
    passages = FACTS.passages()
    assert len({passage["id"] for passage in passages}) == len(passages) == len(FACTS.by_query)
    contents = {passage["contents"] for passage in passages}
    assert contents == {f'"{f.entity}"\nThe {f.relation} of {f.entity} is {f.value}.' for f in FACTS.by_query.values()}


def test_the_facts_are_the_same_every_time():
    assert load_facts.__wrapped__() == FACTS


def test_a_facts_query_finds_its_passage_among_the_first_three():
    facts = list(FACTS.by_query.values())[::50]
    found = Bm25Index.in_memory(FACTS.passages()).search([fact.query for fact in facts], 3)
    missed = [f.query for f, r in zip(facts, found, strict=True) if not any(f.sentence in p["contents"] for p, _ in r)]
    assert len(facts) > 200
    assert missed == []
