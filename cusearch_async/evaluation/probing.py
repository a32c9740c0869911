"""Where answers come from: the same questions with the search engine, without the evidence, and without any engine.

A policy that has learned the answers by heart is as right without an engine. One whose engine leaks answers is right
without the evidence. One that guesses is as right whatever it is shown, and its samples disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy import stats

from cusearch_async.algorithm.answers import normalize_answer
from cusearch_async.environments import Search
from cusearch_async.evaluation.scoring import EVAL_TICKETS
from cusearch_async.types import Question, Trajectory

Mode = Literal["full", "blocked", "closed"]
"""The engine as it is; without the passages that are a question's evidence; no engine: every search finds nothing."""
ABSTENTIONS = frozenset({"", "unknown", "unsure", "none", "not found", "i dont know", "dont know", "no answer"})
"""Normalised answers that are none."""
_COMPARED = 300
"""Characters by which two passages are the same; the client cuts long ones."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One episode per question. Equal passes give different samples."""

    questions: Sequence[Question]
    temperature: float
    mode: Mode = "full"


@dataclass(frozen=True, slots=True)
class Played:
    """What was played in a pass, in the order of the questions."""

    episodes: list[Trajectory]
    recall: list[float | None]
    """Share of a question's evidence that its searches found; None where it is not known, or there is none."""


@dataclass(slots=True)
class ProbedSearch:
    """A search engine in one of the modes, which writes down what evidence it shows."""

    search_engine: Search
    mode: Mode = "full"
    _shown: dict[int, set[str]] = field(default_factory=dict)
    """Ticket -> evidence that its searches found."""

    async def search(self, query: str, draw: int, question: Question, ticket: int) -> list[str]:
        if self.mode == "closed":
            return []
        found = await self.search_engine.search(query, draw, question, ticket)
        evidence = set(map(_key, question.evidence or ()))
        if self.mode == "blocked":
            return [passage for passage in found if _key(passage) not in evidence]
        self._shown.setdefault(ticket, set()).update(evidence & set(map(_key, found)))
        return found

    def take_recall(self, questions: Sequence[Question]) -> list[float | None]:
        """Of the pass that is over; the next one begins without it."""
        shown, self._shown = self._shown, {}
        return [
            len(shown.get(EVAL_TICKETS + number, ())) / len(set(map(_key, question.evidence)))
            if question.evidence
            else None
            for number, question in enumerate(questions)
        ]


def _key(passage: str) -> str:
    return " ".join(passage.split())[:_COMPARED]


@dataclass(frozen=True, slots=True)
class Samples:
    """What k samples of each question say."""

    k: int
    pass_at_1: float
    """Share of right episodes."""
    pass_at_k: float
    """Share of questions with a right one among the k."""
    agreement: float
    """Share of pairs of samples of a question that give the same answer, abstentions left out; 0 without any pair."""
    abstain_share: float
    """Share of episodes without an answer, or with one of ABSTENTIONS."""


def summarize_samples(passes: Sequence[Sequence[Trajectory]]) -> Samples:
    """`passes` are k passes over the same questions. Raises: ValueError without one."""
    if not passes:
        raise ValueError("samples need one pass or more, got none")
    right = np.array([[t.em for t in episodes] for episodes in passes])  # [k, n]
    answers = [[normalize_answer(t.prediction or "") for t in of_one] for of_one in zip(*passes, strict=True)]
    given = [[answer for answer in of_one if answer not in ABSTENTIONS] for of_one in answers]
    pairs = sum(len(of_one) * (len(of_one) - 1) for of_one in given)
    equal = sum(count * (count - 1) for of_one in given for count in Counter(of_one).values())
    return Samples(
        k=len(passes),
        pass_at_1=float(right.mean()),
        pass_at_k=float(right.max(axis=0).mean()),
        agreement=equal / pairs if pairs else 0.0,
        abstain_share=1 - sum(map(len, given)) / right.size,
    )


@dataclass(frozen=True, slots=True)
class Paired:
    """Two policies, or two modes, on the same questions."""

    only_first: int
    """Questions that only the first has right."""
    only_second: int
    difference: float
    """EM of the first less that of the second."""
    interval: tuple[float, float]
    """95 %, by a bootstrap over questions."""
    p: float
    """Of the exact McNemar test; 1 where both are right on the same questions."""


def compare_paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """`first` and `second` [n] are 0 or 1, by question. Raises: ValueError for other lengths, or without questions."""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or not a.size:
        raise ValueError(f"paired scores must be of the same questions, got {a.size} and {b.size}")
    only_first, only_second = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    discordant = only_first + only_second
    p = float(stats.binomtest(only_first, discordant).pvalue) if discordant else 1.0
    differences = a - b
    low = high = float(differences.mean())
    if np.ptp(differences):
        found = stats.bootstrap((differences,), np.mean, method="percentile", n_resamples=2000, rng=0)
        low, high = map(float, found.confidence_interval)
    return Paired(only_first, only_second, float(differences.mean()), (low, high), p)


SIGNIFICANT = 0.01
_NO_HELP = 0.05
"""Gain in EM below which, by the upper end of its interval, an engine does not help."""
_AGREES = 0.5
"""Agreement of samples below which answers count as guesses."""


def findings(
    questions: Sequence[Question],
    full: Sequence[float],
    closed: Sequence[float],
    blocked: Sequence[float],
    samples: Samples,
) -> list[str]:
    """What the probes say of a policy, in words; scores are EM [n] by question.

    Questions that are known to need no evidence say nothing about searching, and are left out."""
    needing = [i for i, question in enumerate(questions) if question.evidence != ()]
    if not needing:
        return []
    full, closed, blocked = ([scores[i] for i in needing] for scores in (full, closed, blocked))
    searching, leaking = compare_paired(full, closed), compare_paired(blocked, closed)
    known = float(np.mean(closed))
    figures = (
        f"EM {float(np.mean(full)):.3f} with the engine, {known:.3f} without (p = {searching.p:.2g}) on {len(needing)} "
        "questions that need a search"
    )
    agreement = f"its samples agree in {samples.agreement:.0%} of pairs"
    if searching.p < SIGNIFICANT and searching.difference > 0:
        said = [f"searching helps: {figures}"]
    elif searching.interval[1] < _NO_HELP:
        how = "it guesses" if samples.agreement < _AGREES else "it knows the answers by heart"
        said = [f"searching does not help: {figures}; {agreement}, so {how}"]
    else:
        said = [f"too few questions to tell whether searching helps: {figures}; {agreement}"]
    if leaking.p < SIGNIFICANT and leaking.difference > 0:
        said.append(
            f"the engine leaks answers: without the evidence EM is {float(np.mean(blocked)):.3f}, without any engine "
            f"{known:.3f} (p = {leaking.p:.2g})"
        )
    return said
