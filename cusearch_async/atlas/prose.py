"""The atlas world in prose: its facts in passages of English sentences, its chains as questions that people would ask.

The passage of a fact tells other facts of the same entity too, each in one of several phrasings; others mention the
entity and tell nothing about it. A search finds the next fact by the entity that the last one has named, far less often
by the words of the question, which names the first entity alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache

from cusearch_async.atlas.facts import Fact, Facts, load_facts

CITY_RELATIONS = ("country",)
TOPICS = (
    CITY_RELATIONS,
    ("capital", "continent"),
    ("largest neighbour", "smallest neighbour"),
    ("currency", "internet domain"),
)
"""Relations whose facts of an entity share a passage."""

SENTENCES = {
    "country": (
        "{entity} is a city in {value}.",
        "The city of {entity} lies in {value}.",
        "{entity} belongs to {value}, a country with many such towns.",
    ),
    "capital": (
        "{value} is the capital of {entity}.",
        "The capital of {entity} is {value}.",
        "The government of {entity} sits in {value}, its capital.",
    ),
    "continent": (
        "The country lies on the continent {value}.",
        "It is part of the continent {value}.",
        "Its continent is {value}.",
    ),
    "largest neighbour": (
        "The largest neighbour of {entity} is {value}.",
        "{value} is the largest neighbour of {entity}.",
    ),
    "smallest neighbour": (
        "The smallest neighbour of {entity} is {value}.",
        "{value} is the smallest neighbour of {entity}.",
    ),
    "currency": (
        "People in {entity} pay with the {value}, their currency.",
        "The currency of {entity} is the {value}.",
        "Money in {entity} is called the {value}.",
    ),
    "internet domain": (
        "Web addresses in {entity} have the internet domain {value}.",
        "The internet domain of {entity} is {value}.",
    ),
}
"""How a passage tells a fact."""
OF_CITIES = (
    "Many of its houses stand along the river.",
    "Its market is known for fruit and cloth.",
    "It has a museum, two theatres and a university.",
    "The old town was rebuilt after a fire.",
)
"""Sentences about a city that tell no fact."""
BESIDES = (
    "Every spring a fair in {city} draws traders from {country}.",
    "A ship sails from {city} to {country} twice a month.",
    "{city} and a town in {country} share a music school.",
)
"""Sentences that tell no fact, of a city and a country that is not its own."""
NESTED = {
    "country": ("the country where {inner} lies", "the country of {inner}", "the country that {inner} belongs to"),
    "capital": ("the capital of {inner}", "the capital city of {inner}"),
    "largest neighbour": ("the largest country next to {inner}", "the biggest neighbour of {inner}"),
    "smallest neighbour": ("the smallest country next to {inner}", "the smallest neighbour of {inner}"),
}
"""How a question names the value of a link that is not its last."""
ASKED = {
    "country": ("In which country is {inner}?", "Which country does {inner} belong to?"),
    "capital": ("What is the capital of {inner}?", "Which city is the capital of {inner}?"),
    "continent": ("On which continent is {inner}?", "Which continent is {inner} part of?"),
    "largest neighbour": ("Which is the largest country next to {inner}?", "What is the biggest neighbour of {inner}?"),
    "smallest neighbour": (
        "Which is the smallest country next to {inner}?",
        "What is the smallest neighbour of {inner}?",
    ),
    "currency": ("What money do people use in {inner}?", "Which currency is used in {inner}?"),
    "internet domain": ("How do web addresses end in {inner}?", "What is the internet domain of {inner}?"),
}
"""How a question asks for the value of its last link."""


def passages() -> list[dict[str, str]]:
    """The corpus in Search-R1's schema."""
    return [{"id": str(number), "contents": contents} for number, contents in enumerate(_corpus())]


def passage_of(fact: Fact) -> str:
    """The one that tells a fact."""
    return _told()[fact]


def question(facts: Sequence[Fact], is_first_given: bool) -> str:
    """The question of a chain, the same at every call."""
    rng = random.Random(f"{facts[0].entity}/{facts[-1].query}/{len(facts)}")
    inner, first = facts[0].entity, ""
    if is_first_given:
        first = rng.choice(SENTENCES["country"][:2]).format(entity=inner, value=facts[0].value) + " "
    for fact in facts[:-1]:
        inner = rng.choice(NESTED[fact.relation]).format(inner=inner)
    return first + rng.choice(ASKED[facts[-1].relation]).format(inner=inner)


def asked(fact: Fact, rng: random.Random) -> str:
    """A question for a fact alone."""
    return rng.choice(ASKED[fact.relation]).format(inner=fact.entity)


@cache
def _told() -> dict[Fact, str]:
    """Fact -> its passage."""
    facts = load_facts()
    found = {}
    for entity in (*facts.cities, *facts.countries):
        for topic in TOPICS:
            some = [fact for relation in topic if (fact := facts.find(relation, entity))]
            found.update(dict.fromkeys(some, _passage(some) if some else ""))
    return found


def _passage(facts: Sequence[Fact]) -> str:
    """Of facts of one entity."""
    entity = facts[0].entity
    rng = random.Random(f"{entity}/{[fact.relation for fact in facts]}")
    sentences = [rng.choice(SENTENCES[fact.relation]).format(entity=fact.entity, value=fact.value) for fact in facts]
    if facts[0].relation in CITY_RELATIONS:
        sentences.append(rng.choice(OF_CITIES))
    return f'"{entity}"\n{" ".join(sentences)}'


def _corpus() -> Iterator[str]:
    yield from dict.fromkeys(_told().values())
    yield from _besides(load_facts())


def _besides(facts: Facts) -> Iterator[str]:
    """Passages that tell no fact: one for every eighth city."""
    rng = random.Random("besides")
    for city in facts.cities[::8]:
        own = facts.by_query["country", city].value
        country = rng.choice([name for name in rng.sample(facts.countries, 2) if name != own])
        yield f'"{city}"\n{rng.choice(BESIDES).format(city=city, country=country)}'
