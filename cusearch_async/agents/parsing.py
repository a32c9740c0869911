"""Reads thoughts and tool calls out of what the policy wrote, with vLLM's parsers."""

from __future__ import annotations

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


Parser = Callable[[Sequence[int], str, Tools], Parsed]


def parser_of(label: str, settings: AgentSettings, tokenizer: Any, arguments: Arguments) -> Parser:
    """vLLM's parsers that an environment names, as vLLM's server composes them. `arguments` are those of the chat
    template. Raises: ConfigError that names the setting."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415  (seconds)
    from vllm.parser import ParserManager  # noqa: PLC0415
    from vllm.reasoning import ReasoningParserManager  # noqa: PLC0415
    from vllm.tokenizers.hf import get_cached_tokenizer  # noqa: PLC0415
    from vllm.tool_parsers import ToolParserManager  # noqa: PLC0415

    key, called, of_thoughts = f"environment.{label}", settings.parser, settings.reasoning_parser
    _refuse_unknown(f"{key}.parser", called, ToolParserManager.list_registered())
    _refuse_unknown(f"{key}.reasoning_parser", of_thoughts, ["", *ReasoningParserManager.list_registered()])
    tokenizer = get_cached_tokenizer(tokenizer)  # a turn makes new parsers; many read the whole vocabulary
    template: dict[str, Any] = {"chat_template_kwargs": arguments or {}}
    try:
        kind: Any = ParserManager.get_parser(called, of_thoughts, enable_auto_tools=True, tokenizer=tokenizer)
        kind(tokenizer, None, **template)
    except Exception as error:  # each has its own
        names = f"{key}.parser {called!r}" + (f" and {key}.reasoning_parser {of_thoughts!r}" if of_thoughts else "")
        why = first_line(error.__cause__ or error)
        raise ConfigError(f"{names}: vLLM's parsers are not for this model: {why}") from error

    def parse(prompt: Sequence[int], written: str, tools: Tools) -> Parsed:
        if not (tools or of_thoughts):
            return Parsed(written)
        request = ChatCompletionRequest(messages=[], tools=list(tools) or None)
        parser = kind(tokenizer, request.tools, **template)
        parser.set_prompt_token_ids(prompt)  # some templates open the thoughts there
        thoughts, text, calls = parser.parse(written, request, enable_auto_tools=True)
        return Parsed(text or "", [(call.name, call.arguments) for call in calls or ()], thoughts or "")

    return parse


def _refuse_unknown(key: str, name: str, known: Sequence[str]) -> None:
    """Raises: ConfigError."""
    if name not in known:
        raise ConfigError(f"{key}: vLLM has no parser {name!r}; it has {', '.join(sorted(filter(None, known)))}")
