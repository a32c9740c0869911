"""Probes tell a policy that knows, one that guesses and one whose engine leaks from one that searches and reads."""

from __future__ import annotations

from itertools import product
from math import comb

import numpy as np
import pytest
from scipy import stats

from cusearch_async.evaluation.findings import Samples, compare_paired, findings, summarize_samples
from cusearch_async.evaluation.probing import Pass, PassResult, ProbedSearch, run_passes
from cusearch_async.types import Question
from tests.evaluation import planted
from tests.evaluation.planted import QUESTIONS, Engine, PlantedRunner
from tests.strategies import make_trajectory

NEEDS_NONE, UNKNOWN = (
    [Question(id=f"{evidence}{i}", text="?", answers=("x",), category="c", evidence=evidence) for i in range(80)]
    for evidence in ((), None)
)


async def said_of(answer, engine=None, questions=QUESTIONS):
    """What is found out of a planted policy."""
    probed = ProbedSearch(engine or Engine())
    passes = [Pass(questions, 0.0, mode) for mode in ("full", "closed", "blocked")] + [Pass(questions, 1.0)] * 4
    full, closed, blocked, *samples = await run_passes(PlantedRunner(answer, probed), probed, passes, 8)
    return findings(questions, full, closed, blocked, samples)


def result(em, predictions=None, recall=1.0):
    """A pass of the EM and predictions by question."""
    given = predictions or ["x"] * len(em)
    episodes = [make_trajectory(i, 0, em=e, prediction=p) for i, (e, p) in enumerate(zip(em, given, strict=True))]
    return PassResult(episodes, [recall] * len(em))


def said(questions, full, closed, blocked=None, recall=1.0, samples=None):
    same = [result(full)] * 4
    return findings(
        questions, result(full, None, recall), result(closed, None, None), result(blocked or closed, None, recall),
        samples or same,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "begins", "ends"),
    [
        ("knows", "searching does not help: EM 1.000 with the engine, 1.000", "100% of pairs, so it knows answers by"),
        ("guesses", "searching does not help: EM 0.", "of pairs, so it guesses"),
        ("abstains", "searching does not help: EM 0.000", "it gives no answer in 100% of its samples"),
        ("errs", "searching does not help: EM 0.000", "100% of pairs, but most are wrong: it neither finds"),
        ("is_confused", "searching harms: EM 0.000 with the engine, 1.000 without", "that need a search"),
        ("reads", "searching helps: EM 1.000 with the engine, 0.000 without", "that need a search"),
    ],
)
async def test_planted_policies_are_told_apart(policy, begins, ends):
    (line,) = await said_of(getattr(planted, policy))
    assert line.startswith(begins), line
    assert ends in line, line


@pytest.mark.parametrize("policy", ["knows", "guesses", "abstains", "errs", "is_confused", "reads"])
@pytest.mark.parametrize("count", [1, 3])
async def test_of_very_few_questions_nothing_is_firm(policy, count):
    (line,) = await said_of(getattr(planted, policy), questions=QUESTIONS[:count])
    assert line.startswith("too few questions to tell whether searching helps"), line


@pytest.mark.parametrize(("count", "begins"), [(53, "too few questions to tell"), (54, "searching does not help")])
async def test_what_changes_nothing_takes_54_questions_to_be_no_help(count, begins):
    (line,) = await said_of(planted.knows, questions=QUESTIONS[:count])
    assert line.startswith(begins)


async def test_an_engine_that_leaks_is_named():
    helps, leaks = await said_of(planted.reads, Engine(leaks=True))
    assert helps.startswith("searching helps")
    assert leaks.startswith("the engine leaks answers: without the evidence EM is 1.000, without any engine 0.000")
    assert leaks.endswith(", in the 600 of 600 questions in which it was found, and blocked")


def test_questions_whose_evidence_was_not_recognised_show_no_leak():
    """Theirs was left in: with 5 of 500 recognised, an engine that does not leak was said to."""
    em = [0.0] * 5 + [1.0] * 75
    full, closed, blocked = result(em), result([0.0] * 80, None, None), result(em)
    blocked = PassResult(blocked.episodes, [1.0] * 5 + [0.0] * 75)
    (line,) = findings(QUESTIONS[:80], full, closed, blocked, [full] * 4)
    assert line.startswith("searching helps")


async def test_evidence_that_is_never_recognised_says_nothing_of_a_leak():
    """The corpus tells the same in other words, so nothing is blocked."""

    class Paraphrases:
        async def search(self, query, draw, question, ticket):
            return [f"It is {question.answers[0]} that governs the land."]

    helps, unknown = await said_of(planted.reads, Paraphrases())
    assert helps.startswith("searching helps")
    assert unknown == "the evidence was never recognised among the passages, so blocking it shows nothing"


