"""Clients that misbehave: each gets an error in the API's own form, and no other session is harmed."""

from __future__ import annotations

import json
import os

import aiohttp
import pytest

from cusearch_async.agents.api import Refused, TurnReply
from cusearch_async.agents.chat import read
from cusearch_async.agents.conversation import Message
from cusearch_async.agents.gateway import Gateway
from cusearch_async.config import EpisodeConfig
from cusearch_async.errors import RetrievalUnavailable

SETTINGS = EpisodeConfig()
HELLO = {"messages": [{"role": "user", "content": "Hello?"}]}


def reply_to(text: str) -> TurnReply:
    return TurnReply(0, Message("assistant", text), "stop", 3, 1)


async def echo(request):
    return reply_to(request.messages[-1].content)


async def find(query):
    if query == "down":
        raise RetrievalUnavailable("the retriever is down")
    return [query, "é"]


async def post(url: str, body, key: str, **more: str) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    async with aiohttp.request("POST", f"{url}/v1/chat/completions", data=data, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        (b"{", None, "not JSON"),
        (b"\xff\xfe", None, "not JSON"),
        (b"[" * 100_000, None, "not JSON"),
        ([], None, "must be a JSON object"),
        ({}, "messages", "a list with a message"),
        ({"messages": []}, "messages", "a list with a message"),
        ({"messages": [3]}, "messages[0]", "with a role"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages[0]", "one of system, developer, user"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "a text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "of the type text",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "unpaired surrogate"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls", "tool calls"),
        (
            HELLO | {"temperature": 0.5},
            "temperature",
            "must be the run's, 1 (episode.temperature), got 0.5; leave it out",
        ),
        (HELLO | {"top_p": 0.9}, "top_p", "must be 1, got 0.9; leave it out, or name it in environment.LABEL.ignores"),
        (HELLO | {"n": 2}, "n", "must be 1, got 2"),
        (HELLO | {"n": True}, "n", "must be 1, got true"),
        (HELLO | {"logprobs": True}, "logprobs", "must be false, got true"),
        (HELLO | {"logit_bias": {"3": 1}}, "logit_bias", "not supported"),
        (HELLO | {"seed": 3}, "seed", "not supported here; leave it out, or name it in environment.LABEL.ignores"),
        (HELLO | {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "set model.chat_template instead"),
        (HELLO | {"response_format": {"type": "json_object"}}, "response_format", 'must be {"type": "text"}'),
        (HELLO | {"tool_choice": "required"}, "tool_choice", 'must be "auto" or "none", got "required"'),
        (HELLO | {"tools": [{"type": "web_search"}]}, "tools", "must be a list of"),
        (HELLO | {"max_tokens": 0}, "max_tokens", "a positive number"),
        (HELLO | {"stop": [3]}, "stop", "a text or a list of texts"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(body, field, message):
    async with Gateway(SETTINGS).session(echo, find) as (session, url, key):
        status, answer = await post(url, body, key)
        assert (status, answer["error"]["param"], answer["error"]["type"]) == (400, field, "invalid_request_error")
        assert message in answer["error"]["message"]
        assert session.refusal == answer["error"]["message"]
        assert (await post(url, HELLO, key))[1]["choices"][0]["message"]["content"] == "Hello?", "the session lasts"


@pytest.mark.parametrize("header", [{"Content_Type": "application/json; charset=nope"}, {"Content_Encoding": "gzip"}])
async def test_a_body_of_no_known_charset_or_encoding_is_refused(header):
    """Before: 500, and a traceback in the worker's log."""
    async with Gateway(SETTINGS).session(echo, find) as (_, url, key):
        status, answer = await post(url, HELLO, key, **header)
        assert (status, "not JSON" in answer["error"]["message"]) == (400, True)


async def test_programs_reach_it_where_all_else_goes_through_a_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "intranet")
    monkeypatch.delenv("no_proxy", raising=False)
    async with Gateway(SETTINGS).session(echo, find):
        assert os.environ["NO_PROXY"] == "intranet,127.0.0.1,localhost,::1"
        assert os.environ["no_proxy"] == "127.0.0.1,localhost,::1"


@pytest.mark.parametrize(
    "body", [HELLO | {"n": "x" * 10_000}, HELLO | {"x" * 10_000: 1}, HELLO | {"temperature": "9" * 9999}]
)
def test_a_refusal_is_short_whatever_was_asked(body):
    with pytest.raises(Refused) as refused:
        read(body, SETTINGS)
    assert len(json.dumps(refused.value.body)) < 1000


def test_fields_without_effect_and_those_that_say_what_is_so_are_taken():
    body = HELLO | {"model": "x", "user": "me", "temperature": 1, "n": 1, "tool_choice": None, "top_p": 1.0}
    request = read(body | {"max_completion_tokens": 5, "stop": "END", "stream": True}, SETTINGS)
    assert (request.max_tokens, request.stops, request.streams, request.tools) == (5, ("END",), True, ())
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo?"}]
    assert read({"messages": [{"role": "user", "content": parts}]}, SETTINGS).messages[0].content == "Hel\nlo?"


async def test_a_session_is_reached_with_its_own_key_only_and_not_after_its_end():
    gateway = Gateway(SETTINGS)
    async with gateway.session(echo, find) as (_, url, key):
        async with gateway.session(echo, find) as (_, other_url, other_key):
            assert (await post(url, HELLO, other_key))[0] == 401
            assert (await post(url, HELLO, ""))[0] == 401
            assert (await post(other_url, HELLO, other_key))[0] == 200
        assert (await post(other_url, HELLO, other_key))[0] == 404
        assert (await post(url.replace(key, "x"), HELLO, key))[0] == 404
        assert (await post(url, HELLO, key))[0] == 200
    with pytest.raises(aiohttp.ClientConnectorError):
        await post(url, HELLO, key)


async def test_what_is_not_served_is_named_in_the_apis_form():
    async with Gateway(SETTINGS).session(echo, find) as (_, url, key):
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.request("POST", f"{url}/v1/embeddings", headers=headers) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (404, "invalid_request_error")


@pytest.mark.parametrize("path", ["/v1/v1/messages", "/chat/completions", "/v1/completions"])
async def test_a_path_that_is_not_served_is_named_and_not_the_session(path):
    """The usual slip, an address with /v1 or without, was said to be a session that has ended."""
    async with Gateway(SETTINGS).session(echo, find) as (session, url, key):
        async with aiohttp.request("POST", url + path, headers={"Authorization": f"Bearer {key}"}) as response:
            said = json.dumps(await response.json())
        assert response.status == 404
        assert "session_ended" not in said
        assert f"POST {path}: Not Found; asked is at /v1/chat/completions" in said
        assert f"POST {path}: Not Found" in session.refusal


async def test_it_listens_on_loopback_while_a_session_is_open():
    gateway = Gateway(SETTINGS)
    for _ in range(2):
        async with gateway.session(echo, find) as (_, url, key):
            assert url.startswith("http://127.0.0.1:")
            headers = {"Authorization": f"Bearer {key}"}
            async with aiohttp.request("GET", f"{url}/v1/models", headers=headers) as response:
                assert [model["id"] for model in (await response.json())["data"]] == ["policy"]
    assert gateway._runner is None


@pytest.mark.parametrize(
    ("body", "status", "answer"),
    [
        ({"query": "Pinsk"}, 200, ["Pinsk", "é"]),
        ({"query": 3}, 400, "query must be a text"),
        ([], 400, "query must be a text"),
        ({"query": "down"}, 502, "the retriever is down"),
    ],
)
async def test_searches_go_through_it_too(body, status, answer):
    async with Gateway(SETTINGS).session(echo, find) as (_, url, key):
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.request("POST", f"{url}/search", json=body, headers=headers) as response:
            found = await response.json()
            assert response.status == status
            assert answer == (found["documents"] if status == 200 else found["error"]["message"])
        async with aiohttp.request("POST", f"{url}/search", json=body) as response:
            assert response.status == 401
