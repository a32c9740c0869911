"""The policy's turns in one episode of an agent, on rows that only grow."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry

from cusearch_async.agents.api import Refused, TurnReply, TurnRequest
from cusearch_async.agents.conversation import Conversation, Message, ToolCall, Tools
from cusearch_async.agents.parsing import Parsed, Parser
from cusearch_async.config import EpisodeConfig
from cusearch_async.environments import AgentEnvironment, Episode
from cusearch_async.errors import CusearchError, EpisodeFailed, first_line
from cusearch_async.lifecycle.signals import end_tasks
from cusearch_async.rollout.episode import Policy, Tape
from cusearch_async.rollout.limit import Limit
from cusearch_async.rollout.prompting import Arguments
from cusearch_async.streams import Stream, draw_number

MOST_REPEATED = 100
"""Times that a request is answered again."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatPolicy:
    """The policy behind its chat template: the same for all episodes."""

    policy: Policy
    tokenizer: Any
    settings: EpisodeConfig
    seed: int
    arguments: Arguments
    """Of the chat template."""
    parsers: Mapping[str, Parser]
    """Label of an environment -> how tool calls are written in it."""
    end: str
    """The template's `end_of_turn`."""
    further_ends: tuple[str, ...]
    """Other tokens at which the model ends its turns."""
    special: frozenset[str]
    """The tokenizer's special tokens."""
    told: set[str] = field(default_factory=set)

    def conversation(self) -> Conversation:
        return Conversation(self.tokenizer, self.arguments, self.end)

    def tell_once(self, text: str) -> None:
        if text not in self.told:
            self.told.add(text)
            log.info("%s", text)


@dataclass(slots=True)
class _Row:
    """One history of the program, and its newest request."""

    conversation: Conversation
    tape: Tape
    request: TurnRequest | None = None
    turn: asyncio.Future[TurnReply] | None = None
    number: int = -1
    """Of the newest turn in the episode."""
    repeated: int = 0
    """How often its newest request came again."""
    is_left: bool = False
    """Whether a client has gone that asked for its newest turn."""

    def is_answered(self, request: TurnRequest) -> bool:
        """Whether it is this row's newest request, sent again."""
        mine = self.request
        return mine is not None and _asked(mine) == _asked(request)


def _asked(request: TurnRequest) -> tuple[Any, ...]:
    """What an answer depends on."""
    return request.messages, list(request.tools), request.max_tokens, request.stops


