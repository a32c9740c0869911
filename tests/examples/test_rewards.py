"""The rewards of docs/examples, the judge on a real server."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cusearch_async.environments import Environment, Episode, NoSearch, Score, Template
from cusearch_async.errors import EpisodeFailed
from cusearch_async.types import Question
from docs.examples.rewards import brief, judged

EPISODE = Episode(question=Question(id="q", text="Who?", answers=("me",), category="x"), ticket=0, rollout=0, depth=3)


def test_every_search_costs_a_little():
    assert brief(EPISODE, Score(reward=1.0)) == pytest.approx(0.94)


class Judged(Environment):
    async def score(self, episode):
        return Score(reward=0.0, prediction="you")


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
        return (await Judged({}, Template("{question}", ""), NoSearch(), judged).final_score(EPISODE)).reward, asked


async def test_a_judge_gives_the_reward(monkeypatch):
    reward, asked = await judge_of(lambda: web.json_response({"score": 0.7}), monkeypatch)
    assert reward == 0.7
    assert asked == [{"question": "Who?", "answer": "you", "golds": ["me"]}]


@pytest.mark.parametrize(("said", "reward"), [(1e300, 1.0), (-5, 0.0), ("0.25", 0.25), (True, 1.0)])
async def test_a_judge_gives_at_least_0_and_at_most_1(monkeypatch, said, reward):
    assert (await judge_of(lambda: web.json_response({"score": said}), monkeypatch))[0] == reward


HOSTILE = {
    "nothing": "",
    "a page": "<html>",
    "null": '{"score": null}',
    "a list": '{"score": [1]}',
    "an object": '{"score": {}}',
    "words": '{"score": "good"}',
    "NaN": '{"score": NaN}',
    "Infinity": '{"score": Infinity}',
    "no score": '{"says": "yes"}',
    "a bare list": "[1]",
    "a bare number": "1",
    "a bare null": "null",
    "a bomb": "[" * 200_000,
    "an error": None,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
async def test_a_judge_that_says_no_number_fails_the_episode_alone(monkeypatch, text):
    """Before, 5 of these 14 ended the worker."""
    status = 500 if text is None else 200
    answer = lambda: web.Response(status=status, text=text or "", content_type="application/json")  # noqa: E731
    if text == HOSTILE["Infinity"]:
        assert (await judge_of(answer, monkeypatch))[0] == 1.0
        return
    with pytest.raises(EpisodeFailed, match=r"the reward docs\.examples\.rewards:judged "):
        await judge_of(answer, monkeypatch)


async def test_a_judge_without_an_address_fails_the_episode(monkeypatch):
    monkeypatch.delenv("JUDGE_URL", raising=False)
    with pytest.raises(EpisodeFailed, match=r"judged failed: KeyError: 'JUDGE_URL'"):
        await Judged({}, Template("{question}", ""), NoSearch(), judged).final_score(EPISODE)
