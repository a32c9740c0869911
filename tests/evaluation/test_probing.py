"""What a probed search shows, blocks and recognises."""

from __future__ import annotations

import pytest

from cusearch_async.evaluation.probing import Pass, ProbedSearch, evidence_in, run_passes
from cusearch_async.evaluation.scoring import EVAL_TICKETS
from cusearch_async.types import Question
from tests.evaluation.planted import QUESTIONS, Engine, PlantedRunner, reads
from tests.strategies import make_trajectory


def question_of(*evidence):
    return Question(id="a", text="?", answers=("x",), category="c", evidence=evidence)


class Finds:
    def __init__(self, *passages) -> None:
        self._passages = list(passages)

    async def search(self, *_):
        return list(self._passages)


async def test_recall_is_the_share_of_the_evidence_that_was_found():
    two, none = question_of("one  passage", "two"), question_of()
    unknown = Question(id="c", text="?", answers=("x",), category="c")
    probed = ProbedSearch(Finds("one passage", "three"))
    for number, question in enumerate((two, none, unknown)):
        await probed.search("?", 0, question, EVAL_TICKETS + number)
        await probed.search("?", 1, question, EVAL_TICKETS + number)
    assert probed.take_recall([two, none, unknown]) == [0.5, None, None]
    assert probed.take_recall([two, none, unknown]) == [0.0, None, None], "each pass counts for itself"


async def test_blocked_evidence_is_not_shown_and_a_closed_book_shows_nothing():
    question = QUESTIONS[3]
    for mode, shown, recall in (("full", 2, 1.0), ("blocked", 1, 1.0), ("closed", 0, 0.0)):
        probed = ProbedSearch(Engine(), mode)
        found = await probed.search("?", 0, question, EVAL_TICKETS)
        assert len(found) == shown
        assert (question.evidence[0] in found) == (mode == "full")
        assert probed.take_recall([question]) == [recall]


LONG = " ".join(f"The botanist left the town in the year {year}." for year in range(1900, 1960))


@pytest.mark.parametrize(
    ("passage", "evidence"),
    [
        ("He left Pinsk.", "He left  Pinsk. "),
        ('"Ivan"\nHe left Pinsk.', "He left Pinsk."),
        ("He left Pinsk.", '"Ivan"\nHe left Pinsk.'),
        ('"Ivan"\nHe left Pinsk.', '"Ivan"\n\nHe left Pinsk.\n'),
        ('"Ivan"\n' + LONG, LONG),
        ('"Ivan"\n' + LONG[500:1200], LONG),
        (LONG[500:1200], '"Ivan"\n' + LONG),
        ('"Ivan"\n' + LONG[:400] + "…", LONG),
        ('"Ivan"\nIvan ' + LONG[:400] + " And more.", '"Ivan"\n' + LONG[:400]),
    ],
    ids=["white space", "title", "no title", "both", "long", "a later part", "a part of a titled one", "cut", "longer"],
)
async def test_evidence_is_recognised_with_a_title_and_in_parts(passage, evidence):
    assert evidence_in(passage, [evidence, "Another text."]) == {evidence}
    blocked = ProbedSearch(Finds(passage, "The sea is salty."), "blocked")
    assert await blocked.search("?", 0, question_of(evidence), EVAL_TICKETS) == ["The sea is salty."]


@pytest.mark.parametrize(
    ("passage", "evidence"),
    [
        ("", "He left Pinsk."),
        ("Pinsk", "He left Pinsk."),
        ('"Ivan"\n', "He left Pinsk."),
        ('"Ivan"\nHe left Minsk.', '"Ivan"\nHe left Pinsk.'),
        ('"Ivan"\nHe was born in 1911.', '"Olga"\nHe was born in 1911.'),
        (LONG.replace("botanist", "chemist"), LONG),
    ],
)
def test_other_passages_are_no_evidence(passage, evidence):
    assert evidence_in(passage, [evidence]) == set()


async def test_passes_run_in_order_each_in_its_mode_and_with_separate_random_numbers():
    probed = ProbedSearch(Engine())
    runner, some = PlantedRunner(reads, probed), QUESTIONS[:3]
    passes = [Pass(some, 0.0), Pass(some, 0.0, "closed"), Pass(some, 0.0, "blocked"), Pass(some, 0.7)]
    results = await run_passes(runner, probed, passes, concurrency=2)
    assert [one.em for one in results] == [[1.0] * 3, [0.0] * 3, [0.0] * 3, [1.0] * 3]
    assert [one.recall for one in results] == [[1.0] * 3, [0.0] * 3, [1.0] * 3, [1.0] * 3]
    assert sorted(set(runner.done)) == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.7)]


class FailsAfterItsSearch(PlantedRunner):
    """The first attempt; the second answers without a search."""

    async def run(self, question, ticket, *_):
        if self.done:
            return make_trajectory(ticket)
        self.done.append((0, 0.0))
        await self._search.search("?", 0, question, ticket)
        raise TimeoutError


async def test_what_a_failed_attempt_found_is_not_of_the_next():
    probed = ProbedSearch(Engine())
    (result,) = await run_passes(FailsAfterItsSearch(reads, probed), probed, [Pass(QUESTIONS[3:4], 0.0)], 1)
    assert result.recall == [0.0]
