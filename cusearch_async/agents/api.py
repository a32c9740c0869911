"""What the three APIs for agents have in common: a request for a turn of the policy, the turn, and refusals.

What cannot be honoured exactly is refused by name: a policy that is trained must be the one that was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from cusearch_async.agents.conversation import Message, Tools
from cusearch_async.config import EpisodeConfig

MODEL = "policy"
IGNORES = "leave it out, or name it in environment.LABEL.ignores"
"""What to do about a field that is refused."""
MAX_BODY_BYTES = 16 << 20


class Refused(Exception):
    """A request that is answered with an error in the API's form."""

    def __init__(
        self, message: str, field: str | None = None, code: str = "invalid_request", status: int = 400
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "invalid_request_error", "param": field, "code": code}}


@dataclass(frozen=True, slots=True)
class TurnRequest:
    messages: tuple[Message, ...]
    tools: Tools
    max_tokens: int
    stops: tuple[str, ...]
    streams: bool
    ignored: tuple[str, ...] = ()
    """Fields that the request has, and that the run's config ignores."""
    streams_usage: bool = False
    """Chat Completions: whether the stream ends with the tokens' numbers."""
    is_first: bool = False
    """Whether the client says that it sends the request for the first time."""


@dataclass(frozen=True, slots=True)
class TurnReply:
    """One turn of the policy, for the program."""

    number: int
    """Of the turn in its episode."""
    message: Message
    finish_reason: str
    """As in Chat Completions: stop, length or tool_calls."""
    prompt_tokens: int
    sampled_tokens: int
    stopped: str | None = None
    """Which of the request's stops ended it."""


class Fields:
    """The fields of a request's body. Each is taken once; `request` refuses what is left."""

    def __init__(
        self,
        body: Any,
        without_effect: Sequence[str],
        fixed: Mapping[str, tuple[Any, ...]],
        ignores: Sequence[str] = (),
    ) -> None:
        """`without_effect` change nothing of what the policy says; `fixed` may have these values only; those that the
        run `ignores` may have any.

        Raises: Refused."""
        if not isinstance(body, dict):
            raise Refused("the body must be a JSON object")
        given = {key: value for key, value in body.items() if value is not None and key not in without_effect}
        self.ignored = tuple(key for key in given if key in ignores)
        self._given = {key: value for key, value in given.items() if key not in ignores}
        for field, allowed in fixed.items():
            value = self._given.pop(field, allowed[0])
            if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
                possible = " or ".join(map(json.dumps, allowed))
                raise Refused(f"{field} must be {possible}, got {json.dumps(value):.200}; {IGNORES}", field)

    def take(self, field: str, otherwise: Any = None) -> Any:
        return self._given.pop(field, otherwise)

    def take_temperature(self, settings: EpisodeConfig) -> None:
        """Raises: Refused when it is not the run's."""
        given = self.take("temperature", settings.temperature)
        if given != settings.temperature:
            text = f"temperature must be the run's, {settings.temperature:g} (episode.temperature), got {given!r:.200}"
            raise Refused(f"{text}; {IGNORES}", "temperature")

    def take_limit(self, names: Sequence[str], settings: EpisodeConfig) -> int:
        """The most tokens of the turn. Raises: Refused."""
        most = settings.max_turn_tokens
        for name in names:
            limit = self.take(name, most)
            if not isinstance(limit, int) or limit <= 0:
                raise Refused(f"{name} must be a positive number", name)
            most = min(most, limit)
        return most

    def take_stops(self, name: str) -> tuple[str, ...]:
        """Raises: Refused."""
        given = self.take(name, [])
        stops = (given,) if isinstance(given, str) else given
        if not isinstance(stops, list | tuple) or not all(isinstance(text, str) and text for text in stops):
            raise Refused(f"{name} must be a text or a list of texts", name)
        return tuple(stops)

    def request(
        self, messages: Sequence[Message], tools: Tools, settings: EpisodeConfig, limits: Sequence[str], stops: str = ""
    ) -> TurnRequest:
        """With what is left of the body: `limits` and `stops` are fields. Raises: Refused, also for any other field."""
        self.take_temperature(settings)
        _refuse_unreadable(tools)
        found = TurnRequest(
            messages=tuple(messages),
            tools=tools,
            max_tokens=self.take_limit(limits, settings),
            stops=self.take_stops(stops) if stops else (),
            streams=self.take("stream") is True,
            ignored=self.ignored,
        )
        if self._given:
            field = next(iter(self._given))
            also = "set model.chat_template instead, and " if field == "chat_template_kwargs" else ""
            raise Refused(f"{field:.200} is not supported here; {also}{IGNORES}", field[:200])
        return found


def _refuse_unreadable(tools: Tools) -> None:
    """Raises: Refused for a tool that no parser of calls could read."""
    for function in (tool["function"] for tool in tools):
        if not isinstance(function.get("parameters"), dict | None):
            raise Refused(f"tools: the parameters of {function['name']!r} must be an object, a JSON schema", "tools")
        if not isinstance(function.get("description"), str | None):
            raise Refused(f"tools: the description of {function['name']!r} must be a text", "tools")


def text_of(content: Any, field: str, kinds: Sequence[str] = ("text",), between: str = "\n") -> str:
    """The text in `content`, a text or parts of these `kinds`, each on a line as in vLLM's server. Raises: Refused."""
    parts = [{"type": kinds[0], "text": content}] if isinstance(content, str) else [] if content is None else content
    are_texts = isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str) for part in parts
    )
    if not are_texts:
        raise Refused(f"{field} must be a text, or parts of the type {' or '.join(kinds)}", field)
    text = between.join(part["text"] for part in parts)
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        raise Refused(f"{field} has an unpaired surrogate", field)
    return text


def text_in(block: Mapping[str, Any], name: str, place: str) -> str:
    """Raises: Refused."""
    value = block.get(name)
    if not isinstance(value, str):
        raise Refused(f"{place}.{name} must be a text", f"{place}.{name}")
    return value


def list_of(value: Any, name: str) -> list[Any]:
    """Raises: Refused."""
    if not isinstance(value, list) or not value:
        raise Refused(f"{name} must be a list with a message", name)
    return value


async def body_of(request: web.Request) -> Any:
    """Raises: Refused."""
    try:
        return await request.json()
    except (ValueError, RecursionError, LookupError, web.RequestPayloadError) as error:
        raise Refused("the body is not JSON") from error  # or of no known charset or encoding
    except web.HTTPRequestEntityTooLarge as error:
        raise Refused(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413) from error


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    return (f"event: {name}\n" if name else "").encode() + f"data: {json.dumps(data)}\n\n".encode()
