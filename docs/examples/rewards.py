"""Rewards of one's own: plain, and by a judge that is asked over HTTP.

[environment.search]
reward = "docs.examples.rewards:brief"
"""

from __future__ import annotations

import os

import aiohttp

from cusearch_async.environments import Episode, Score
from cusearch_async.errors import EpisodeFailed


def brief(episode: Episode, score: Score) -> float:
    """The environment's reward, less a little for every search."""
    return score.reward - 0.02 * episode.depth


async def judged(episode: Episode, score: Score) -> float:
    """What a judge says of the answer, 0 to 1: POST JUDGE_URL {"question", "answer", "golds"} -> {"score": 0.7}.

    A judge that cannot be asked fails the episode, which is then played again."""
    asked = {"question": episode.question.text, "answer": score.prediction, "golds": list(episode.question.answers)}
    try:
        timeout = aiohttp.ClientTimeout(total=30)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(os.environ["JUDGE_URL"], json=asked) as answer,
        ):
            answer.raise_for_status()
            return float((await answer.json())["score"])
    except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
        raise EpisodeFailed(f"the judge cannot be asked: {error!r}") from error
