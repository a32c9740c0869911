"""Runs the episodes of agents: a user's program asks, and what the policy was given and said becomes a trajectory."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from numbers import Real
from typing import Any

from cusearch_async.agents import blocking
from cusearch_async.agents.api import MODEL
from cusearch_async.agents.conversation import end_of_turn, further_ends, special_tokens
from cusearch_async.agents.gateway import Gateway, Session
from cusearch_async.agents.parsing import parser_of
from cusearch_async.agents.remote import Remote
from cusearch_async.agents.turns import ChatPolicy, Turns
from cusearch_async.concurrency import CONTROL, DaemonThreads
from cusearch_async.config import EpisodeConfig, agents_token
from cusearch_async.environments import AgentEnvironment, Environment, Episode
from cusearch_async.environments.task import Ending, Task
from cusearch_async.errors import EpisodeFailed, first_line
from cusearch_async.rollout import prompting
from cusearch_async.rollout.episode import EpisodeRunner, Policy, with_own_metadata
from cusearch_async.rollout.limit import Limit
from cusearch_async.surrogates import without_surrogates
from cusearch_async.types import Question, Trajectory

log = logging.getLogger(__name__)

MOST_CHARACTERS = 2**16
"""Of an answer, and of the end of stderr: they are stored with the trajectory."""
_in_program = ContextVar("in a program of the user's", default=False)
ATTEMPTS, END_S = 5, 3.0
"""So often is a program cancelled that does not end, and so long waited for each time."""


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
        is_evaluator: bool = False,
    ) -> None:
        """The evaluator's episodes for programs elsewhere are at the port before the workers'.

        Raises: ConfigError as EpisodeRunner, and when the model is no chat model, a parser does not exist, or remote
        agents have no token."""
        super().__init__(policy, environments, tokenizer, settings, seed, template_arguments)
        agents = {label: one.settings for label, one in environments.items() if isinstance(one, AgentEnvironment)}
        addresses = {own.remote for own in agents.values() if own.remote}
        self._prepared: asyncio.AbstractEventLoop | None = None
        self._endings: set[asyncio.Future[None]] = set()
        self._functions = [one.name for one in environments.values() if isinstance(one, AgentEnvironment) and one.agent]
        self.limits_met: set[str] = set()
        """Limits of an episode at which one has ended without an answer."""
        self._remote = Remote(agents_token()) if addresses else None
        self._gateway = Gateway(settings, next(iter(addresses), ""), self._remote, -1 if is_evaluator else 0)
        parsers = {label: parser_of(label, own, tokenizer, template_arguments) for label, own in agents.items()}
        end = end_of_turn(tokenizer, template_arguments) if agents else ""
        further = further_ends(tokenizer) if agents else ()
        special = special_tokens(tokenizer) if agents else frozenset()
        self.chat = ChatPolicy(policy, tokenizer, settings, seed, template_arguments, parsers, end, further, special)

    def _prepare(self, loop: asyncio.AbstractEventLoop) -> None:
        """Once: a thread for each call, as what else runs in threads must not wait for programs that wait there; tasks
        that may exit; and a watch on programs that block the loop."""
        if self._prepared is not loop:
            self._prepared = loop
            loop.set_default_executor(DaemonThreads())
            loop.set_task_factory(_make_task)
            if self._functions:
                blocking.watch(loop, " or ".join(self._functions))

    async def close(self) -> None:
        """Listen no more, for programs elsewhere either."""
        await self._gateway.close()

    async def run(
        self, question: Question, ticket: int, rollout: int, worker: str, temperature: float | None = None
    ) -> Trajectory:
        environment = self._environments[question.environment]
        self._prepare(asyncio.get_running_loop())
        if not isinstance(environment, AgentEnvironment):
            return await super().run(question, ticket, rollout, worker, temperature)
        question = with_own_metadata(question)
        episode = Episode(question=question, ticket=ticket, rollout=rollout)
        temperature = self.settings.temperature if temperature is None else temperature
        limit = Limit(self.settings.timeout_s)
        turns = Turns(self.chat, environment, episode, temperature, limit)
        async with self._gateway.session(turns.ask, turns.search, environment.settings.ignores) as (session, url, key):
            task = Task(
                question=question.text,
                question_id=question.id,
                base_url=f"{url}/v1",
                api_key=key,
                model=MODEL,
                environment=question.environment,
                metadata=question.metadata,
                search=turns.search,
                search_url=f"{url}/search",
            )
            ending = await self._ending(environment, task, session, turns, limit)
        if turns.finished == 0:
            raise EpisodeFailed(f"{environment.name} ended without asking the policy{session.refused}")
        episode.memory = ending.result
        async with Limit(self.settings.timeout_s) as scoring:
            scoring.begin()
            score = await environment.final_score(episode)
        rows = [row.tape for row in turns.rows if row.tape.logprobs]
        found = self._trajectory(episode, rows, score, worker, turns.began_at, turns.waited_s, turns.counted_tokens)
        stderr = without_surrogates(ending.stderr)[-MOST_CHARACTERS:]
        return replace(found, stderr=stderr, ignored_fields=turns.ignored_fields)

    async def _ending(
        self, environment: AgentEnvironment, task: Task, session: Session, turns: Turns, limit: Limit
    ) -> Ending:
        """What the agent returned. Without a result after a limit of the episode, whatever it does about that, and
        where it fails after one, or after a mistake of the policy's."""
        name, silence_s = environment.name, environment.settings.silence_s

        def begin() -> None:
            session.heard_at = turns.began_at = time.monotonic()
            limit.begin()

        def silence() -> str:
            if session.silent_s < silence_s:
                return ""
            return f"the program has asked for nothing for {silence_s:g} s (environment.LABEL.silence_s)"

        if environment.agent is None:
            assert self._remote is not None
            program = asyncio.ensure_future(_outcome(self._remote.agent, task, begin, silence))
        else:
            program = asyncio.ensure_future(_outcome(environment.agent, task))
        try:
            with suppress(TimeoutError):
                async with limit:
                    if environment.agent is not None:
                        begin()
                    await asyncio.wait({program})
        finally:
            await self._end_whole(turns, program, name)
        returned, failed = None, None
        if limit.has_expired:
            failed = EpisodeFailed(f"{name} took longer than episode.timeout_s ({self.settings.timeout_s:g} s)")
        elif program.cancelled():
            failed = EpisodeFailed(f"{name} failed: CancelledError: it has cancelled itself")
        elif isinstance(returned := program.result(), BaseException):
            why = f"{type(returned).__name__}: {first_line(returned)}"
            refused = "" if session.refusal in why else session.refused
            failed = EpisodeFailed(f"{name} failed: {why}{refused}")
            failed.__cause__ = returned
        if turns.outage is not None:  # whatever the program made of it
            raise turns.outage
        ending = returned if isinstance(returned, Ending) else Ending(None if failed else returned)
        if not isinstance(ending.stderr, str):
            raise EpisodeFailed(f"{name} must give its stderr as a text, got {ending.stderr!r:.100}")
        is_the_policys = turns.may_fail and not limit.has_expired
        if turns.at_limit:
            self._tell_of_limit(name, turns.at_limit)
        if turns.at_limit or (failed is not None and is_the_policys):
            return Ending(None, ending.stderr if failed is None else str(failed))
        if failed is not None:
            raise failed
        return replace(ending, result=_checked(ending.result, name))

    async def _end_whole(self, turns: Turns, program: asyncio.Future[Any], name: str) -> None:
        """Also where the episode is cancelled again meanwhile, which then waits for it no longer."""

        async def end() -> None:
            await turns.end()
            await _end(program, name)

        task = asyncio.ensure_future(end())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        await asyncio.shield(task)

    def _tell_of_limit(self, name: str, limit: str) -> None:
        if limit not in self.limits_met:
            self.limits_met.add(limit)
            log.warning("%s asked for more than %s: its episode ended without an answer, as others will", name, limit)


