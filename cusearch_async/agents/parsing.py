"""Reads tool calls out of what the policy wrote, with vLLM's parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from cusearch_async.agents.conversation import Tools
from cusearch_async.errors import ConfigError, first_line

Parsed = tuple[str, Sequence[tuple[str, str]]]
"""The text beside the calls, and the name and arguments (JSON) of each."""
Parser = Callable[[str, Tools], Parsed]


def parser_of(key: str, name: str, tokenizer: Any) -> Parser:
    """vLLM's parser of this name. Raises: ConfigError that names the setting `key`."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415  (seconds)
    from vllm.tool_parsers import ToolParserManager  # noqa: PLC0415

    try:
        kind = ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        known = ", ".join(sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}))
        raise ConfigError(f"{key}: vLLM has no tool parser {name!r}; it has {known}") from error
    try:
        kind(tokenizer)
    except Exception as error:  # each has its own
        raise ConfigError(f"{key}: vLLM's {name!r} is not for this model: {first_line(error)}") from error

    def parse(text: str, tools: Tools) -> Parsed:
        request = ChatCompletionRequest(messages=[], tools=list(tools))
        found = kind(tokenizer, request.tools).extract_tool_calls(text, request)
        calls = [(call.function.name, _text_of(call.function.arguments)) for call in found.tool_calls]
        return found.content or "", calls

    return parse


def _text_of(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
