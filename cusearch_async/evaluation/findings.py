"""Where answers come from, in words: episodes with the search engine compared with those without it.

A policy that has learned the answers by heart is as right without an engine. One whose engine leaks answers is right
without the evidence. One that guesses is as right whatever it is shown, and its samples disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from cusearch_async.algorithm.answers import Metric, normalize_answer
from cusearch_async.errors import packages_of
from cusearch_async.evaluation.probing import PassResult
from cusearch_async.evaluation.scoring import Z95
from cusearch_async.types import Question, Trajectory

with packages_of("eval"):
    from scipy import stats

ABSTENTIONS = frozenset({"", "unknown", "unsure", "none", "not found", "i dont know", "dont know", "no answer"})
"""Normalised answers that are none."""
SIGNIFICANT = 0.01
_NO_HELP = 0.05
"""Gain in EM below which, by the upper end of its interval, an engine does not help."""
_KNOWS = 0.05
"""Closed-book EM above which, by the lower end of its interval, answers are known by heart."""
_AGREES = 0.5
"""Agreement of samples below which answers count as guesses."""
_ABSTAINS = 0.5
"""Share of abstentions from which a policy counts as one that gives no answers."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Of k samples of each question."""

    k: int
    pass_at_1: float
    pass_at_k: float
    agreement: float | None
    """Share of pairs of samples of a question that give the same answer, abstentions left out; None without a pair."""
    abstain_share: float
    """Share of episodes without an answer, or with one of ABSTENTIONS."""


def summarize_samples(passes: Sequence[Sequence[Trajectory]], metric: Metric = "squad") -> Samples:
    """`passes` are k passes over the same questions, scored with `metric`. Raises: ValueError without one."""
    if not passes:
        raise ValueError("samples need one pass or more, got none")
    right = np.array([[t.em for t in episodes] for episodes in passes])  # [k, n]
    answers = [[normalize_answer(t.prediction or "", metric) for t in of_one] for of_one in zip(*passes, strict=True)]
    given = [[answer for answer in of_one if answer not in ABSTENTIONS] for of_one in answers]
    pairs = sum(len(of_one) * (len(of_one) - 1) for of_one in given)
    equal = sum(count * (count - 1) for of_one in given for count in Counter(of_one).values())
    return Samples(
        k=len(passes),
        pass_at_1=float(right.mean()),
        pass_at_k=float(right.max(axis=0).mean()),
        agreement=equal / pairs if pairs else None,
        abstain_share=1 - sum(map(len, given)) / right.size,
    )


@dataclass(frozen=True, slots=True)
class Paired:
    """Two policies, or two modes, on the same questions."""

    only_first: int
    only_second: int
    difference: float
    """EM of the first less that of the second."""
    interval: tuple[float, float]
    """95 %, of the difference."""
    p: float
    """Of the exact McNemar test; 1 where both are right on the same questions."""

    def less(self, name: str) -> str:
        """The difference to the second, called `name`, in words."""
        low, high = self.interval
        return (
            f"less {name}: EM {self.difference:+.3f} [{low:+.3f}, {high:+.3f}], p = {self.p:.2g} (exact McNemar; "
            f"{self.only_first} questions only here, {self.only_second} only there)"
        )


def compare_paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """`first` and `second` [n] are 0 or 1, by question. Raises: ValueError for other lengths, or without questions.

    The interval is the adjusted Wald interval, which has a width for few questions and for equal scores, too.
    Source: Bonett and Price, "Adjusted Wald confidence interval for a difference of binomial proportions based on
    paired data", 2012: with one more of each kind of question on which the two differ (b and c of n),
        d ± 1.96 sqrt((p + q - d²) / (n + 2)),  p = (b + 1) / (n + 2),  q = (c + 1) / (n + 2),  d = p - q"""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or not a.size:
        raise ValueError(f"paired scores must be of the same questions, got {a.size} and {b.size}")
    only_first, only_second = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    discordant = only_first + only_second
    test_p = float(stats.binomtest(only_first, discordant).pvalue) if discordant else 1.0
    p, q = (only_first + 1) / (a.size + 2), (only_second + 1) / (a.size + 2)
    width = Z95 * sqrt((p + q - (p - q) ** 2) / (a.size + 2))
    interval = max(-1.0, p - q - width), min(1.0, p - q + width)
    return Paired(only_first, only_second, (only_first - only_second) / a.size, interval, test_p)


def findings(
    questions: Sequence[Question],
    full: PassResult,
    closed: PassResult,
    blocked: PassResult,
    samples: Sequence[PassResult],
    metric: Metric = "squad",
) -> list[str]:
    """The result of the probes, in words. All are of the same questions.

    Only questions that name evidence count: others need no search, or cannot be blocked."""
    needing = [i for i, question in enumerate(questions) if question.evidence]
    if not needing:
        return []
    right, by_heart = ([one.em[i] for i in needing] for one in (full, closed))
    told = summarize_samples([[one.episodes[i] for i in needing] for one in samples], metric)
    taken = [i for i in needing if blocked.recall[i]]
    found = [_of_searching(right, by_heart, told)]
    if not taken and not any(full.recall[i] for i in needing):
        return [*found, "the evidence was never recognised among the passages, so blocking it shows nothing"]
    without, unaided = ([one.em[i] for i in taken] for one in (blocked, closed))  # elsewhere the evidence was left in
    leaking = compare_paired(without, unaided) if taken else None
    if leaking and leaking.p < SIGNIFICANT and leaking.difference > 0:
        found.append(
            f"the engine leaks answers: without the evidence EM is {_mean(without):.3f}, without any engine "
            f"{_mean(unaided):.3f} (p = {leaking.p:.2g}), in the {len(taken)} of {len(needing)} questions in which it "
            "was found, and blocked"
        )
    return found


def _of_searching(full: Sequence[float], closed: Sequence[float], samples: Samples) -> str:
    """Whether searching helps; scores are EM [n] by question."""
    gain = compare_paired(full, closed)
    low, high = gain.interval
    figures = (
        f"EM {_mean(full):.3f} with the engine, {_mean(closed):.3f} without (p = {gain.p:.2g}) on {len(full)} "
        "questions that need a search"
    )
    if gain.p < SIGNIFICANT:
        return f"searching {'helps' if gain.difference > 0 else 'harms'}: {figures}"
    if high < _NO_HELP:
        return f"searching does not help: {figures}; {_why_not(closed, samples)}"
    return f"too few questions to tell whether searching helps: {figures}; the gain is in [{low:+.3f}, {high:+.3f}]"


def _why_not(closed: Sequence[float], samples: Samples) -> str:
    """Why a policy is as right without an engine."""
    known = stats.binomtest(int(sum(closed)), len(closed)).proportion_ci(method="wilson")
    agreement = samples.agreement or 0.0
    agree = f"its samples agree in {agreement:.0%} of pairs"
    if known.low > _KNOWS and agreement >= _AGREES:
        return f"{agree}, so it knows answers by heart"
    if samples.agreement is None or samples.abstain_share >= _ABSTAINS:
        return f"it gives no answer in {samples.abstain_share:.0%} of its samples"
    if agreement < _AGREES:
        return f"{agree}, so it guesses"
    return f"{agree}, but most are wrong: it neither finds the answers nor knows them"


def _mean(scores: Sequence[float]) -> float:
    return float(np.mean(scores))
