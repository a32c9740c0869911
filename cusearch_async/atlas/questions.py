"""Questions of the atlas worlds: chains of links, each of which needs one search.

"the currency of the largest neighbour of the country of Pinsk" has three: country -> largest neighbour -> currency. A
chain never returns to an entity it has passed, so no link can be skipped. In the hard world the first link is sometimes
given: "The country of Pinsk is Belarus. What is the currency of the country of Pinsk?" needs one search."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from cusearch_async.atlas import prose
from cusearch_async.atlas.facts import CITY_RELATIONS, COUNTRY_RELATIONS, Fact, Facts, load_facts
from cusearch_async.types import Question

MAX_LINKS = 5
TEST_CITY_EVERY = 10
GIVEN_SHARE = 0.3
"""Of the hard world's chains that need a search: how many have their first link given."""
NO_SEARCH_EVERY = 3
"""In the hard world one city in this many has a question that needs no search."""


@dataclass(frozen=True, slots=True)
class World:
    """A set of questions over the facts, by the name that a config gives it."""

    name: str
    needed: range
    is_hard: bool
    is_prose: bool = False
    """Whether questions and passages are those of `prose`."""


WORLDS = {
    world.name: world
    for world in (
        World("atlas", range(1, MAX_LINKS + 1), is_hard=False),
        World("atlas-hard", range(MAX_LINKS), is_hard=True),
        World("atlas-hard-shallow", range(2), is_hard=True),
        World("atlas-prose", range(MAX_LINKS), is_hard=True, is_prose=True),
    )
}
NEIGHBOURS = ("largest neighbour", "smallest neighbour")


@dataclass(frozen=True, slots=True)
class Chain:
    """The facts to look up, in order; the value of the last is the answer."""

    facts: tuple[Fact, ...]
    world: str = "atlas"
    is_first_given: bool = False
    """Whether the question tells the first link."""

    @property
    def needed(self) -> tuple[Fact, ...]:
        return self.facts[self.is_first_given :]

    @property
    def city(self) -> str:
        return self.facts[0].entity

    @property
    def answer(self) -> str:
        return self.facts[-1].value

    @property
    def text(self) -> str:
        if WORLDS[self.world].is_prose:
            return prose.question(self.facts, self.is_first_given)
        relations = " of the ".join(fact.relation for fact in reversed(self.facts))
        given = f"{self.facts[0].sentence} " if self.is_first_given else ""
        return f"{given}What is the {relations} of {self.city}?"

    def question(self) -> Question:
        needed, is_prose = len(self.needed), WORLDS[self.world].is_prose
        return Question(
            id=f"{self.world}/{needed}/{self.city}",
            text=self.text,
            answers=(self.answer,),
            category=f"{needed} link{'' if needed == 1 else 's'}",
            evidence=tuple(prose.passage_of(fact) if is_prose else fact.passage for fact in self.needed),
        )


def draw_chain(facts: Facts, city: str, links: int, is_prose: bool = False) -> Chain | None:
    """One chain of `links` links that starts at `city`, the same at every call; None if there is none (an island has no
    neighbours). `is_prose`: of relations that the prose tells."""
    rng = random.Random(f"{city}/{links}")
    of_city = prose.CITY_RELATIONS if is_prose else CITY_RELATIONS
    found = next(_walks(facts, city, links, rng, visited=frozenset({city}), of_city=of_city), None)
    return Chain(found) if found else None


def _walks(
    facts: Facts, entity: str, links: int, rng: random.Random, visited: frozenset[str], of_city: tuple[str, ...]
) -> Iterator[tuple[Fact, ...]]:
    """Chains from `entity` in random order, depth first."""
    is_city = facts.find("time zone", entity) is not None
    if links > 1:
        relations = ["country"] if is_city else [*NEIGHBOURS, "capital"]
    else:
        relations = list(of_city if is_city else COUNTRY_RELATIONS)
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
        for rest in _walks(facts, fact.value, links - 1, rng, visited | {fact.value}, of_city):
            yield (fact, *rest)


def _is_city_of(facts: Facts, city: str, country: str) -> bool:
    """Whether the city of that name in the tables lies in `country`; two capitals can share a name."""
    fact = facts.find("country", city)
    return fact is not None and fact.value == country


@cache
def chains(split: str, world: World = WORLDS["atlas"]) -> tuple[Chain, ...]:
    """All chains of a split: for each of its cities one of each length that exists, by city, then by number of links.
    `train` and `test` start at no common city."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    facts = load_facts()
    is_test = split == "test"
    cities = [c for i, c in enumerate(facts.cities) if (i % TEST_CITY_EVERY == 0) == is_test]
    drawn = (_draw(facts, number, city, world, needed) for number, city in enumerate(cities) for needed in world.needed)
    return tuple(chain for chain in drawn if chain is not None)


def _draw(facts: Facts, number: int, city: str, world: World, needed: int) -> Chain | None:
    if needed == 0 and number % NO_SEARCH_EVERY:
        return None
    is_told = world.is_hard and random.Random(f"{city}/{needed}/given").random() < GIVEN_SHARE
    is_given = needed == 0 or is_told
    chain = draw_chain(facts, city, needed + is_given, world.is_prose)
    return chain and replace(chain, world=world.name, is_first_given=is_given)


@cache
def train_questions(world: World) -> tuple[Question, ...]:
    return tuple(chain.question() for chain in chains("train", world))


def test_chains(per_length: int, world: World) -> list[Chain]:
    """The first `per_length` held-out chains of each number of links, in a fixed random order of cities.

    Raises: ValueError when there are fewer, or none is asked for."""
    if per_length < 1:
        raise ValueError(f"must be >= 1 test chain of each number of links, got {per_length}")
    shuffled = list(chains("test", world))
    random.Random("atlas/test").shuffle(shuffled)
    taken: list[Chain] = []
    for needed in world.needed:
        of_length = [chain for chain in shuffled if len(chain.needed) == needed]
        if per_length > len(of_length):
            raise ValueError(f"must be <= {len(of_length)} (test chains of {needed} links), got {per_length}")
        taken.extend(of_length[:per_length])
    return taken
