"""Three APIs, one conversation: what is asked in either of them is the same request, and what is refused is named."""

from __future__ import annotations

import json
from dataclasses import replace

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.agents import chat, messages, responses
from cusearch_async.agents.api import Refused, TurnReply, TurnRequest
from cusearch_async.agents.conversation import Message, ToolCall
from cusearch_async.agents.gateway import Gateway
from cusearch_async.config import EpisodeConfig

SETTINGS = EpisodeConfig()
ASKED = TurnRequest((), (), 7, (), streams=True)
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
WORDS = st.text("ab é\n{", min_size=1, max_size=6)
CALLS = st.lists(st.dictionaries(st.just("query"), WORDS, min_size=1), max_size=2)
TURNS = st.lists(st.tuples(WORDS | st.just(""), CALLS, WORDS), max_size=3)


def conversation(turns) -> list[Message]:
    """A system's message, a question, and turns of the policy, each with what came back."""
    found = [Message("system", "Be brief."), Message("user", "Where?")]
    for number, (text, arguments, back) in enumerate(turns):
        calls = tuple(
            ToolCall(f"call_{number}_{place}", "search", json.dumps(each, ensure_ascii=False))
            for place, each in enumerate(arguments)
        )
        found.append(Message("assistant", text if text or calls else "x", calls))
        found += [Message("tool", back, tool_call_id=call.id) for call in calls] or [Message("user", back)]
    return found


def turn(message: Message) -> TurnReply:
    """With thoughts, which a program may send back or not."""
    return TurnReply(0, replace(message, thoughts="Hm."), "stop", 1, 1)


def in_messages(said: list[Message]) -> dict:
    system, *rest = said
    written: list[dict] = []
    for message in rest:
        if message.role == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.content}]
            if written[-1]["role"] == "user":
                written[-1]["content"] += blocks
                continue
        elif message.role == "assistant":
            blocks = messages.answer(turn(message))["content"]
        else:
            blocks = [{"type": "text", "text": message.content}]
        written.append({"role": "assistant" if message.role == "assistant" else "user", "content": blocks})
    tool = {"name": "search", "description": "Find.", "input_schema": PARAMETERS}
    return {"system": system.content, "messages": written, "tools": [tool], "max_tokens": 7}


def in_responses(said: list[Message]) -> dict:
    items: list[dict] = []
    for message in said[1:]:
        if message.role == "tool":
            output = {"call_id": message.tool_call_id, "output": message.content}
            items.append({"type": "function_call_output"} | output)
        elif message.role == "assistant":
            items += responses.answer(turn(message))["output"]
        else:
            items.append({"role": message.role, "content": [{"type": "input_text", "text": message.content}]})
    tool = {"type": "function", "name": "search", "description": "Find.", "parameters": PARAMETERS, "strict": True}
    return {"instructions": said[0].content, "input": items, "tools": [tool], "max_output_tokens": 7}


def in_chat(said: list[Message]) -> dict:
    function = {"name": "search", "description": "Find.", "parameters": PARAMETERS}
    shown = [
        chat.answer(turn(message))["choices"][0]["message"]
        if message.role == "assistant"
        else {"role": message.role, "content": message.content}
        | ({"tool_call_id": message.tool_call_id} if message.role == "tool" else {})
        for message in said
    ]
    return {"messages": shown, "tools": [{"type": "function", "function": function}], "max_tokens": 7}


@given(TURNS)
def test_one_conversation_is_one_request_in_every_api(turns):
    said = conversation(turns)
    requests = [
        chat.read(in_chat(said), SETTINGS),
        messages.read(in_messages(said), SETTINGS),
        responses.read(in_responses(said), SETTINGS),
    ]
    assert requests[0].messages == tuple(said)
    assert requests[0] == requests[1] == requests[2]


