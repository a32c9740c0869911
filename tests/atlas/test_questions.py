"""Questions: each is a chain of true facts, none can be short-cut, and the split is clean."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from cusearch_async.atlas import questions
from cusearch_async.atlas.facts import Fact, Facts, load_facts
from cusearch_async.atlas.questions import (
    MAX_LINKS,
    NO_SEARCH_EVERY,
    WORLDS,
    Chain,
    chains,
    draw_chain,
    train_questions,
)

FACTS = load_facts()
SPLITS = ("train", "test")
PLAIN, HARD, SHALLOW = (WORLDS[name] for name in ("atlas", "atlas-hard", "atlas-hard-shallow"))


def held_out(per_length, world=PLAIN):
    return questions.test_chains(per_length, world)


@pytest.mark.parametrize("split", SPLITS)
def test_a_chain_starts_at_a_city_and_its_links_are_facts_that_come_back_to_no_entity(split):
    found = chains(split)
    for chain in found:
        assert all(FACTS.find(fact.relation, fact.entity) == fact for fact in chain.facts)
        assert all(following.entity == fact.value for fact, following in pairwise(chain.facts))
        visited = [chain.city, *(fact.value for fact in chain.facts)]
        assert len(visited) == len(set(visited))
    assert {chain.city for chain in found} <= set(FACTS.cities)
    assert {len(chain.facts) for chain in found} == set(range(1, MAX_LINKS + 1))
    assert set(Counter((chain.city, len(chain.facts)) for chain in found).values()) == {1}, "one of a length at most"
    assert chains.__wrapped__(split) == found, "the same every time"


def test_train_and_test_share_no_city_and_together_have_all():
    train, test = ({chain.city for chain in chains(split)} for split in SPLITS)
    assert not train & test
    assert train | test == set(FACTS.cities)


def test_one_city_in_ten_is_held_out_over_the_whole_range_of_sizes():
    test = {chain.city for chain in chains("test")}
    held_out = [city in test for city in FACTS.cities]
    assert [sum(held_out[i : i + 1000]) for i in range(0, 5000, 1000)] == [100] * 5


@pytest.mark.parametrize(
    ("split", "counts"), [("train", [4500, 4500, 4402, 4034, 3487]), ("test", [500, 500, 489, 450, 395])]
)
def test_counts_by_number_of_links(split, counts):
    found = Counter(len(chain.facts) for chain in chains(split))
    assert [found[links] for links in range(1, MAX_LINKS + 1)] == counts


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="'train' or 'test', got 'dev'"):
        chains("dev")


def test_a_chain_asks_its_relations_from_the_last_to_the_first():
    chain = Chain(
        (
            Fact("country", "Pinsk", "Belarus"),
            Fact("largest neighbour", "Belarus", "Russia"),
            Fact("currency", "Russia", "Ruble"),
        )
    )
    question = chain.question()
    assert question.text == "What is the currency of the largest neighbour of the country of Pinsk?"
    assert question.answers == ("Ruble",)
    assert (question.id, question.category) == ("atlas/3/Pinsk", "3 links")


def make_facts(*facts, cities=("Town",)):
    countries = tuple({fact.entity for fact in facts} - set(cities))
    return Facts(cities=cities, countries=countries, by_query={(f.relation, f.entity): f for f in facts})


def test_a_walk_that_ends_in_a_dead_end_is_taken_back():
    """Land has no second link but through its neighbour Isle, whose only fact leads back to Land."""
    facts = make_facts(
        Fact("country", "Town", "Land"),
        Fact("time zone", "Town", "Zone"),
        Fact("largest neighbour", "Land", "Isle"),
        Fact("smallest neighbour", "Land", "Shore"),
        Fact("largest neighbour", "Isle", "Land"),
        Fact("currency", "Shore", "Shell"),
    )
    three = draw_chain(facts, "Town", 3)
    assert three is not None
    assert [fact.value for fact in three.facts] == ["Land", "Shore", "Shell"]
    assert draw_chain(facts, "Town", 4) is None


def test_a_chain_continues_from_a_capital_as_from_a_city():
    facts = make_facts(
        Fact("country", "Town", "Land"),
        Fact("time zone", "Town", "Zone"),
        Fact("capital", "Land", "City"),
        Fact("country", "City", "Land"),
        Fact("time zone", "City", "Other zone"),
        cities=("Town", "City"),
    )
    chain = draw_chain(facts, "Town", 3)
    assert chain is not None
    assert chain.answer == "Other zone"


def test_no_chain_continues_from_a_capital_to_another_city_of_its_name():
    """Norfolk Island's Kingston is not Jamaica's."""
    for chain in (*chains("train"), *chains("test")):
        for before, after in pairwise(chain.facts):
            if before.relation == "capital":
                assert load_facts().find("country", after.entity).value == before.entity


def test_training_questions_are_distinct_and_hold_no_test_city():
    found = train_questions(PLAIN)
    assert len({question.id for question in found}) == len({question.text for question in found}) == len(found)
    test = {chain.city for chain in chains("test")}
    assert not any(question.id.split("/", 2)[2] in test for question in found)


def test_held_out_chains_come_in_equal_numbers_per_length_in_a_fixed_order():
    taken = held_out(60)
    assert [len(chain.facts) for chain in taken] == [links for links in range(1, 6) for _ in range(60)]
    assert set(taken) <= set(chains("test"))
    assert len(set(taken)) == 300
    assert held_out(60) == taken


def test_fewer_held_out_chains_are_the_first_of_more():
    few, more = held_out(5), held_out(20)
    for links in range(5):
        assert few[links * 5 : links * 5 + 5] == more[links * 20 : links * 20 + 5]


def test_held_out_chains_are_not_the_biggest_cities_only():
    sizes = [FACTS.cities.index(chain.city) for chain in held_out(60)]
    assert 1500 < sum(sizes) / len(sizes) < 3500


def test_more_held_out_chains_than_there_are_is_refused_with_the_number():
    with pytest.raises(ValueError, match=r"^must be <= 395 \(test chains of 5 links\), got 396"):
        held_out(396)


@pytest.mark.parametrize("count", [0, -1])
def test_no_held_out_chains_are_refused(count):
    with pytest.raises(ValueError, match=f"must be >= 1 .*, got {count}"):
        held_out(count)


@pytest.mark.parametrize("world", [HARD, SHALLOW])
@pytest.mark.parametrize("split", SPLITS)
def test_hard_questions_need_the_searches_that_their_category_says(world, split):
    for chain in chains(split, world):
        given = chain.facts[: len(chain.facts) - len(chain.needed)]
        assert [fact.sentence in chain.text for fact in chain.facts] == [fact in given for fact in chain.facts]
        assert chain.question().category.split()[0] == str(len(chain.needed))
        assert len(chain.facts) <= MAX_LINKS
    assert {len(chain.needed) for chain in chains(split, world)} == set(world.needed)


def test_a_question_may_tell_its_first_link():
    facts = (Fact("country", "Pinsk", "Belarus"), Fact("largest neighbour", "Belarus", "Russia"))
    question = Chain(facts, "atlas-hard", is_first_given=True).question()
    assert question.text == "The country of Pinsk is Belarus. What is the largest neighbour of the country of Pinsk?"
    assert (question.id, question.category) == ("atlas-hard/1/Pinsk", "1 link")


def test_the_hard_world_has_few_questions_without_a_search_and_tells_some_links():
    counts = Counter(len(chain.needed) for chain in chains("train", HARD))
    assert counts[0] == 4500 // NO_SEARCH_EVERY
    assert (counts[1], counts[2]) == (4500, 4474), "an island has no second link"
    told = [chain.is_first_given for chain in chains("train", HARD) if chain.needed]
    assert sum(told) / len(told) == pytest.approx(0.3, abs=0.02)


def test_a_world_has_the_same_held_out_cities():
    assert {chain.city for chain in chains("test", HARD)} <= {chain.city for chain in chains("test")}
    assert [len(chain.needed) for chain in held_out(3, HARD)] == [n for n in range(5) for _ in range(3)]


def test_the_worlds_share_no_question_id():
    ids = [{q.id for q in train_questions(world)} for world in WORLDS.values()]
    assert not ids[0] & ids[1] | ids[0] & ids[2] | ids[1] & ids[2]


def test_a_question_names_the_passages_of_the_links_that_it_does_not_tell():
    contents = {passage["contents"] for passage in FACTS.passages()}
    for chain in (*chains("test")[:200], *chains("test", HARD)[:200]):
        found = chain.question().evidence
        assert set(found) <= contents
        assert [text.split("\n")[1] for text in found] == [fact.sentence for fact in chain.needed]