@pytest.mark.parametrize("others", [NEEDS_NONE, UNKNOWN], ids=["no search", "unknown"])
def test_questions_that_name_no_evidence_say_nothing_of_searching(others):
    """They are answered as well without an engine, or nothing of them can be blocked."""
    right, wrong = [1.0] * 90, [1.0] * 80 + [0.0] * 10
    assert said([*others, *QUESTIONS[:10]], right, wrong) == [
        "searching helps: EM 1.000 with the engine, 0.000 without (p = 0.002) on 10 questions that need a search"
    ]
    blocked = [1.0] * 80 + [0.0] * 10
    assert said([*others, *QUESTIONS[:10]], right, [0.0] * 90, blocked)[1:] == [], "no leak: what they lack shows less"
    assert said(others, right[:80], wrong[:80]) == []


def test_samples_agree_over_the_questions_that_need_a_search():
    """On the easy ones they always do."""
    questions = [*NEEDS_NONE, *QUESTIONS[:60]]
    samples = [result([0.0] * 140, ["x"] * 80 + [f"guess {k} {i}" for i in range(60)]) for k in range(4)]
    (line,) = said(questions, [0.0] * 140, [0.0] * 140, samples=samples)
    assert line.endswith("its samples agree in 0% of pairs, so it guesses")


def test_knowing_needs_a_closed_book_score_that_is_clearly_above_0():
    """2 of 60 may be luck."""
    for right, knows in ((2, False), (12, True)):
        scores = [1.0] * right + [0.0] * (60 - right)
        (line,) = said(QUESTIONS[:60], scores, scores)
        assert line.startswith("searching does not help")
        assert ("by heart" in line) == knows


def test_a_gain_that_is_not_significant_is_not_called_none():
    """12 of 40 right with the engine and 8 without: too few questions for a verdict either way."""
    full, closed = [1.0] * 12 + [0.0] * 28, [1.0] * 7 + [0.0] * 32 + [1.0]
    (line,) = said(QUESTIONS[:40], full, closed)
    assert line.startswith("too few questions to tell whether searching helps: EM 0.300 with the engine, 0.200 without")
    assert "by heart" not in line


def samples_of(*passes):
    return [[make_trajectory(i, 0, prediction=p, em=float(p == "x")) for i, p in enumerate(row)] for row in passes]


def test_samples_are_counted_by_hand():
    """Question 0: x, x, b; question 1: none, unknown, x; question 2: b, b, b."""
    found = summarize_samples(samples_of(["x", None, "b"], ["X.", "I don't know", "b"], ["b", "x", "the b"]))
    assert found == Samples(3, pytest.approx(2 / 9), pytest.approx(2 / 3), pytest.approx(8 / 12), pytest.approx(2 / 9))


def test_samples_agree_by_the_metric_that_is_named():
    passes = samples_of(["3.5"], ["35"])
    assert (summarize_samples(passes).agreement, summarize_samples(passes, "strict").agreement) == (1, 0)


def test_without_a_pair_of_answers_there_is_no_agreement():
    assert summarize_samples(samples_of(["x", "b"])).agreement is None
    assert summarize_samples(samples_of(["x", None], [None, "b"])).agreement is None


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


def test_equal_scores_of_few_questions_leave_much_open():
    """By hand: p = q = 1/5, 1.96 sqrt(0.4 / 5)."""
    found = compare_paired([1, 0, 1], [1, 0, 1])
    assert (found.p, found.difference) == (1.0, 0.0)
    assert found.interval == (pytest.approx(-0.5544, abs=1e-4), pytest.approx(0.5544, abs=1e-4))


@pytest.mark.parametrize("n", [1, 3, 10])
@pytest.mark.parametrize("shares", [(0.0, 0.0), (0.1, 0.0), (0.3, 0.3), (0.9, 0.05), (0.5, 0.5), (0.0, 0.6)])
def test_the_interval_holds_the_true_difference_also_of_few_questions(n, shares):
    """Summed over all outcomes; a bootstrap's holds it never for one question."""
    first, second = shares
    held = 0.0
    for b, c in product(range(n + 1), repeat=2):
        if b + c <= n:
            low, high = compare_paired([1] * b + [0] * (n - b), [0] * b + [1] * c + [0] * (n - b - c)).interval
            share = comb(n, b) * comb(n - b, c) * first**b * second**c * (1 - first - second) ** (n - b - c)
            held += share * (low <= first - second + 1e-9 and first - second - 1e-9 <= high)
    assert held >= 0.89


@pytest.mark.parametrize(("first", "second"), [([1], [1, 0]), ([], [])])
def test_scores_of_other_questions_are_refused(first, second):
    with pytest.raises(ValueError, match="of the same questions"):
        compare_paired(first, second)