def test_a_call_alone_is_no_part_of_the_message_before_it():
    """Both were one turn that nobody wrote, and the row was not continued."""
    thinks, calls = Message("assistant", "Let me think."), Message("assistant", "", (ToolCall("c", "search", "{}"),))
    both = Message("assistant", "I search.", (ToolCall("d", "search", "{}"), ToolCall("e", "search", "{}")))
    said = [Message("system", "Be brief."), Message("user", "Where?"), thinks, calls, thinks, both, thinks]
    assert responses.read(in_responses(said), SETTINGS).messages == tuple(said)


def test_a_field_that_is_ignored_is_not_obeyed():
    said = conversation([])
    for api, body, choice in (
        (chat, in_chat(said), "none"),
        (messages, in_messages(said), {"type": "none"}),
        (responses, in_responses(said), "none"),
    ):
        assert api.read(body | {"tool_choice": choice}, SETTINGS).tools == ()
        assert api.read(body | {"tool_choice": choice}, SETTINGS, ["tool_choice"]).tools != ()


def test_what_changes_nothing_is_taken():
    said = conversation([])
    more = {"safety_identifier": "x", "prompt_cache_retention": "24h"}
    assert chat.read(in_chat(said) | more, SETTINGS) == chat.read(in_chat(said), SETTINGS)
    choice = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}
    assert messages.read(in_messages(said) | choice, SETTINGS) == messages.read(in_messages(said), SETTINGS)


@pytest.mark.parametrize(("api", "times"), [(chat, 2), (messages, 0), (responses, 1)])
def test_thoughts_are_apart_from_the_text_whole_and_in_a_stream(api, times):
    reply = turn(Message("assistant", "It is 5."))
    whole, streamed = json.dumps(api.answer(reply)), b"".join(api.events(reply, ASKED)).decode()
    assert (whole.count("Hm."), whole.count("It is 5.")) == (times, 1)
    assert ("Hm." in streamed) == bool(times)


def test_parts_of_a_text_are_lines_as_in_vllms_server():
    parts = [{"type": "text", "text": "Use tools."}, {"type": "text", "text": "Where?"}]
    bodies = [
        (chat, {"messages": [{"role": "user", "content": parts}]}),
        (messages, from_user(*parts) | {"max_tokens": 7}),
        (responses, {"input": [{"role": "user", "content": [part | {"type": "input_text"} for part in parts]}]}),
    ]
    assert [api.read(body, SETTINGS).messages for api, body in bodies] == [(Message("user", "Use tools.\nWhere?"),)] * 3


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_a_stream_ends_with_the_numbers_of_tokens_only_where_they_are_asked_for(options):
    """Loops over a stream read choices[0] of every chunk."""
    request = chat.read(HELLO | {"stream": True, "stream_options": options}, SETTINGS)
    *events, _ = chat.events(turn(Message("assistant", "5")), request)
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    with_usage = [chunk for chunk in chunks if "usage" in chunk]
    assert [chunk["choices"] for chunk in with_usage] == ([[]] if options == {"include_usage": True} else [])
    assert all(chunk["choices"] for chunk in chunks if chunk not in with_usage)


@pytest.mark.parametrize(
    ("reason", "stopped", "ending"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "5", ("stop_sequence", "5")),
        ("tool_calls", "5", ("tool_use", None)),
        ("length", None, ("max_tokens", None)),
    ],
)
def test_messages_name_the_stop_that_ended_a_turn(reason, stopped, ending):
    reply = replace(turn(Message("assistant", "It is ")), finish_reason=reason, stopped=stopped)
    whole = messages.answer(reply)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ending
    *_, delta, _ = messages.events(reply, ASKED)
    streamed = json.loads(delta.split(b"data: ")[1])["delta"]
    assert (streamed["stop_reason"], streamed["stop_sequence"]) == ending


HELLO = {"messages": [{"role": "user", "content": "Hello?"}]}


