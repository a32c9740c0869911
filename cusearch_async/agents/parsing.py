"""Reads thoughts and tool calls out of what the policy wrote, with vLLM's parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cusearch_async.agents.conversation import Tools
from cusearch_async.environments.agent import AgentSettings
from cusearch_async.errors import ConfigError, first_line
from cusearch_async.rollout.prompting import Arguments


class Parsed(NamedTuple):
    text: str
    """Beside thoughts and calls."""
    calls: Sequence[tuple[str, str]] = ()
    """Name and arguments (JSON) of each."""
    thoughts: str = ""


Parser = Callable[[str, Tools], Parsed]


def parser_of(label: str, settings: AgentSettings, tokenizer: Any, arguments: Arguments) -> Parser:
    """vLLM's parsers that an environment names. Raises: ConfigError that names the setting."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415  (seconds)
    from vllm.reasoning import ReasoningParserManager  # noqa: PLC0415
    from vllm.tool_parsers import ToolParserManager  # noqa: PLC0415

    key, name = f"environment.{label}.parser", settings.parser
    tool_parser = _chosen(key, name, ToolParserManager.list_registered(), ToolParserManager.get_tool_parser)
    _refuse_other_models(key, name, lambda: tool_parser(tokenizer))
    reasoning = None
    if settings.reasoning_parser:
        key, name = f"environment.{label}.reasoning_parser", settings.reasoning_parser
        manager = ReasoningParserManager
        kind = _chosen(key, name, manager.list_registered(), manager.get_reasoning_parser)
        reasoning = _refuse_other_models(key, name, lambda: kind(tokenizer, chat_template_kwargs=arguments or {}))

    def parse(written: str, tools: Tools) -> Parsed:
        request = ChatCompletionRequest(messages=[], tools=list(tools) or None)
        thoughts, text = reasoning.extract_reasoning(written, request) if reasoning else (None, written)
        if not tools:
            return Parsed(text or "", (), thoughts or "")
        found = tool_parser(tokenizer, request.tools).extract_tool_calls(text or "", request)
        calls = [(call.function.name, _text_of(call.function.arguments)) for call in found.tool_calls]
        return Parsed(found.content or "", calls, thoughts or "")

    return parse


def _chosen(key: str, name: str, known: Sequence[str], get: Callable[[str], Any]) -> Any:
    """Raises: ConfigError."""
    if name not in known:
        raise ConfigError(f"{key}: vLLM has no parser {name!r}; it has {', '.join(sorted(known))}")
    try:
        return get(name)
    except ImportError as error:
        raise ConfigError(f"{key}: vLLM's parser {name!r} cannot be loaded: {first_line(error)}") from error


def _refuse_other_models(key: str, name: str, make: Callable[[], Any]) -> Any:
    """Raises: ConfigError."""
    try:
        return make()
    except Exception as error:  # each has its own
        raise ConfigError(f"{key}: vLLM's {name!r} is not for this model: {first_line(error)}") from error


def _text_of(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
