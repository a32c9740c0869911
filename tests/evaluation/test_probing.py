"""Probes tell a policy that knows, one that guesses and one whose engine leaks from one that searches and reads."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy import stats

from cusearch_async.evaluation.probing import (
    ProbedSearch,
    Samples,
    compare_paired,
    findings,
    summarize_samples,
)
from cusearch_async.evaluation.scoring import EVAL_TICKETS
from cusearch_async.types import Question
from tests.strategies import make_trajectory

CAPITALS = [f"City {i % 12}" for i in range(600)]
QUESTIONS = [
    Question(
        id=f"q{i}",
        text=f"What is the capital of Land {i}?",
        answers=(capital,),
        category="c",
        evidence=(f'"Land {i}"\nThe capital of Land {i} is {capital}.',),
    )
    for i, capital in enumerate(CAPITALS)
]


class Engine:
    """Finds a question's evidence, and another passage; one that leaks always tells the answer in the other one."""

    def __init__(self, leaks: bool = False) -> None:
        self._leaks = leaks

    async def search(self, query, draw, question, ticket):
        hint = f"Forum: it is {question.answers[0]}, trust me." if self._leaks else "The sea is salty."
        return [*question.evidence, hint]


def read(passages, question):
    """The answer that stands in passages, if one does."""
    return next((question.answers[0] for text in passages if question.answers[0] in text), None)


def knows(passages, question, rng):
    return question.answers[0]


def guesses(passages, question, rng):
    return rng.choice(CAPITALS)


def reads(passages, question, rng):
    return read(passages, question)


async def play(answer, engine, mode, sample=0):
    """EM by question, and the episodes, of a policy that searches once."""
    search, rng = ProbedSearch(engine, mode), random.Random(f"{mode} {sample}")
    episodes = []
    for number, question in enumerate(QUESTIONS):
        passages = await search.search("?", 0, question, EVAL_TICKETS + number)
        prediction = answer(passages, question, rng)
        episodes.append(make_trajectory(number, 0, prediction=prediction, em=float(prediction == question.answers[0])))
    return episodes, search.take_recall(QUESTIONS)


async def report(answer, engine):
    full, closed, blocked = [
        [t.em for t in (await play(answer, engine, mode))[0]] for mode in ("full", "closed", "blocked")
    ]
    samples = summarize_samples([(await play(answer, engine, "full", k))[0] for k in range(1, 5)])
    return " ".join(findings(QUESTIONS, full, closed, blocked, samples))


async def test_planted_policies_are_told_apart():
    assert (await report(knows, Engine())).startswith(
        "searching does not help: EM 1.000 with the engine, 1.000 without"
    )
    assert (await report(knows, Engine())).endswith("so it knows the answers by heart")
    assert (await report(guesses, Engine())).endswith("so it guesses")
    leaking = await report(reads, Engine(leaks=True))
    assert "searching helps" in leaking
    assert "the engine leaks answers: without the evidence EM is 1.000, without any engine 0.000" in leaking
    honest = await report(reads, Engine())
    assert honest.startswith("searching helps: EM 1.000 with the engine, 0.000 without")
    assert "leaks" not in honest


SAME = Samples(4, 0.5, 0.5, 1.0, 0.0)


def test_questions_that_need_no_search_say_nothing_of_searching():
    """A policy that reads is as right without an engine where the question says it all."""
    easy = [Question(id=f"e{i}", text="?", answers=("x",), category="c", evidence=()) for i in range(80)]
    right, wrong = [1.0] * 90, [1.0] * 80 + [0.0] * 10
    said = findings([*easy, *QUESTIONS[:10]], right, wrong, wrong, SAME)
    assert said == [
        "searching helps: EM 1.000 with the engine, 0.000 without (p = 0.002) on 10 questions that need a search"
    ]
    assert findings(easy, right[:80], wrong[:80], wrong[:80], SAME) == []


def test_a_gain_that_is_not_significant_is_not_called_none():
    """12 of 40 right with the engine and 8 without: too few questions for a verdict either way."""
    full, closed = [1.0] * 12 + [0.0] * 28, [1.0] * 7 + [0.0] * 32 + [1.0]
    (said,) = findings(QUESTIONS[:40], full, closed, closed, SAME)
    assert said.startswith("too few questions to tell whether searching helps: EM 0.300 with the engine, 0.200 without")
    assert "by heart" not in said


async def test_recall_is_the_share_of_the_evidence_that_was_found():
    two = Question(id="a", text="?", answers=("x",), category="c", evidence=("one  passage", "two"))
    none = Question(id="b", text="?", answers=("x",), category="c", evidence=())
    unknown = Question(id="c", text="?", answers=("x",), category="c")

    class Half:
        async def search(self, *_):
            return ["one passage", "three"]

    probed = ProbedSearch(Half())
    for number, question in enumerate((two, none, unknown)):
        await probed.search("?", 0, question, EVAL_TICKETS + number)
        await probed.search("?", 1, question, EVAL_TICKETS + number)
    assert probed.take_recall([two, none, unknown]) == [0.5, None, None]
    assert probed.take_recall([two, none, unknown]) == [0.0, None, None], "each pass counts for itself"


async def test_blocked_evidence_is_not_shown_and_a_closed_book_shows_nothing():
    question = QUESTIONS[3]
    for mode, shown in (("full", 2), ("blocked", 1), ("closed", 0)):
        found = await ProbedSearch(Engine(), mode).search("?", 0, question, EVAL_TICKETS)
        assert len(found) == shown
        assert (question.evidence[0] in found) == (mode == "full")


def samples_of(*passes):
    return [[make_trajectory(i, 0, prediction=p, em=float(p == "x")) for i, p in enumerate(row)] for row in passes]


def test_samples_are_counted_by_hand():
    """Question 0: x, x, b; question 1: none, unknown, x; question 2: b, b, b."""
    found = summarize_samples(samples_of(["x", None, "b"], ["X.", "I don't know", "b"], ["b", "x", "the b"]))
    assert found == Samples(3, pytest.approx(2 / 9), pytest.approx(2 / 3), pytest.approx(8 / 12), pytest.approx(2 / 9))


def test_samples_need_a_pass():
    with pytest.raises(ValueError, match="one pass or more"):
        summarize_samples([])


def test_a_paired_comparison_is_mcnemars_exact_test():
    rng = np.random.default_rng(0)
    first, second = (rng.random(200) < share for share in (0.6, 0.45))
    found = compare_paired(first, second)
    b, c = int((first & ~second).sum()), int((~first & second).sum())
    assert (found.only_first, found.only_second) == (b, c)
    assert found.p == pytest.approx(min(1.0, 2 * stats.binom.cdf(min(b, c), b + c, 0.5)))
    assert found.difference == pytest.approx((b - c) / 200)
    low, high = found.interval
    spread = 1.96 * np.std(first.astype(float) - second.astype(float)) / np.sqrt(200)
    assert (low, high) == (
        pytest.approx(found.difference - spread, abs=0.02),
        pytest.approx(found.difference + spread, abs=0.02),
    )


def test_equal_scores_have_no_difference():
    found = compare_paired([1, 0, 1], [1, 0, 1])
    assert (found.p, found.difference, found.interval) == (1.0, 0.0, (0.0, 0.0))


@pytest.mark.parametrize(("first", "second"), [([1], [1, 0]), ([], [])])
def test_scores_of_other_questions_are_refused(first, second):
    with pytest.raises(ValueError, match="of the same questions"):
        compare_paired(first, second)
