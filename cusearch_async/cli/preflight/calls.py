"""A made-up call of an agent's tool, and whether the configured parser reads it as the chat template writes it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cusearch_async.agents.conversation import Message, ToolCall, Tools
from cusearch_async.agents.parsing import Parsed, Parser, parser_of
from cusearch_async.agents.turns import ChatPolicy
from cusearch_async.environments.agent import AgentSettings
from cusearch_async.errors import first_line
from cusearch_async.rollout.prompting import apply_template, encode


@dataclass(slots=True)
class OneCall:
    """For agents, as a parser: reads a call of a tool, one of those that are `counted`, out of the first turn that is
    offered one, whatever the policy wrote. Texts that the tool asks for are `text`."""

    text: str
    counted: Sequence[str] = ()
    tools: Tools = field(default=(), init=False)
    """What was offered, and which call was made: of no tool yet."""
    name: str = field(default="", init=False)
    arguments: str = field(default="", init=False)

    def __call__(self, _: Sequence[int], written: str, tools: Tools) -> Parsed:
        if self.tools or not tools:
            return Parsed(written)
        self.tools = tools
        offered = [tool["function"] for tool in tools]
        function = next((one for one in offered if one["name"] in self.counted), offered[0])
        asked = function.get("parameters") or {}
        properties = asked.get("properties") or {}
        fields = {name: properties.get(name) or {} for name in asked.get("required") or ()}
        self.name = function["name"]
        self.arguments = json.dumps({name: _made_up(field, self.text) for name, field in fields.items()})
        return Parsed("", [(self.name, self.arguments)])


def _made_up(field: dict[str, Any], text: str) -> Any:
    """A value that a JSON schema allows, as far as its type tells."""
    if field.get("enum"):
        return field["enum"][0]
    kinds = {"integer": 1, "number": 1.0, "boolean": False, "array": [], "object": {}}
    return next((value for kind, value in kinds.items() if field.get("type") == kind), text)


def misread(call: OneCall, label: str, settings: AgentSettings, chat: ChatPolicy) -> str:
    """How the parser misreads the call; empty where it reads what was called. Thoughts are not in it."""
    parse = parser_of(label, settings.model_copy(update={"reasoning_parser": ""}), chat.tokenizer, chat.arguments)
    # Mistral's templates want such an id, and Kimi's models write the tool's name in it
    found = [_misread(call, identity, parse, chat) for identity in ("call00000", f"functions.{call.name}:0")]
    return found[0] if all(found) else ""


def _misread(call: OneCall, identity: str, parse: Parser, chat: ChatPolicy) -> str:
    written = ""
    try:
        prompt, written = _written(call, identity, chat)
        read = parse(encode(chat.tokenizer, prompt), written, call.tools).calls
        calls = [(name, json.loads(arguments)) for name, arguments in read]
    except Exception as error:  # vLLM's raise what they like, and so do templates
        return f"{type(error).__name__}: {first_line(error)} ({written!r:.200})"
    is_right = calls == [(call.name, json.loads(call.arguments))]
    return "" if is_right else f"it reads {calls or 'no call'!s:.200} in {written!r:.200}"


def _written(call: OneCall, identity: str, chat: ChatPolicy) -> tuple[str, str]:
    """The chat template's text before the call, and that of the call."""
    turn = Message("assistant", "", (ToolCall(identity, call.name, call.arguments),))
    messages = [Message("user", "?").for_template(), turn.for_template()]
    asked, whole = (
        apply_template(chat.tokenizer, some, chat.arguments, prompts, call.tools)
        for some, prompts in ((messages[:1], True), (messages, False))
    )
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(asked, whole, strict=False))
    prompt = "".join(one for one, _ in same)
    written = whole[len(prompt) :]
    return prompt, written.partition(chat.end)[0] if chat.end else written
