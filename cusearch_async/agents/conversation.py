"""The tokens of a conversation between a program and the policy. They only grow.

A program sends the whole history with every request, as text. Tokenised again it would not be what the policy sampled,
nor what it will be asked about. So the first messages become tokens once; later ones are rendered behind a conversation
of two fixed messages, and the policy's own turns keep their sampled tokens. The policy's turns are recognised by what
they say: a program may strip white space or thoughts, or write the JSON of a tool call in another way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cusearch_async.errors import ConfigError, EpisodeFailed, first_line
from cusearch_async.rollout.prompting import Arguments, apply_template, encode, is_chat
from cusearch_async.surrogates import without_surrogates

Tools = Sequence[Mapping[str, Any]]
"""Functions in the form of the Chat Completions API."""
_MARK = "cusearch{}quoted"
"""Stands for a text while the chat template is rendered."""
_END_OF_THOUGHTS = "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON, as the policy wrote it."""

    @property
    def parsed(self) -> Any:
        """The arguments, or their text where that is no JSON."""
        try:
            return json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments

    @property
    def as_object(self) -> Any:
        """The arguments as an API that knows only objects shows them."""
        return self.parsed if isinstance(self.parsed, dict) else {"arguments": self.parsed}


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    thoughts: str = ""
    """Of the policy, where a parser takes them out of its text; programs need not send them back."""
    stopped: str = field(default="", compare=False)
    """Of the policy: the request's stop that ended it, which programs may put back."""

    @property
    def spoken(self) -> str:
        """Its text without thoughts, and without white space around it."""
        return self.content.rpartition(_END_OF_THOUGHTS)[2].strip()

    def says(self, other: Message) -> bool:
        """Whether both are one message, but for white space around it, the form of the JSON in tool calls, thoughts
        that `other` has left out, and the stop that it has put back."""
        mine, theirs = ([(call.name, call.as_object) for call in one.tool_calls] for one in (self, other))
        same = self.role == other.role and self.tool_call_id == other.tool_call_id and mine == theirs
        whole = (self.content, self.content + self.stopped)
        texts = [text for one in whole for text in (one, one.rpartition(_END_OF_THOUGHTS)[2])]
        return same and other.content.strip() in [text.strip() for text in texts]

    def for_template(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            shown["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.parsed}}
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            shown["tool_call_id"] = self.tool_call_id
        return shown


class Conversation:
    def __init__(self, tokenizer: Any, arguments: Arguments, end: str) -> None:
        """`arguments` are those of the chat template, `end` is its `end_of_turn`."""
        self._tokenizer, self._arguments, self.end = tokenizer, arguments, end
        self.messages: tuple[Message, ...] = ()
        """Those whose tokens the policy has been given or has sampled."""
        self._tools: Tools = ()
        self._ended: str | None = None
        """The token at which the policy ended its last turn; None for one that was cut off."""

    def changed(self, messages: Sequence[Message], tools: Tools) -> str:
        """In which way the messages do not begin with those so far; empty where they do."""
        if not self.messages:
            return ""
        count = len(self.messages)
        for number, (known, given) in enumerate(zip(self.messages, messages, strict=False)):
            if not known.says(given):
                return f"message {number} ({given.role}) is not what it was, or what the policy said"
        if len(messages) <= count:
            return f"{len(messages)} messages came after {count} that the policy knows"
        if any(message.role == "assistant" for message in messages[count:]):
            return "an assistant's message is new that the policy has not written"
        return "" if list(tools) == list(self._tools) else "the tools are not those of the request before"

    def following(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The tokens between those so far and the policy's next turn, for messages that begin with those so far.

        Raises: EpisodeFailed when the chat template fails."""
        if not self.messages:
            self._refuse_lost_tools(messages, tools)
            return self._encoded(messages, tools, lambda text: text)
        new = messages[len(self.messages) :]
        return self._encoded([*self._frame(), *new], tools, self._after_the_turn)

    def add(self, messages: Sequence[Message], tools: Tools, turn: Message, ended: str | None) -> None:
        """The policy has answered `messages` with `turn`, which `ended` with that token, or was cut off."""
        self.messages, self._tools, self._ended = (*messages, turn), tools, ended

    def _frame(self) -> tuple[Message, Message]:
        """A question, and the last turn with its text left out. Some templates know one call a turn (Llama 3)."""
        question, turn = Message("user", "?"), replace(self.messages[-1], content=_MARK.format("-turn-"))
        if len(turn.tool_calls) > 1:
            try:
                self._render([question.for_template(), turn.for_template()], self._tools, prompts=False)
            except EpisodeFailed:
                turn = replace(turn, tool_calls=turn.tool_calls[:1])
        return question, turn

    def _after_the_turn(self, text: str) -> str:
        """What follows the turn of `_frame` in a rendered text: without its end, which the policy wrote."""
        alone = self._render([message.for_template() for message in self._frame()], self._tools, prompts=False)
        mark = _MARK.format("-turn-")
        turn, later = alone, text
        if mark in alone and mark in text:  # templates may leave it out beside tool calls, or treat what is before
            turn, later = (one.partition(mark)[2] for one in (alone, text))
        own = turn[: turn.rfind(self.end) + len(self.end)]
        if self.end not in turn or not later.startswith(own):
            raise EpisodeFailed("the chat template writes a turn in another way when a message follows it")
        if self._ended is None:
            return later[len(own) - len(self.end) :]
        # GLM ends a call with the token that opens its result.
        return later[len(own) :].removeprefix("" if self._ended == self.end else self._ended)

    def _refuse_lost_tools(self, messages: Sequence[Message], tools: Tools) -> None:
        if tools:
            with_tools, without = (self._render([m.for_template() for m in messages], some) for some in (tools, ()))
            if with_tools == without:
                raise EpisodeFailed(
                    f"the chat template of {self._tokenizer.name_or_path!r} does not show tools to the policy; use a "
                    "model that is trained with tools, or describe them in a message and read the calls out of the text"
                )

    def _encoded(self, messages: Sequence[Message], tools: Tools, part: Any) -> list[int]:
        """Token ids of a `part` of the rendered messages. No text in them becomes a special token."""
        quoted: dict[str, list[int]] = {}
        shown = []
        for message in messages:
            marked = replace(message, content=self._marked(message.content, quoted))
            if not self.messages:  # later ones are not new, or without calls
                marked = replace(marked, tool_calls=tuple(self._marked_call(c, quoted) for c in message.tool_calls))
            shown.append(marked.for_template())
        pieces = re.split(f"({_MARK.format('[0-9]+')})", part(self._render(shown, tools)))
        if not quoted.keys() <= {*pieces}:
            raise EpisodeFailed("a message contains a special token, and the chat template changes it; remove it")
        return [token for one in pieces for token in quoted.get(one) or encode(self._tokenizer, one)]

    def _marked(self, text: str, quoted: dict[str, list[int]]) -> str:
        """The text; if any of it would become a special token, what stands for it, and in `quoted` its tokens."""
        foreign = encode(self._tokenizer, text, is_foreign=True)
        if encode(self._tokenizer, text) == foreign:
            return text
        mark = _MARK.format(len(quoted))
        quoted[mark] = foreign
        return mark

    def _marked_call(self, call: ToolCall, quoted: dict[str, list[int]]) -> ToolCall:
        """With its texts as `_marked` has them."""

        def marked(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: marked(one) for key, one in value.items()}
            if isinstance(value, list):
                return [marked(one) for one in value]
            if not isinstance(value, str):
                return value
            text = json.dumps(without_surrogates(value), ensure_ascii=False)[1:-1]
            shown = self._marked(text, quoted)
            return value if shown == text else shown

        before = len(quoted)
        try:
            arguments = marked(call.parsed)
        except RecursionError:  # the template fails, too
            return call
        return call if len(quoted) == before else replace(call, arguments=json.dumps(arguments, ensure_ascii=False))

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Tools, prompts: bool = True) -> str:
        try:
            text = apply_template(self._tokenizer, messages, self._arguments, prompts, tools)
        except Exception as error:  # a template may raise anything
            raise EpisodeFailed(f"the chat template cannot be used for this: {first_line(error)}") from error
        return without_surrogates(str(text))  # the policy may have written one as an escape in a call


def further_ends(tokenizer: Any) -> tuple[str, ...]:
    """Tokens that end a turn besides the end of text, by the model's generation_config.json. Raises: ConfigError."""
    from cusearch_async.models import generation_config  # noqa: PLC0415  (transformers takes seconds to import)

    ids = generation_config(tokenizer.name_or_path).eos_token_id
    tokens = (tokenizer.decode([token]) for token in ([ids] if isinstance(ids, int) else ids or []))
    return tuple(token for token in tokens if token != tokenizer.eos_token)


def special_tokens(tokenizer: Any) -> frozenset[str]:
    """All of them; `all_special_tokens` are those with a role."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return frozenset((*added, *tokenizer.all_special_tokens))


def end_of_turn(tokenizer: Any, arguments: Arguments) -> str:
    """The first special token after an assistant's turn in the chat template, whether or not a message follows; empty
    where there is none, and a turn ends with a `stop` that the program asks for.

    Raises: ConfigError without a chat template."""
    name = getattr(tokenizer, "name_or_path", "the model")
    if not is_chat(tokenizer, arguments):
        raise ConfigError(f"an agent needs a chat model: {name!r} has no chat template, or it is not used")
    mark = _MARK.format("")
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
    try:
        last, followed = (
            apply_template(tokenizer, [*messages, *more], arguments)
            for more in ([], [{"role": "user", "content": "?"}])
        )
    except Exception as error:  # a template may raise anything
        raise ConfigError(f"the chat template of {name!r} cannot be used: {first_line(error)}") from error
    after, then = last.partition(mark)[2], followed.partition(mark)[2]
    ends = {token: then.find(token) for token in special_tokens(tokenizer) if token in after and token in then}
    return str(min(ends, key=lambda token: ends[token], default=""))
