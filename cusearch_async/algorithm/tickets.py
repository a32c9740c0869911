"""Which question a ticket stands for: a pure function of run seed and ticket number.

A ticket is one visit to a question; its trajectories are a group. The environments of a run take turns in a fixed cycle
that gives each its share, and each walks through permutations of its own questions, one per epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cusearch_async.streams import Stream, stream
from cusearch_async.types import Question


class RunQuestions:
    """The questions of a run."""

    def __init__(self, parts: Sequence[tuple[int, Sequence[Question]]], seed: int) -> None:
        """`parts`: of each environment its share of the tickets and its questions, one or more."""
        self._parts = [list(questions) for _, questions in parts]
        self._shares = [share for share, _ in parts]
        self._cycle = _cycle(self._shares)
        self._seed = seed

    @property
    def all(self) -> list[Question]:
        """Of one environment after the other."""
        return [question for part in self._parts for question in part]

    def of(self, ticket: int) -> Question:
        rounds, place = divmod(ticket, len(self._cycle))
        part, earlier = self._cycle[place]
        questions = self._parts[part]
        return questions[question_index(rounds * self._shares[part] + earlier, len(questions), self._seed)]

    def id_of(self, ticket: int) -> str:
        return self.of(ticket).id


def _cycle(shares: Sequence[int]) -> list[tuple[int, int]]:
    """For each place of a cycle of sum(shares) tickets its part, and how many places of that part come before; the
    places of a part are spread evenly."""
    places = sorted(((2 * n + 1) / (2 * share), part, n) for part, share in enumerate(shares) for n in range(share))
    return [(part, n) for _, part, n in places]


def question_index(visit: int, num_questions: int, seed: int) -> int:
    """Which question visit number `visit` of a dataset is to: epoch-wise permutations."""
    epoch, place = divmod(visit, num_questions)
    return int(_permutation(num_questions, seed, epoch)[place])


@lru_cache(maxsize=64)
def _permutation(num_questions: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return stream(Stream.QUESTIONS, seed, epoch).permutation(num_questions)
