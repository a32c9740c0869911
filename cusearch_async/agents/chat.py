"""The Chat Completions API: what a request may ask for, and the form of answers.

Source: OpenAI's API reference, "Create chat completion". What cannot be honoured exactly is refused by name: a policy
that is trained must be the one that was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cusearch_async.agents.conversation import Message, ToolCall, Tools
from cusearch_async.config import EpisodeConfig

ROLES = ("system", "developer", "user", "assistant", "tool")
WITHOUT_EFFECT = ("model", "user", "metadata", "store", "stream_options", "service_tier", "prompt_cache_key")
"""Fields that change nothing of what the policy says."""
FIXED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""Fields that may have these values only."""


class Refused(Exception):
    """A request that is answered with an error in the API's form."""

    def __init__(
        self, message: str, field: str | None = None, code: str = "invalid_request", status: int = 400
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "invalid_request_error", "param": field, "code": code}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    messages: tuple[Message, ...]
    tools: Tools
    max_tokens: int
    stops: tuple[str, ...]
    streams: bool


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One turn of the policy, for the program."""

    id: str
    message: Message
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int


def read_request(body: Any, settings: EpisodeConfig) -> ChatRequest:
    """Raises: Refused."""
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    given = {key: value for key, value in body.items() if value is not None and key not in WITHOUT_EFFECT}
    for field, allowed in FIXED.items():
        value = given.pop(field, allowed[0])
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            raise Refused(f"{field} must be {' or '.join(map(json.dumps, allowed))}, got {json.dumps(value)}", field)
    temperature = given.pop("temperature", settings.temperature)
    if temperature != settings.temperature:
        text = f"temperature must be the run's, {settings.temperature:g} (episode.temperature), got {temperature!r}"
        raise Refused(f"{text}; leave it out", "temperature")
    messages, tools = given.pop("messages", None), given.pop("tools", [])
    limits = [given.pop(name) for name in ("max_tokens", "max_completion_tokens") if name in given]
    stop, streams = given.pop("stop", []), given.pop("stream", False)
    if given:
        field = next(iter(given))
        raise Refused(f"{field} is not supported here; leave it out", field)
    if not all(isinstance(limit, int) and limit > 0 for limit in limits):
        raise Refused("max_completion_tokens must be a positive number", "max_completion_tokens")
    return ChatRequest(
        messages=_messages(messages),
        tools=() if body.get("tool_choice") == "none" else _tools(tools),
        max_tokens=min([settings.max_turn_tokens, *limits]),
        stops=_stops(stop),
        streams=streams is True,
    )


def _stops(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(text, str) and text for text in stops):
        raise Refused("stop must be a text or a list of texts", "stop")
    return tuple(stops)


def _tools(tools: Any) -> Tools:
    named = isinstance(tools, list) and all(
        isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("function"), dict)
        for tool in tools
    )
    if not named or not all(isinstance(tool["function"].get("name"), str) for tool in tools):
        raise Refused('tools must be a list of {"type": "function", "function": {"name": …}}', "tools")
    return tuple(tools)


def _messages(messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list with a message", "messages")
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(messages))


def _message(message: Any, field: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise Refused(f"{field} must be an object with a role, one of {', '.join(ROLES)}", field)
    role = "system" if message["role"] == "developer" else message["role"]
    calls = message.get("tool_calls") or []
    try:
        found = tuple(ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls)
    except (TypeError, KeyError) as error:
        raise Refused(f"{field}.tool_calls must be tool calls of functions", f"{field}.tool_calls") from error
    if not all(isinstance(part, str) for call in found for part in (call.id, call.name, call.arguments)):
        raise Refused(f"{field}.tool_calls must hold texts", f"{field}.tool_calls")
    identity = message.get("tool_call_id") or ""
    if not isinstance(identity, str):
        raise Refused(f"{field}.tool_call_id must be a text", f"{field}.tool_call_id")
    return Message(role, _content(message.get("content"), f"{field}.content"), found, identity)


def _content(content: Any, field: str) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [] if content is None else content
    are_texts = isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    )
    if not are_texts:
        raise Refused(f"{field} must be a text, or parts of the type text", field)
    text = "".join(part["text"] for part in parts)
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        raise Refused(f"{field} has an unpaired surrogate", field)
    return text


def completion(reply: ChatReply, model: str) -> dict[str, Any]:
    """The body of an answer."""
    choice = {"index": 0, "message": _shown(reply.message), "finish_reason": reply.finish_reason, "logprobs": None}
    return _frame(reply, model, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}


def events(reply: ChatReply, model: str) -> Iterator[bytes]:
    """The same as server-sent events: the whole turn is one piece."""
    delta = _shown(reply.message)
    for number, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = number
    frame = _frame(reply, model, "chat.completion.chunk")
    for choices, more in (
        ([{"index": 0, "delta": delta, "finish_reason": None}], {}),
        ([{"index": 0, "delta": {}, "finish_reason": reply.finish_reason}], {}),
        ([], {"usage": _usage(reply)}),
    ):
        yield f"data: {json.dumps(frame | {'choices': choices} | more)}\n\n".encode()
    yield b"data: [DONE]\n\n"


def _frame(reply: ChatReply, model: str, kind: str) -> dict[str, Any]:
    return {"id": reply.id, "object": kind, "created": 0, "model": model}


def _shown(message: Message) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    shown: dict[str, Any] = {"role": "assistant", "content": message.content if message.content or not calls else None}
    return shown | ({"tool_calls": calls} if calls else {})


def _usage(reply: ChatReply) -> dict[str, int]:
    asked, said = reply.prompt_tokens, reply.sampled_tokens
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}
