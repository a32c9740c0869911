"""The rewards of docs/examples, the judge on a real server."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cusearch_async.environments import Episode, Score
from cusearch_async.errors import EpisodeFailed
from cusearch_async.types import Question
from docs.examples.rewards import brief, judged

EPISODE = Episode(question=Question(id="q", text="Who?", answers=("me",), category="x"), ticket=0, rollout=0, depth=3)


def test_every_search_costs_a_little():
    assert brief(EPISODE, Score(reward=1.0)) == pytest.approx(0.94)


async def judge_of(answer, monkeypatch):
    """What the reward is when the judge gives this answer, and what the judge was asked."""
    asked = []

    async def judge(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        return answer()

    app = web.Application()
    app.router.add_post("/", judge)
    async with TestServer(app) as server:
        monkeypatch.setenv("JUDGE_URL", str(server.make_url("/")))
        return await judged(EPISODE, Score(reward=0.0, prediction="you")), asked


async def test_a_judge_gives_the_reward(monkeypatch):
    reward, asked = await judge_of(lambda: web.json_response({"score": 0.7}), monkeypatch)
    assert reward == 0.7
    assert asked == [{"question": "Who?", "answer": "you", "golds": ["me"]}]


@pytest.mark.parametrize("answer", [lambda: web.Response(status=500), lambda: web.json_response({"says": "yes"})])
async def test_a_judge_that_cannot_be_asked_fails_the_episode(monkeypatch, answer):
    with pytest.raises(EpisodeFailed, match="the judge cannot be asked"):
        await judge_of(answer, monkeypatch)
