"""Tickets, admission and staleness: pure arithmetic on ticket numbers and versions.

A version counts learner steps: version v has been trained on pools 0..v-1. Pool p consists of the tickets
[pN, (p+1)N), so ticket t is trained at step floor(t / N), and its staleness is that step minus the version
that sampled it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cusearch_async.streams import Stream, stream


def ticket_limit(loaded_version: int, max_staleness: int, questions_per_step: int) -> int:
    """Tickets below this may be started by a worker that has loaded `loaded_version`.

    Ticket t is granted while t < (max_staleness + v + 1) N, hence is trained at step <= v + max_staleness."""
    return (max_staleness + loaded_version + 1) * questions_per_step


def question_index(ticket: int, num_questions: int, seed: int) -> int:
    """Which question ticket t visits: epoch-wise permutations of the dataset, a function of (seed, ticket)."""
    epoch, place = divmod(ticket, num_questions)
    return int(_permutation(num_questions, seed, epoch)[place])


@lru_cache(maxsize=2)
def _permutation(num_questions: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return stream(Stream.QUESTIONS, seed, epoch).permutation(num_questions)
