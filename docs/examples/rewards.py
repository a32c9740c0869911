"""Custom rewards: plain, and by a judge over HTTP.

[environment.search]
reward = "docs.examples.rewards:brief"
"""

from __future__ import annotations

import os

import aiohttp

from cusearch_async.environments import Episode, Score


def brief(episode: Episode, score: Score) -> float:
    """The environment's reward, less a little for every search."""
    return score.reward - 0.02 * episode.depth


async def judged(episode: Episode, score: Score) -> float:
    """A judge's score of the answer, 0 to 1: POST JUDGE_URL {"question", "answer", "golds"} -> {"score": 0.7}.

    Set the environment variable JUDGE_URL where the workers run. Whatever is raised here, because the judge cannot be
    reached or gives no number, fails the episode, which is then generated again."""
    asked = {"question": episode.question.text, "answer": score.prediction, "golds": list(episode.question.answers)}
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(os.environ["JUDGE_URL"], json=asked) as answer,
    ):
        answer.raise_for_status()
        graded = (await answer.json())["score"]
    return min(max(float(graded), 0.0), 1.0)
