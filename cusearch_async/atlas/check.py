"""The skills of a policy of an atlas world, and figures of its pools, from its episodes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cusearch_async.algorithm.advantages import EQUAL
from cusearch_async.atlas.facts import Fact
from cusearch_async.atlas.questions import Chain
from cusearch_async.config import RetrieverConfig
from cusearch_async.retrieval.backend import Passage, Query
from cusearch_async.retrieval.bm25 import Bm25Index
from cusearch_async.retrieval.indexing import Degradation
from cusearch_async.types import Question, Trajectory

_QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)


class LocalSearch:
    """The atlas index in this process, without HTTP; for checks. It has the noise of the config's retriever."""

    def __init__(self, passages: Sequence[Passage], settings: RetrieverConfig, seed: int) -> None:
        self._index = Bm25Index.in_memory(passages)
        self._topk = settings.topk
        self._degradation = Degradation(settings, seed)

    async def search(self, query: str, seed: int, question: Question, ticket: int) -> list[str]:
        found = self._index.search([query], self._topk)[0]
        asked = Query(query, seed)
        disturbed = self._degradation.disturb(found, self._index.passages, self._topk, asked)
        return [passage["contents"] for passage, _ in disturbed]


@dataclass(frozen=True, slots=True)
class Skills:
    searches: int
    right_queries: int
    """That ask for a fact of the chain, in whatever order of words."""
    found: int
    """Results with the passage of a needed fact that was asked for."""
    right_readings: int
    """Of these: how often the next turn repeats the fact of the passage."""
    over_searches: int
    """Searches for a fact of the chain whose passage had been found before."""


def skills(episodes: Sequence[Sequence[tuple[str, str]]], chains: Sequence[Chain]) -> Skills:
    """`episodes` hold (author, text) as `stretches` of an episode; `chains` are their questions."""
    searches = right = found = read = over = 0
    for stretches, chain in zip(episodes, chains, strict=True):
        wanted = {_words(fact.query): fact for fact in chain.facts}
        known = set(chain.facts[: chain.is_first_given])
        padded = [*stretches, ("", "")]  # no turn may follow the last passages
        for (author, turn), (_, shown), (_, following) in zip(padded, padded[1:], padded[2:], strict=False):
            query = _QUERY.search(turn) if author == "model" else None
            if query is None:
                continue
            searches += 1
            fact = wanted.get(_words(query[1]))
            if fact is None:
                continue
            right += 1
            over += fact in known
            if fact.sentence in shown:
                found += 1
                read += _begins(following, fact)
                known.add(fact)
    return Skills(searches, right, found, read, over)


def _words(query: str) -> tuple[str, ...]:
    return tuple(sorted(word for word in query.split() if word != "of"))


def _begins(turn: str, fact: Fact) -> bool:
    return turn.lstrip().startswith(f"<think>{fact.sentence}")


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """Of groups of trajectories of one question each."""

    identical: float
    """Share of the trajectories that repeat an earlier one of their group, token for token."""
    zero_variance: float
    differing: float
    """Share of the groups in which two trajectories of equal depth have different rewards: depth does not tell them
    apart."""
    depths: list[int]  # [S+1] trajectories of each depth


def pool_figures(groups: Sequence[Sequence[Trajectory]], s_max: int) -> PoolFigures:
    everyone = list(itertools.chain.from_iterable(groups))
    copies = sum(len(group) - len({t.token_ids.tobytes() for t in group}) for group in groups)
    flat = sum(np.ptp([t.reward for t in group]) < EQUAL for group in groups)
    differing = sum(any(_differ(t, other) for t, other in itertools.combinations(group, 2)) for group in groups)
    depths = np.bincount([t.depth for t in everyone], minlength=s_max + 1)
    return PoolFigures(copies / len(everyone), flat / len(groups), differing / len(groups), depths.tolist())


def _differ(one: Trajectory, other: Trajectory) -> bool:
    return one.depth == other.depth and abs(one.reward - other.reward) >= EQUAL