class Turns:
    """The policy's turns in one episode.

    A request continues the row whose messages it begins with. Where it begins with those of none, because the program
    has changed its history, or asks two things at once, it begins a new row."""

    def __init__(
        self, chat: ChatPolicy, environment: AgentEnvironment, episode: Episode, temperature: float, limit: Limit
    ) -> None:
        self._chat = chat
        self._environment = environment
        self._episode = episode
        self._temperature = temperature
        self._limit = limit
        self.rows: list[_Row] = []
        self._begun = 0
        self.finished = 0
        self._uncounted: dict[int, tuple[set[str], int, str]] = {}
        """Turn -> the ids of those of its calls that count, its tokens, and its text."""
        self._given: set[str] = set()
        """The ids of all calls; others are the program's."""
        self.counted_tokens = 0
        self.began_at = time.monotonic()
        self.waited_s = 0.0
        """While at least one search was under way."""
        self._searches, self._searches_since, self._searched = 0, 0.0, 0
        self.ignored_fields = 0
        self.at_limit = ""
        """The limit of the episode at which the newest request was refused."""
        self.was_at_limit = False
        self._mistakes: set[int] = set()
        """Turns in which the policy did something wrong that no sound turn has followed."""
        self.outage: CusearchError | None = None
        """Why a turn or a search failed, unless the program is the reason."""
        self._has_ended = False

    @property
    def may_fail(self) -> bool:
        """Whether a program that fails may do so because of what the policy did."""
        return self.was_at_limit or bool(self._mistakes)

    async def ask(self, request: TurnRequest) -> TurnReply:
        """The policy's turn; the same one for a request that is sent again, as clients do when a connection was lost.
        It is sampled to its end though the client be gone.

        Raises: Refused at a limit of the episode, and after its end; EpisodeFailed; what the engine raises."""
        if self._has_ended:
            raise Refused("this session has ended", code="session_ended", status=409)
        for name in request.ignored:
            self._chat.tell_once(f"{self._environment.name} gives {name}, which is ignored (environment.LABEL.ignores)")
        row = self._answered(request) or self._row_for(request)
        if row.turn is None:
            row.request, row.turn = request, asyncio.ensure_future(self._sample(row, request))
        row.is_left = False
        try:
            return await asyncio.shield(row.turn)
        except asyncio.CancelledError:
            if not self._has_ended:
                row.is_left = True
                raise
            raise Refused("this session has ended", code="session_ended", status=409) from None

    def _answered(self, request: TurnRequest) -> _Row | None:
        """The row whose newest request it is, sent again; of several, one that a client has left. Raises: Refused for
        one that does not stop."""
        same = [] if request.is_first else [row for row in self.rows if row.is_answered(request)]
        row = max(same, key=lambda row: row.is_left, default=None)
        if row is not None:
            row.repeated += 1
            if row.repeated > MOST_REPEATED:
                raise Refused(f"the same request came {row.repeated} times; its answer does not change", status=429)
        return row

    def _row_for(self, request: TurnRequest) -> _Row:
        """The one with the longest history of those that the request continues, or a new one."""
        at_rest = [row for row in self.rows if row.turn is None or row.turn.done()]
        changed = {id(row): row.conversation.changed(request.messages, request.tools) for row in at_rest}
        continued = [row for row in at_rest if not changed[id(row)]]
        row = max(continued, key=lambda row: len(row.conversation.messages), default=None)
        if row is None:
            if at_rest:
                self._chat.tell_once(f"a new row begins: {changed[id(at_rest[-1])]}")
            row = _Row(self._chat.conversation(), Tape([], [], segments=self._episode.segments))
            self.rows.append(row)
        row.turn, row.repeated = None, 0
        return row

    async def _sample(self, row: _Row, request: TurnRequest) -> TurnReply:
        settings, tokenizer, episode = self._chat.settings, self._chat.tokenizer, self._episode
        self._refuse_huge(row, request)
        given = row.conversation.following(request.messages, request.tools)
        self._refuse_beyond_limits(row, len(given), request.max_tokens, settings)
        number = self._begun
        self._begun += 1
        earlier = set(self._mistakes)
        self.ignored_fields += len(request.ignored)
        drawn = draw_number(Stream.TURN, self._chat.seed, episode.ticket, episode.rollout, number)
        seed = drawn if self._temperature > 0 else None
        end = row.conversation.end or tokenizer.eos_token
        ends = dict.fromkeys(filter(None, (end, *self._chat.further_ends, tokenizer.eos_token)))
        stops = (*request.stops, *(token for token in ends if token != tokenizer.eos_token))
        prompt = row.tape.token_ids + given
        try:
            with self._limit.sampling():
                turn = await self._chat.policy.generate(prompt, request.max_tokens, self._temperature, seed, stops)
        except CusearchError as error:
            if not isinstance(error, EpisodeFailed):
                self.outage = error
            raise
        text = tokenizer.decode(turn.token_ids, skip_special_tokens=False)
        stopped = next((stop for stop in request.stops if stop in text), None)
        ended = next((token for token in ends if text.endswith(token)), "")
        is_cut = turn.is_cut and not ended and stopped is None
        said = text.removesuffix(ended) if ended in self._chat.special else text
        parsed = self._parsed(prompt, said.partition(stopped)[0] if stopped else said, request.tools)
        calls = tuple(ToolCall(f"call{number:03}{i:02}", *call) for i, call in enumerate(parsed.calls))
        if _is_mistaken(calls, request.tools, is_cut):
            self._mistakes.add(number)
        else:
            self._mistakes -= earlier
        self._take(row, request, given)
        row.number = number
        row.tape.add_turn(turn, text, is_cut and request.max_tokens >= settings.max_turn_tokens)  # not by the program
        self.finished += 1
        self._given |= {call.id for call in calls}
        message = Message("assistant", parsed.text, calls, thoughts=parsed.thoughts, stopped=stopped or "")
        counted = {call.id for call in calls if self._counts(call)}
        self._uncounted[number] = (counted, len(turn.token_ids), message.spoken)
        is_whole = ended in (end, *self._chat.further_ends)
        row.conversation.add(request.messages, request.tools, message, ended if is_whole else None)
        reason = "tool_calls" if calls else "length" if is_cut else "stop"
        return TurnReply(number, message, reason, len(prompt), len(turn.token_ids), stopped)

    def _parsed(self, prompt: Sequence[int], said: str, tools: Tools) -> Parsed:
        try:
            return self._chat.parsers[self._episode.question.environment](prompt, said, tools)
        except Exception as error:  # vLLM's raise what they like
            text = f"{type(error).__name__}: {first_line(error)}"
            self.outage = EpisodeFailed(f"what the policy wrote cannot be read: {text}")  # sampled, and on no tape
            raise self.outage from error

    def _counts(self, call: ToolCall) -> bool:
        names = self._environment.settings.tools
        return not names or call.name in names

    def _take(self, row: _Row, request: TurnRequest, given: list[int]) -> None:
        """Put what came before the turn on the tape. The turns whose results it has count; without tools, the one that
        it answers. A new row without results of known calls may hold them otherwise, unless an earlier row began with
        the same messages: all turns before count that called one; without tools, those whose text it has."""
        answered = _answered_calls(row, request) & self._given
        is_told_anew = not row.tape.logprobs and not answered and not self._has_been_told(row, request)
        shown = "\n".join(message.content for message in request.messages) if is_told_anew else ""
        for number, (calls, tokens, said) in list(self._uncounted.items()):
            is_told = calls or (said and said in shown and not request.tools)
            if calls & answered or (is_told and is_told_anew) or (number == row.number and not request.tools):
                self._episode.depth += 1
                self.counted_tokens += tokens
                del self._uncounted[number]
        if row is self.rows[0] and not row.tape.logprobs:
            row.tape.begin(given)
        else:
            text = self._chat.tokenizer.decode(given, skip_special_tokens=False)
            row.tape.add_environment("information", text, given)

    def _has_been_told(self, row: _Row, request: TurnRequest) -> bool:
        """Whether another row begins with its messages: it asks for another sample."""
        known = (one.conversation.messages[: len(request.messages)] for one in self.rows if one is not row)
        return request.messages in known

    def _refuse_huge(self, row: _Row, request: TurnRequest) -> None:
        """Before they are tokenised, which takes seconds for megabytes, and all other episodes wait for that."""
        known, most = len(row.conversation.messages), self._chat.settings.max_characters
        new = request.messages[known:]
        characters = sum(len(message.content) for message in new)
        characters += sum(len(call.arguments) for message in new for call in message.tool_calls)
        characters += 0 if known else _length(request.tools)
        if characters > most:
            self.at_limit, self.was_at_limit = f"the {most} characters of an episode's tokens", True
            text = f"the new messages have {characters} characters, more than the tokens of an episode can ({most})"
            raise Refused(text, "messages", "context_length_exceeded")

    def _refuse_beyond_limits(self, row: _Row, length: int, most: int, settings: EpisodeConfig) -> None:
        self.at_limit = ""
        limits = {"is left of the row": settings.max_tokens - most - len(row.tape.token_ids)}
        if row.tape.logprobs:
            limits["episode.max_observation_tokens"] = settings.max_observation_tokens
        elif row is self.rows[0]:
            limits["episode.max_prompt_tokens"] = settings.max_prompt_tokens
        name = min(limits, key=lambda name: limits[name])
        if self._begun > settings.s_max:
            turns = f"{settings.s_max + 1} turns (episode.s_max)"
            self.at_limit, self.was_at_limit = turns, True
            raise Refused(f"the episode has had its {turns}", code="turn_limit")
        if length > limits[name]:
            is_rows = name == "is left of the row"
            self.at_limit = f"the {settings.max_tokens} tokens of a row" if is_rows else f"{name} ({limits[name]})"
            self.was_at_limit = True
            text = f"the new messages take {length} tokens, more than {name} ({limits[name]})"
            raise Refused(text, "messages", "context_length_exceeded")

    async def search(self, query: str) -> list[str]:
        if not self._searches:
            self._searches_since = time.monotonic()
        self._searches += 1
        episode, number = self._episode, self._searched
        self._searched += 1
        seed = draw_number(Stream.SEARCH, self._chat.seed, episode.ticket, episode.rollout, number)
        try:
            if not self._environment.settings.searches:
                raise EpisodeFailed("environment.LABEL.searches is false, so that there is no retriever to ask")
            return await self._environment.search.search(query, seed, episode.question, episode.ticket)
        except CusearchError as error:
            self.outage = error
            raise
        finally:
            self._searches -= 1
            if not self._searches:
                self.waited_s += time.monotonic() - self._searches_since

    async def end(self) -> None:
        """No turn is sampled any more."""
        self._has_ended = True
        turns = [row.turn for row in self.rows if row.turn is not None]
        await end_tasks(turns)
        for turn in turns:
            if not turn.cancelled():
                turn.exception()  # it has been told to whoever asked


