"""OpenAI's Responses API, without what it keeps between requests. Source: OpenAI's API reference, "Create a model
response"."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cusearch_async.agents.api import MODEL, Fields, Refused, TurnReply, TurnRequest, event, list_of, text_in, text_of
from cusearch_async.agents.conversation import Message, ToolCall, Tools
from cusearch_async.config import EpisodeConfig

ROLES = ("system", "developer", "user", "assistant")
WITHOUT_EFFECT = (
    *("model", "user", "metadata", "store", "include", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "stream_options"),
)
FIXED: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "background": (False,),
    "truncation": ("disabled",),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none"),
    "text": ({"format": {"type": "text"}},),
}
_TEXTS = ("input_text", "output_text", "text")
_ALONE = re.compile(r"fc_\d+_0")
"""The id of a turn's first call where the turn has no text: a message before it is another's."""


def read(body: Any, settings: EpisodeConfig, ignores: Sequence[str] = ()) -> TurnRequest:
    """Raises: Refused."""
    fields = Fields(body, WITHOUT_EFFECT, FIXED, ignores)
    instructions, given, tools = fields.take("instructions"), fields.take("input"), fields.take("tools", [])
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list_of(given, "input")
    messages = [Message("system", text_of(instructions, "instructions"))] if instructions is not None else []
    for number, item in enumerate(items):
        _add(messages, item, f"input[{number}]")
    is_without = "tool_choice" not in ignores and body.get("tool_choice") == "none"
    usable = () if is_without else _tools(tools)
    return fields.request(messages, usable, settings, ("max_output_tokens",))


def _tools(tools: Any) -> Tools:
    """In the form of Chat Completions, which chat templates know."""
    named = isinstance(tools, list) and all(
        isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("name"), str)
        for tool in tools
    )
    if not named:
        raise Refused('tools must be a list of {"type": "function", "name": …}', "tools")
    shown = ({name: tool[name] for name in ("name", "description", "parameters") if name in tool} for tool in tools)
    return tuple({"type": "function", "function": function} for function in shown)


def _add(messages: list[Message], item: Any, field: str) -> None:
    """A text of the policy and its calls, which are separate items, are one message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message" and item.get("role") in ROLES:
        role = "system" if item["role"] == "developer" else item["role"]
        between = "" if role == "assistant" else "\n"
        messages.append(Message(role, text_of(item.get("content"), f"{field}.content", _TEXTS, between)))
    elif kind == "function_call":
        call = ToolCall(*(text_in(item, name, field) for name in ("call_id", "name", "arguments")))
        is_begun = bool(messages) and messages[-1].role == "assistant" and not _ALONE.fullmatch(str(item.get("id")))
        before = messages.pop() if is_begun else Message("assistant", "")
        messages.append(Message("assistant", before.content, (*before.tool_calls, call)))
    elif kind == "function_call_output":
        output = text_of(item.get("output"), f"{field}.output", _TEXTS)
        messages.append(Message("tool", output, tool_call_id=text_in(item, "call_id", field)))
    elif kind != "reasoning":  # the policy's thoughts, whose tokens are known
        raise Refused(f"{field} must be a message, a function_call or a function_call_output", field)


def answer(reply: TurnReply) -> dict[str, Any]:
    """The body of an answer."""
    is_cut = reply.finish_reason == "length"
    asked, said = reply.prompt_tokens, reply.sampled_tokens
    usage = {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": asked + said,
    }
    return _frame(reply, "incomplete" if is_cut else "completed", _items(reply)) | {
        "usage": usage,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
    }


def events(reply: TurnReply, request: TurnRequest) -> Iterator[bytes]:
    """The same as server-sent events: each item is one piece."""
    whole, number = answer(reply), 0

    def named(kind: str, **data: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number - 1} | data, kind)

    yield named("response.created", response=_frame(reply, "in_progress", []))
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            yield named("response.output_item.added", output_index=index, item=item | {"content": []})
            of_part = place | {"content_index": 0}
            yield named("response.content_part.added", **of_part, part=part | {"text": ""})
            yield named("response.output_text.delta", **of_part, delta=part["text"], logprobs=[])
            yield named("response.output_text.done", **of_part, text=part["text"], logprobs=[])
            yield named("response.content_part.done", **of_part, part=part)
        elif item["type"] == "reasoning":
            of_part, (part,) = place | {"content_index": 0}, item["content"]
            yield named("response.output_item.added", output_index=index, item=item | {"content": []})
            yield named("response.reasoning_text.delta", **of_part, delta=part["text"])
            yield named("response.reasoning_text.done", **of_part, text=part["text"])
        else:
            arguments = item["arguments"]
            yield named("response.output_item.added", output_index=index, item=item | {"arguments": ""})
            yield named("response.function_call_arguments.delta", **place, delta=arguments)
            yield named("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments)
        yield named("response.output_item.done", output_index=index, item=item)
    yield named(f"response.{whole['status']}", response=whole)


def error(refusal: Refused) -> dict[str, Any]:
    return refusal.body


def _frame(reply: TurnReply, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    about = {"id": f"resp_{reply.number}", "object": "response", "created_at": 0, "model": MODEL, "status": status}
    told = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}, "instructions": None}
    return about | told | {"output": output, "error": None, "incomplete_details": None}


def _items(reply: TurnReply) -> list[dict[str, Any]]:
    said, number = reply.message, reply.number
    is_text = bool(said.content or not said.tool_calls)
    part = {"type": "output_text", "text": said.content, "annotations": []}
    message = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [part]}
    calls = (
        {"type": "function_call", "id": f"fc_{number}_{place}{'_said' * is_text}", "status": "completed"}
        | {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        for place, call in enumerate(said.tool_calls)
    )
    thought = [{"type": "reasoning_text", "text": said.thoughts}]
    thoughts = {"type": "reasoning", "id": f"rs_{number}", "summary": [], "status": "completed", "content": thought}
    return [*([thoughts] if said.thoughts else []), *([message] if is_text else []), *calls]