def from_user(*blocks: dict) -> dict:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("api", "body", "message"),
    [
        (messages, {"messages": []}, "messages must be a list"),
        (messages, {"messages": [{"role": "system", "content": "x"}]}, "a role, user or assistant"),
        (messages, {"messages": [{"role": "user", "content": 5}]}, "a text or a list of blocks"),
        (messages, from_user({"type": "image"}), r"of the type .image. are not"),
        (messages, from_user({"type": "tool_use"}), "not supported"),
        (messages, from_user({"type": "tool_result"}), "tool_use_id must be a text"),
        (messages, {"messages": [*HELLO["messages"], {"role": "assistant", "content": "It is"}]}, "is not continued"),
        (messages, HELLO | {"tools": [{"name": "x"}]}, "tools must be a list of"),
        (messages, HELLO | {"tools": [{"name": "x", "input_schema": {}, "description": 5}]}, "must be a text"),
        (responses, {"input": "x", "tools": [{"type": "function", "name": "x", "parameters": "y"}]}, "must be an obj"),
        (messages, HELLO | {"top_k": 3}, "top_k is not supported"),
        (messages, HELLO | {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking must be"),
        (messages, HELLO | {"tool_choice": {"type": "any"}}, "tool_choice must be"),
        (messages, HELLO | {"temperature": 0.2}, "temperature must be the run's"),
        (messages, HELLO | {"max_tokens": "9"}, "max_tokens must be a positive number"),
        (responses, {"input": 3}, "input must be a list"),
        (responses, {"input": [{"type": "web_search_call"}]}, "must be a message, a function_call"),
        (responses, {"input": [{"type": "function_call"}]}, "call_id must be a text"),
        (responses, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "parts of the type input_te"),
        (responses, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        (responses, {"input": "x", "tools": [{"type": "web_search"}]}, "tools must be a list of"),
        (responses, {"input": "x", "text": {"format": {"type": "json_object"}}}, "text must be"),
        (responses, {"input": "x", "temperature": 0.2}, "temperature must be the run's"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(api, body, message):
    with pytest.raises(Refused, match=message):
        api.read(body, SETTINGS)


async def test_a_refusal_has_the_form_of_its_api():
    async def unasked(request):
        raise AssertionError

    async with Gateway(SETTINGS).session(unasked, unasked) as (_, url, key), aiohttp.ClientSession() as session:
        for path, kind in (("messages", "error"), ("responses", None), ("chat/completions", None)):
            async with session.post(f"{url}/v1/{path}", json={}, headers={"x-api-key": key}) as response:
                answer = await response.json()
            assert (response.status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert answer.get("type") == kind
            async with session.post(f"{url}/v1/{path}", json={}, headers={"x-api-key": "another"}) as response:
                assert response.status == 401


@given(TURNS)
def test_a_stream_of_messages_says_what_the_answer_says(turns):
    """Put together as Anthropic's client does."""
    for said in conversation([*turns, ("last", [], "x")]):
        if said.role != "assistant":
            continue
        reply = TurnReply(4, said, "tool_calls" if said.tool_calls else "stop", 3, 2)
        whole: dict = {}
        for chunk in messages.events(reply, ASKED):
            kind, data = (line.partition(": ")[2] for line in chunk.decode().strip().split("\n"))
            event = json.loads(data)
            assert event["type"] == kind
            if kind == "message_start":
                whole = event["message"]
            elif kind == "content_block_start":
                whole["content"].append(event["content_block"])
            elif kind == "content_block_delta":
                block, delta = whole["content"][event["index"]], event["delta"]
                if delta["type"] == "text_delta":
                    block["text"] += delta["text"]
                else:
                    block["input"] = json.loads(delta["partial_json"])
            elif kind == "message_delta":
                whole |= event["delta"]
                whole["usage"] |= event["usage"]
        assert whole == messages.answer(reply)


@pytest.mark.parametrize("arguments", ['"Pinsk"', "[1]", "no JSON", '{"query": "Pinsk"}'])
def test_a_call_that_messages_has_shown_is_known_again(arguments):
    """One whose arguments are no object began a new row: the policy's turn was foreign text."""
    turn = Message("assistant", "", (ToolCall("c", "search", arguments),))
    shown = messages.answer(TurnReply(0, turn, "tool_calls", 1, 1))
    (back,) = messages._messages({"role": "assistant", "content": shown["content"]}, "m")
    assert turn.says(back)
