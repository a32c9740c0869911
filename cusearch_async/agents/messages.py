"""Anthropic's Messages API. Source: Anthropic's API reference, "Create a Message"."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cusearch_async.agents.api import MODEL, Fields, Refused, TurnReply, TurnRequest, event, list_of, text_in, text_of
from cusearch_async.agents.conversation import Message, ToolCall, Tools
from cusearch_async.config import EpisodeConfig

WITHOUT_EFFECT = ("model", "metadata", "service_tier")
FIXED: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}, {"type": "none"}),
    "thinking": ({"type": "disabled"},),
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read(body: Any, settings: EpisodeConfig, ignores: Sequence[str] = ()) -> TurnRequest:
    """Raises: Refused."""
    fields = Fields(body, WITHOUT_EFFECT, FIXED, ignores)
    system, tools = fields.take("system"), fields.take("tools", [])
    given = list_of(fields.take("messages"), "messages")
    messages = [Message("system", text_of(system, "system"))] if system is not None else []
    for number, message in enumerate(given):
        messages += _messages(message, f"messages[{number}]")
    if messages[-1].role == "assistant":
        raise Refused("the last message must be the user's: a turn that is begun is not continued", "messages")
    is_without = "tool_choice" not in ignores and body.get("tool_choice") == {"type": "none"}
    usable = () if is_without else _tools(tools)
    return fields.request(messages, usable, settings, ("max_tokens",), "stop_sequences")


def _tools(tools: Any) -> Tools:
    """In the form of Chat Completions, which chat templates know."""
    named = isinstance(tools, list) and all(
        isinstance(tool, dict) and isinstance(tool.get("name"), str) and isinstance(tool.get("input_schema"), dict)
        for tool in tools
    )
    if not named:
        raise Refused('tools must be a list of {"name": …, "input_schema": {…}}', "tools")
    functions = (
        {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
        for tool in tools
    )
    return tuple({"type": "function", "function": function} for function in functions)


def _messages(message: Any, field: str) -> Iterator[Message]:
    """Several where it holds results of tools."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
        raise Refused(f"{field} must be an object with a role, user or assistant", field)
    content, role = message.get("content"), message["role"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise Refused(f"{field}.content must be a text or a list of blocks", f"{field}.content")
    texts: list[str] = []
    calls, between = [], "" if role == "assistant" else "\n"
    for number, block in enumerate(blocks):
        place, kind = f"{field}.content[{number}]", block.get("type")
        if kind == "tool_result" and role == "user":
            if texts:
                yield Message(role, between.join(texts))
                texts = []
            result = text_of(block.get("content"), f"{place}.content")
            yield Message("tool", result, tool_call_id=text_in(block, "tool_use_id", place))
        elif kind == "tool_use" and role == "assistant":
            arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
            calls.append(ToolCall(text_in(block, "id", place), text_in(block, "name", place), arguments))
        elif kind == "text":
            texts.append(text_of([block], place))
        else:
            raise Refused(f"{place}: blocks of the type {kind!r:.40} are not supported here", place)
    if texts or calls or not blocks:
        yield Message(role, between.join(texts), tuple(calls))


def answer(reply: TurnReply) -> dict[str, Any]:
    """The body of an answer."""
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.sampled_tokens}
    return _frame(reply, _blocks(reply.message)) | _ending(reply) | {"usage": usage}


def events(reply: TurnReply, request: TurnRequest) -> Iterator[bytes]:
    """The same as server-sent events: each block is one piece."""

    def named(kind: str, **data: Any) -> bytes:
        return event({"type": kind} | data, kind)

    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
    yield named("message_start", message=_frame(reply, []) | {"usage": usage})
    for index, block in enumerate(_blocks(reply.message)):
        if block["type"] == "text":
            begun, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            begun = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        yield named("content_block_start", index=index, content_block=begun)
        yield named("content_block_delta", index=index, delta=delta)
        yield named("content_block_stop", index=index)
    yield named("message_delta", delta=_ending(reply), usage={"output_tokens": reply.sampled_tokens})
    yield named("message_stop")


def error(refusal: Refused) -> dict[str, Any]:
    return {"type": "error", "error": {"type": refusal.body["error"]["type"], "message": str(refusal)}}


def _frame(reply: TurnReply, content: list[dict[str, Any]]) -> dict[str, Any]:
    about = {"id": f"msg_{reply.number}", "type": "message", "role": "assistant", "model": MODEL}
    return about | {"content": content, "stop_reason": None, "stop_sequence": None}


def _ending(reply: TurnReply) -> dict[str, Any]:
    if reply.finish_reason == "stop" and reply.stopped is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped}
    return {"stop_reason": _STOP_REASONS[reply.finish_reason], "stop_sequence": None}


def _blocks(message: Message) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": message.content}] if message.content or not message.tool_calls else []
    return text + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.as_object} for call in message.tool_calls
    ]
