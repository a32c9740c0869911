"""Runs the episodes of agents: a user's program asks, and what the policy was given and said becomes a trajectory."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cusearch_async.agents.chat import ChatReply, ChatRequest, Refused, tool_results
from cusearch_async.agents.conversation import Conversation, Message, ToolCall, Tools, end_of_turn
from cusearch_async.agents.gateway import MODEL, Gateway, Session
from cusearch_async.agents.parsing import Parsed, Parser, parser_of
from cusearch_async.config import EpisodeConfig
from cusearch_async.environments import AgentEnvironment, Environment, Episode
from cusearch_async.environments.task import Task
from cusearch_async.errors import CusearchError, EpisodeFailed, RetrievalError, first_line
from cusearch_async.rollout import prompting
from cusearch_async.rollout.episode import EpisodeRunner, Policy, Tape
from cusearch_async.streams import Stream, draw_number
from cusearch_async.types import Question, Trajectory


class AgentRunner(EpisodeRunner):
    """Also runs agents; other environments as EpisodeRunner."""

    def __init__(
        self,
        policy: Policy,
        environments: Mapping[str, Environment],
        tokenizer: Any,
        settings: EpisodeConfig,
        seed: int,
        template_arguments: prompting.Arguments = prompting.NO_ARGUMENTS,
    ) -> None:
        """Raises: ConfigError as EpisodeRunner, and when the model is no chat model or a parser does not exist."""
        super().__init__(policy, environments, tokenizer, settings, seed, template_arguments)
        self._gateway = Gateway(settings)
        self.parsers: dict[str, Parser] = {}
        for label, environment in environments.items():
            if isinstance(environment, AgentEnvironment):
                self._end = end_of_turn(tokenizer, template_arguments)
                key = f"environment.{label}.parser"
                self.parsers[label] = parser_of(key, environment.settings.parser, tokenizer)

    async def run(
        self, question: Question, ticket: int, rollout: int, worker: str, temperature: float | None = None
    ) -> Trajectory:
        environment = self._environments[question.environment]
        if not isinstance(environment, AgentEnvironment):
            return await super().run(question, ticket, rollout, worker, temperature)
        started = time.monotonic()
        tape = Tape([], [])
        episode = Episode(question=question, ticket=ticket, rollout=rollout, segments=tape.segments)
        temperature = self.settings.temperature if temperature is None else temperature
        conversation = Conversation(self.tokenizer, self._template_arguments, self._end)
        turns = _Turns(self, environment, episode, tape, conversation, temperature)
        async with self._gateway.session(turns.answer, turns.search) as (session, url, key):
            task = Task(
                question=question.text,
                question_id=question.id,
                base_url=f"{url}/v1",
                api_key=key,
                model=MODEL,
                search=turns.search,
                search_url=f"{url}/search",
            )
            episode.memory = await self._result(environment, task, session, turns)
        if not tape.logprobs:
            raise EpisodeFailed(f"{environment.name} ended without asking the policy{session.refused}")
        score = await environment.final_score(episode)
        return self._trajectory(episode, tape, score, worker, started, turns.waited_s, turns.counted_tokens)

    async def _result(
        self, environment: AgentEnvironment, task: Task, session: Session, turns: _Turns
    ) -> str | float | None:
        """What the agent returned. None after a limit of the episode, whatever it does about that."""
        limit_s, failed = self.settings.timeout_s, None
        result: str | float | None = None
        try:
            async with asyncio.timeout(limit_s):
                result = await environment.agent(task)
        except TimeoutError as error:
            failed = EpisodeFailed(f"{environment.name} took longer than episode.timeout_s ({limit_s:g} s)")
            failed.__cause__ = error
        except Exception as error:  # a user's program may raise anything
            text = f"{environment.name} failed: {type(error).__name__}: {first_line(error)}{session.refused}"
            failed = EpisodeFailed(text)
            failed.__cause__ = error
        if outage := turns.outage or session.outage():  # whatever the program made of it
            raise outage
        if turns.reached_limit:
            return None
        if failed is not None:
            raise failed
        is_number = isinstance(result, float | int) and math.isfinite(result)
        if not (result is None or isinstance(result, str) or is_number):
            raise EpisodeFailed(f"{environment.name} must return a text, a finite number or None, got {result!r:.100}")
        return result


@dataclass(slots=True)
class _Turns:
    """The policy's turns in one episode."""

    runner: AgentRunner
    environment: AgentEnvironment
    episode: Episode
    tape: Tape
    conversation: Conversation
    temperature: float
    counted_tokens: int = 0
    waited_s: float = 0.0
    reached_limit: bool = False
    outage: CusearchError | None = None
    """Why a search failed."""
    calls: tuple[ToolCall, ...] = field(default=())
    """Of the newest turn."""

    async def answer(self, request: ChatRequest) -> ChatReply:
        """Raises: Refused at a limit of the episode; EpisodeFailed."""
        settings, tokenizer, number = self.runner.settings, self.runner.tokenizer, len(self.tape.logprobs)
        given = self.conversation.following(request.messages, request.tools)
        self._refuse_beyond_limits(len(given), number, settings)
        self.episode.seed = draw_number(
            Stream.TURN, self.runner.seed, self.episode.ticket, self.episode.rollout, number
        )
        seed = self.episode.seed if self.temperature > 0 else None
        prompt = self.tape.token_ids + given
        end_stops = () if self.conversation.end in ("", tokenizer.eos_token) else (self.conversation.end,)
        stops = (*request.stops, *end_stops)
        turn = await self.runner.policy.generate(prompt, request.max_tokens, self.temperature, seed, stops)
        text = tokenizer.decode(turn.token_ids, skip_special_tokens=False)
        end = self.conversation.end or tokenizer.eos_token
        stopped = next((stop for stop in request.stops if stop in text), None)
        is_whole = text.endswith(end)
        is_cut = turn.is_cut and not is_whole and stopped is None
        said = text.removesuffix(end)
        content, calls = self._parsed(said.partition(stopped)[0] if stopped else said, request.tools)
        self._count(request, given, tokenizer)
        self.tape.add_turn(turn, text, is_cut)
        self.calls = tuple(ToolCall(f"call_{number}_{i}", *call) for i, call in enumerate(calls))
        message = Message("assistant", content, self.calls)
        self.conversation.add(request.messages, request.tools, message, is_open=not is_whole)
        reason = "tool_calls" if calls else "length" if is_cut else "stop"
        return ChatReply(f"chatcmpl-{number}", message, reason, len(prompt), len(turn.token_ids))

    def _parsed(self, said: str, tools: Tools) -> Parsed:
        if not tools:
            return said, ()
        try:
            return self.runner.parsers[self.episode.question.environment](said, tools)
        except Exception as error:  # vLLM's raise what they like
            text = f"{type(error).__name__}: {first_line(error)}"
            raise EpisodeFailed(f"the policy's tool calls cannot be read: {text}") from error

    def _count(self, request: ChatRequest, given: list[int], tokenizer: Any) -> None:
        """Put what came before the turn on the tape; a turn whose result it is counts."""
        if not self.tape.logprobs:
            self.tape.begin(given)
            return
        new = request.messages[len(self.conversation.messages) :]
        names = self.environment.settings.tools
        if not request.tools or tool_results(new, names, self.calls):
            self.episode.depth += 1
            self.counted_tokens += len(self.tape.logprobs[-1])
        self.tape.add_environment("information", tokenizer.decode(given, skip_special_tokens=False), given)

    def _refuse_beyond_limits(self, length: int, number: int, settings: EpisodeConfig) -> None:
        limit, name = settings.max_observation_tokens, "episode.max_observation_tokens"
        if number == 0:
            limit, name = settings.max_prompt_tokens, "episode.max_prompt_tokens"
        self.reached_limit = True
        if number > settings.s_max:
            raise Refused(f"the episode has had its {settings.s_max + 1} turns (episode.s_max)", code="turn_limit")
        if length > limit:
            text = f"the new messages take {length} tokens, more than {name} ({limit})"
            raise Refused(text, "messages", "context_length_exceeded")
        self.reached_limit = False

    async def search(self, query: str) -> list[str]:
        before = time.monotonic()
        try:
            episode = self.episode
            return await self.environment.search.search(query, episode.seed, episode.question, episode.ticket)
        except RetrievalError as error:
            self.outage = error
            raise
        finally:
            self.waited_s += time.monotonic() - before
