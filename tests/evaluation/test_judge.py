"""A judge's verdicts, and what it may not do in silence."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cusearch_async.config import JudgeConfig
from cusearch_async.errors import JudgeFailed
from cusearch_async.evaluation.judge import PROMPT, judge, try_judge
from tests.http_service import Service, says
from tests.strategies import make_trajectory

EPISODES = [
    make_trajectory(0, 0, prediction="the Ruble", em=1.0, question="Which currency?", answers=("Ruble", "Rouble")),
    make_trajectory(1, 0, prediction="roubles", em=0.0),
    make_trajectory(2, 0, prediction="Euro", em=0.0),
    make_trajectory(3, 0, prediction=None, em=0.0),
]


def reply(text):
    message = {"role": "assistant", "content": text}
    return says(
        {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }
    )


async def a_web_page(service, request):
    return web.Response(text="<html>hello</html>", content_type="text/html")


NO_MODEL = says({"error": {"message": "no such model"}}, status=404)


@asynccontextmanager
async def judging(*answers):
    """(settings of a judge that gives these answers, its service)."""
    service, app = Service(*answers), web.Application()
    app.router.add_post("/v1/chat/completions", service.handle)
    async with TestServer(app) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        yield JudgeConfig(url=url, model="a-judge", at_once=1, timeout_s=5), service


async def ask(*answers, episodes=EPISODES):
    async with judging(*answers) as (settings, service):
        return await judge(settings, episodes), service


async def test_a_judge_on_this_machine_is_not_asked_through_a_proxy(monkeypatch):
    """Questions and answers went to the proxy, which refused them."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    verdicts, _ = await ask(reply("yes"))
    assert verdicts.right == 0.75


async def test_answers_in_other_words_are_right(monkeypatch):
    monkeypatch.setenv("CUSEARCH_JUDGE_KEY", "s3cret\n")  # as out of a file
    verdicts, service = await ask(reply("Yes."), reply("yes"), reply("**No**"))
    assert (verdicts.right, verdicts.agrees_with_em, verdicts.unreadable) == (0.5, 0.75, 0.0)
    assert (verdicts.model, verdicts.prompt) == ("a-judge", PROMPT)
    assert len(service.requests) == 3, "one without an answer is not shown"
    first = service.requests[0]
    assert first.path == "/v1/chat/completions"
    assert first.headers["Authorization"] == "Bearer s3cret"
    assert first.fields["model"] == "a-judge"
    (message,) = first.fields["messages"]
    assert "Question: Which currency?" in message["content"]
    assert "Right answers: Ruble | Rouble\nGiven answer: the Ruble" in message["content"]


@pytest.mark.parametrize("thought", ["<think>\nNo, wait: </think>\n\n", "the tag was in the prompt. No.</think>"])
async def test_what_a_judge_thinks_is_no_verdict(thought):
    verdicts, _ = await ask(reply(f"{thought}Yes."), episodes=EPISODES[:1])
    assert (verdicts.right, verdicts.unreadable) == (1.0, 0.0)


@pytest.mark.parametrize("text", ["", "maybe", "yes and no", "The answer is right: yes", "<think>yes", None])
async def test_verdicts_that_cannot_be_read_are_counted_and_in_no_share(text):
    verdicts, _ = await ask(reply("yes"), reply(text), reply("no"))
    assert verdicts.unreadable == 0.25
    assert verdicts.right == pytest.approx(1 / 3)
    assert verdicts.agrees_with_em == 1.0


async def test_a_judge_of_which_nothing_can_be_read_has_failed():
    with pytest.raises(JudgeFailed, match="a-judge answers neither yes nor no for any of 3 answers"):
        await ask(reply("maybe"))


async def test_a_judge_that_fails_is_no_verdict():
    with pytest.raises(ExceptionGroup) as raised:
        await ask(NO_MODEL, episodes=EPISODES[:1])
    (error,) = raised.value.exceptions
    assert isinstance(error, JudgeFailed)
    assert "eval.judge.url" in str(error)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (reply("I am a chatbot"), r"must answer yes or no, got 'I am a chatbot'"),
        (reply(""), r"must answer yes or no, got ''"),
        (NO_MODEL, "fails: .*no such model"),
        (says("<html>hello</html>"), "fails: "),
        (a_web_page, "must answer yes or no, got '<html>hello</html>'"),
        (says({"result": []}), "must answer yes or no"),
        (says({"choices": [{"message": None}]}), "must answer yes or no"),
    ],
)
async def test_a_judge_that_cannot_judge_is_noticed_at_the_start(answer, said):
    async with judging(answer) as (settings, _):
        with pytest.raises(JudgeFailed, match=said) as raised:
            await try_judge(settings)
    assert f"eval.judge.url {settings.url}" in str(raised.value)


async def test_a_judge_that_answers_is_asked_one_question_at_the_start():
    async with judging(reply("Yes"), reply("maybe")) as (settings, service):
        await try_judge(settings)
    assert len(service.requests) == 1


@pytest.mark.parametrize("status", [400, 422])
async def test_an_answer_that_the_judges_server_refuses_has_no_verdict(status):
    """Too long for it, or filtered: all other verdicts were lost with it, and with a new scoring again."""
    verdicts, _ = await ask(reply("yes"), says({"error": {"message": "too long"}}, status=status), reply("no"))
    assert verdicts.unreadable == 1 / len(EPISODES)
