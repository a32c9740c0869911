"""A ticket's question, a pure function of run seed and ticket number; and its admission.

A ticket is one visit to a question; its trajectories are a group. The environments of a run alternate in a fixed cycle
that gives each its share, and each walks through permutations of its questions, one per epoch. Pool p consists of the
tickets [pN, (p+1)N), so ticket t is trained at step floor(t / N), and its staleness is that step minus the version that
sampled it (version v has been trained on pools 0..v-1).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cusearch_async.streams import Stream, stream
from cusearch_async.types import Question


def ticket_limit(loaded_version: int, max_staleness: int, questions_per_step: int) -> int:
    """Tickets below this may be started by a worker that has loaded `loaded_version`.

    Ticket t is granted while t < (max_staleness + v + 1) N, hence is trained at step <= v + max_staleness."""
    return (max_staleness + loaded_version + 1) * questions_per_step


class RunQuestions:
    def __init__(self, parts: Sequence[tuple[int, Sequence[Question]]], seed: int) -> None:
        """`parts`: of each environment its share of the tickets and its questions, one or more."""
        self._parts = [list(questions) for _, questions in parts]
        self._shares = [share for share, _ in parts]
        self._cycle = _cycle(self._shares)
        self._seed = seed

    @property
    def all(self) -> list[Question]:
        """One environment after the other."""
        return [question for part in self._parts for question in part]

    def of(self, ticket: int) -> Question:
        rounds, place = divmod(ticket, len(self._cycle))
        part, earlier = self._cycle[place]
        questions = self._parts[part]
        return questions[question_index(rounds * self._shares[part] + earlier, len(questions), self._seed, part)]

    def id_of(self, ticket: int) -> str:
        return self.of(ticket).id


def _cycle(shares: Sequence[int]) -> list[tuple[int, int]]:
    """For each place of a cycle of sum(shares) tickets its part, and how many places of that part come before; the
    places of a part are spread evenly."""
    places = sorted(((2 * n + 1) / (2 * share), part, n) for part, share in enumerate(shares) for n in range(share))
    return [(part, n) for _, part, n in places]


def question_index(visit: int, num_questions: int, seed: int, part: int = 0) -> int:
    """Which question visit number `visit` of a dataset is to: epoch-wise permutations, others in each `part` of a
    run."""
    epoch, place = divmod(visit, num_questions)
    return int(_permutation(num_questions, seed, part << 32 | epoch)[place])


@lru_cache(maxsize=64)
def _permutation(num_questions: int, seed: int, number: int) -> NDArray[np.int64]:
    return stream(Stream.QUESTIONS, seed, number).permutation(num_questions)