def _length(tools: Tools) -> int:
    """Characters of their JSON. Raises: Refused."""
    try:
        return len(json.dumps(list(tools), ensure_ascii=False))
    except RecursionError as error:
        raise Refused("tools are nested too deeply", "tools") from error


def _answered_calls(row: _Row, request: TurnRequest) -> set[str]:
    """The ids of calls whose results the request has. Results of the newest turn may have ids that the program gave its
    calls, or none: then they are in the order of the calls."""
    answered = {message.tool_call_id for message in request.messages if message.role == "tool"}
    known = len(row.conversation.messages)
    if not row.tape.logprobs or not known:
        return answered
    calls, told = row.conversation.messages[-1].tool_calls, request.messages[known - 1].tool_calls
    results = [message.tool_call_id for message in request.messages[known:] if message.role == "tool"]
    by_place = zip(calls, [id_ for id_ in results if not id_], strict=False)
    named = {theirs.id: ours.id for ours, theirs in zip(calls, told, strict=False)}
    return answered | {named[id_] for id_ in results if id_ in named} | {call.id for call, _ in by_place}


def _is_mistaken(calls: Sequence[ToolCall], tools: Tools, is_cut: bool) -> bool:
    """Whether a program may fail at what the policy wrote: a turn that was cut, or a call that no tool can take."""
    if is_cut and not calls:
        return True
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    for call in calls:
        if call.name not in schemas or not isinstance(call.parsed, dict):
            return True
        if not _fit(call.parsed, schemas[call.name]):
            return True
    return False


def _fit(arguments: Mapping[str, Any], schema: Any) -> bool:
    """Whether a tool's JSON schema allows these arguments. One that is wrong, or refers to what is not in it, allows
    all; nothing is fetched."""
    try:
        return bool(_validator(json.dumps(schema)).is_valid(arguments))
    except Exception:  # the program's schema may be anything
        return True


@functools.lru_cache(1024)
def _validator(schema: str) -> Draft202012Validator:
    """Raises: SchemaError."""
    given = json.loads(schema)
    Draft202012Validator.check_schema(given)
    return Draft202012Validator(given, registry=Registry())
