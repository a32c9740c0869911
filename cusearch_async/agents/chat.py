"""The Chat Completions API. Source: OpenAI's API reference, "Create chat completion"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cusearch_async.agents.api import MODEL, Fields, Refused, TurnReply, TurnRequest, event, list_of, text_of
from cusearch_async.agents.conversation import Message, ToolCall, Tools
from cusearch_async.config import EpisodeConfig

ROLES = ("system", "developer", "user", "assistant", "tool")
WITHOUT_EFFECT = (
    *("model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    "safety_identifier",
)
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

THOUGHTS = ("reasoning", "reasoning_content")
"""Where vLLM's server shows them, and where others do."""


def read(body: Any, settings: EpisodeConfig, ignores: Sequence[str] = ()) -> TurnRequest:
    """Raises: Refused."""
    fields = Fields(body, WITHOUT_EFFECT, FIXED, ignores)
    options = fields.take("stream_options")
    given, tools = list_of(fields.take("messages"), "messages"), fields.take("tools", [])
    messages = [_message(message, f"messages[{number}]") for number, message in enumerate(given)]
    is_without = "tool_choice" not in ignores and body.get("tool_choice") == "none"
    usable = () if is_without else _tools(tools)
    found = fields.request(messages, usable, settings, ("max_tokens", "max_completion_tokens"), "stop")
    return replace(found, streams_usage=isinstance(options, dict) and options.get("include_usage") is True)


def _tools(tools: Any) -> Tools:
    named = isinstance(tools, list) and all(
        isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("function"), dict)
        for tool in tools
    )
    if not named or not all(isinstance(tool["function"].get("name"), str) for tool in tools):
        raise Refused('tools must be a list of {"type": "function", "function": {"name": …}}', "tools")
    return tuple(tools)


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
    text = text_of(message.get("content"), f"{field}.content", between="" if role == "assistant" else "\n")
    return Message(role, text, found, identity)


def answer(reply: TurnReply) -> dict[str, Any]:
    """The body of an answer."""
    choice = {"index": 0, "message": _shown(reply.message), "finish_reason": reply.finish_reason, "logprobs": None}
    return _frame(reply, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}


def events(reply: TurnReply, request: TurnRequest) -> Iterator[bytes]:
    """The same as server-sent events: the whole turn is one piece."""
    delta = _shown(reply.message)
    for number, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = number
    frame = _frame(reply, "chat.completion.chunk")
    yield event(frame | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield event(frame | {"choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish_reason}]})
    if request.streams_usage:
        yield event(frame | {"choices": [], "usage": _usage(reply)})
    yield b"data: [DONE]\n\n"


def error(refusal: Refused) -> dict[str, Any]:
    return refusal.body


def _frame(reply: TurnReply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.number}", "object": kind, "created": 0, "model": MODEL}


def _shown(message: Message) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    shown: dict[str, Any] = {"role": "assistant", "content": message.content if message.content or not calls else None}
    thoughts = {name: message.thoughts for name in THOUGHTS if message.thoughts}
    return shown | ({"tool_calls": calls} if calls else {}) | thoughts


def _usage(reply: TurnReply) -> dict[str, int]:
    asked, said = reply.prompt_tokens, reply.sampled_tokens
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}
