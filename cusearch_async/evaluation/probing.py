"""The same questions with the search engine as it is, without the evidence, and without any engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from cusearch_async.environments import Search
from cusearch_async.evaluation.scoring import EVAL_TICKETS, evaluate
from cusearch_async.rollout.episode import EpisodeRunner
from cusearch_async.rollout.evidence import with_and_without_title
from cusearch_async.types import Question, Trajectory

Mode = Literal["full", "blocked", "closed"]
"""The engine as it is; without the passages that are a question's evidence; no engine: every search finds nothing."""
_COMPARED = 300
"""Characters of a passage that are looked for in the evidence; the client cuts long ones."""
_PART = 100
"""Characters that a passage needs to be known as a part of the evidence; shorter ones must be all of it."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One episode per question. Equal passes give different samples."""

    questions: Sequence[Question]
    temperature: float
    mode: Mode = "full"


@dataclass(frozen=True, slots=True)
class PassResult:
    """The episodes of a pass, in the order of the questions."""

    episodes: list[Trajectory]
    recall: list[float | None]
    """Share of a question's evidence that its searches found, shown or blocked; None where it is not known, or there
    is none."""

    @property
    def em(self) -> list[float]:
        return [episode.em for episode in self.episodes]


@dataclass(slots=True)
class ProbedSearch:
    """A search engine in one of the modes, which records the evidence that it finds."""

    search_engine: Search
    mode: Mode = "full"
    _found: dict[int, set[str]] = field(default_factory=dict)
    """By ticket."""

    async def search(self, query: str, seed: int, question: Question, ticket: int) -> list[str]:
        if self.mode == "closed":
            return []
        passages = await self.search_engine.search(query, seed, question, ticket)
        found = [evidence_in(passage, question.evidence or ()) for passage in passages]
        self._found.setdefault(ticket, set()).update(*found)
        if self.mode == "blocked":
            return [passage for passage, evidence in zip(passages, found, strict=True) if not evidence]
        return passages

    def forget(self, ticket: int) -> None:
        """An episode begins again, with nothing found."""
        self._found.pop(ticket, None)

    def take_recall(self, questions: Sequence[Question]) -> list[float | None]:
        """Of the pass that is over; the next one begins without it."""
        found, self._found = self._found, {}
        return [
            len(found.get(EVAL_TICKETS + number, ())) / len(set(question.evidence)) if question.evidence else None
            for number, question in enumerate(questions)
        ]


def evidence_in(passage: str, evidence: Sequence[str]) -> set[str]:
    """The evidence that a passage is, is a part of, or holds the beginning of. White space and a title line, which a
    corpus may put before a text, make no difference; a corpus may also cut its documents into passages."""
    return {text for text in evidence if _is_same(passage, text)}


def _is_same(passage: str, evidence: str) -> bool:
    (shown, shown_body), (whole, body) = with_and_without_title(passage), with_and_without_title(evidence)
    if shown in (whole, body) or shown_body == whole or (len(body) >= _PART and body[:_COMPARED] in shown):
        return True
    return any(len(part) >= _PART and part[:_COMPARED] in whole for part in (shown, shown_body))


async def run_passes(
    runner: EpisodeRunner, search: ProbedSearch, passes: Sequence[Pass], concurrency: int
) -> list[PassResult]:
    """`search` is the one that the runner's environments use."""
    results = []
    for rollout, one in enumerate(passes):
        search.mode = one.mode
        episodes = await evaluate(runner, one.questions, one.temperature, concurrency, rollout, search.forget)
        results.append(PassResult(episodes, search.take_recall(one.questions)))
    return results
