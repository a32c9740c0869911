"""Tickets, admission and staleness: pure arithmetic on ticket numbers and versions.

A version counts learner steps: version v has been trained on pools 0..v-1. Pool p consists of the tickets
[pN, (p+1)N), so ticket t is trained at step floor(t / N), and its staleness is that step minus the version
that sampled it.
"""

from __future__ import annotations


def ticket_limit(loaded_version: int, max_staleness: int, questions_per_step: int) -> int:
    """Tickets below this may be started by a worker that has loaded `loaded_version`.

    Ticket t is granted while t < (max_staleness + v + 1) N, hence is trained at step <= v + max_staleness."""
    return (max_staleness + loaded_version + 1) * questions_per_step
