"""A reward of one's own, as a run loads it."""

from __future__ import annotations

import os

from cusearch_async.environments import Episode, Score


async def half(episode: Episode, score: Score) -> float:
    """The same for every episode."""
    return 0.5


def by_rollout(episode: Episode, score: Score) -> float:
    """Siblings differ, whatever a policy does."""
    return float(episode.rollout % 2)


def broken(episode: Episode, score: Score) -> float:
    """As one that is asked without its environment variable."""
    raise KeyError("JUDGE_URL")


def broken_in_workers(episode: Episode, score: Score) -> float:
    """As `broken`, but not before the run."""
    if "CUSEARCH_WORKER_INDEX" in os.environ:
        raise KeyError("JUDGE_URL")
    return 0.0