def _checked(result: object, name: str) -> str | float | None:
    """Raises: EpisodeFailed."""
    if isinstance(result, str):
        if len(result) > MOST_CHARACTERS:
            raise EpisodeFailed(f"{name} returned an answer of {len(result)} characters, more than {MOST_CHARACTERS}")
        return without_surrogates(result)
    with suppress(OverflowError):
        if result is None:
            return None
        if isinstance(result, Real) and math.isfinite(result):  # numpy's numbers, too
            return float(result)
    raise EpisodeFailed(f"{name} must return a text, a finite number or None, got {result!r:.100}")


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """A task begun by a program may exit, too: asyncio would end the whole loop."""
    if not (_in_program.get() and asyncio.iscoroutine(work)):
        return asyncio.Task(work, loop=loop, **options)
    task = asyncio.Task(_contained(work), loop=loop, **options)
    task.add_done_callback(lambda _: work.close())  # it is not begun where the task is cancelled before
    return task


async def _contained(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await work
    except SystemExit as error:
        raise EpisodeFailed(f"SystemExit: {error}") from error


async def _outcome(program: Callable[..., Awaitable[Any]], *given: Any) -> Any:
    """What it returns, or the error with which it ends; a user's program may raise anything."""
    _in_program.set(True)
    try:
        return await program(*given)
    except CONTROL:
        raise
    except BaseException as error:  # SystemExit, and what a library in Rust that panics raises
        return error


async def _end(program: asyncio.Future[Any], name: str) -> None:
    """Cancel it, again where it continues; it may have a process to end first."""
    for _ in range(ATTEMPTS):
        if program.done():
            return
        program.cancel()
        await asyncio.wait({program}, timeout=END_S)
    if not program.done():
        log.warning("%s does not end though it is cancelled; it is left alone", name)
