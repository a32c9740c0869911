"""Questions of the atlas world: chains of 1 to 5 links, each of which needs one search.

"the currency of the largest neighbour of the country of Pinsk" has three: country -> largest neighbour ->
currency. A chain never comes back to an entity it has passed, so no link can be skipped.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from cusearch_async.atlas.facts import CITY_RELATIONS, COUNTRY_RELATIONS, Fact, Facts, load_facts
from cusearch_async.types import Question

MAX_LINKS = 5
TEST_CITY_EVERY = 10
NEIGHBOURS = ("largest neighbour", "smallest neighbour")


@dataclass(frozen=True, slots=True)
class Chain:
    """The facts to look up, in order; the value of the last is the answer."""

    facts: tuple[Fact, ...]

    @property
    def city(self) -> str:
        return self.facts[0].entity

    @property
    def answer(self) -> str:
        return self.facts[-1].value

    @property
    def text(self) -> str:
        relations = " of the ".join(fact.relation for fact in reversed(self.facts))
        return f"What is the {relations} of {self.city}?"

    def question(self) -> Question:
        return Question(
            id=f"atlas/{len(self.facts)}/{self.city}",
            text=self.text,
            answers=(self.answer,),
            category=f"{len(self.facts)} link{'s' if len(self.facts) > 1 else ''}",
        )


def draw_chain(facts: Facts, city: str, links: int) -> Chain | None:
    """One chain of `links` links that starts at `city`, the same at every call; None if there is none
    (an island has no neighbours to go on to)."""
    rng = random.Random(f"{city}/{links}")
    found = next(_walks(facts, city, links, rng, visited=frozenset({city})), None)
    return Chain(found) if found else None


def _walks(
    facts: Facts, entity: str, links: int, rng: random.Random, visited: frozenset[str]
) -> Iterator[tuple[Fact, ...]]:
    """Chains from `entity` in random order, depth first."""
    is_city = facts.find("time zone", entity) is not None
    if links > 1:
        relations = ["country"] if is_city else [*NEIGHBOURS, "capital"]
    else:
        relations = list(CITY_RELATIONS if is_city else COUNTRY_RELATIONS)
    rng.shuffle(relations)
    for relation in relations:
        fact = facts.find(relation, entity)
        if fact is None or fact.value in visited:
            continue
        if links > 1 and relation == "capital" and not _is_city_of(facts, fact.value, entity):
            continue
        if links == 1:
            yield (fact,)
            continue
        for rest in _walks(facts, fact.value, links - 1, rng, visited | {fact.value}):
            yield (fact, *rest)


def _is_city_of(facts: Facts, city: str, country: str) -> bool:
    """Whether the city of that name in the tables lies in `country`; two capitals can share a name."""
    fact = facts.find("country", city)
    return fact is not None and fact.value == country


@cache
def chains(split: str) -> tuple[Chain, ...]:
    """All chains of a split: for each of its cities one of each length that exists.

    `train` and `test` share no city. Order: by city, then by number of links."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    facts = load_facts()
    is_test = split == "test"
    cities = [c for i, c in enumerate(facts.cities) if (i % TEST_CITY_EVERY == 0) == is_test]
    drawn = (draw_chain(facts, city, links) for city in cities for links in range(1, MAX_LINKS + 1))
    return tuple(chain for chain in drawn if chain is not None)


def train_questions() -> list[Question]:
    return [chain.question() for chain in chains("train")]


def test_chains(per_length: int) -> list[Chain]:
    """The first `per_length` held-out chains of each number of links, in a fixed random order of cities."""
    shuffled = list(chains("test"))
    random.Random("atlas/test").shuffle(shuffled)
    taken: list[Chain] = []
    for links in range(1, MAX_LINKS + 1):
        of_length = [chain for chain in shuffled if len(chain.facts) == links]
        if per_length > len(of_length):
            raise ValueError(
                f"eval.questions_per_category must be <= {len(of_length)} (test chains of {links} links), "
                f"got {per_length}"
            )
        taken.extend(of_length[:per_length])
    return taken
