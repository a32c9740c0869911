"""The environment of agents: a program of the user's asks the policy through an OpenAI-compatible address."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from cusearch_async.algorithm.answers import Metric, exact_match, f1_score
from cusearch_async.environments.base import Environment, EnvironmentSettings, Episode, Reward, Score, Search
from cusearch_async.environments.program import run_program
from cusearch_async.environments.task import Ending, Task
from cusearch_async.environments.templates import PLACE, Template
from cusearch_async.errors import ConfigError
from cusearch_async.extensions import Names, load_function, refuse_unsplit

Agent = Callable[[Task], Awaitable[str | float | Ending | None]]
"""Returns its answer, or a reward; None when it has no answer. What it raises fails the episode."""


class AgentSettings(EnvironmentSettings):
    agent: str = ""
    """agent: your program, an async function (`package.module:function`) that gets an
    `environments.task.Task`."""
    command: Names = ()
    """agent: instead, a program and its arguments, started for every episode. The last line that it writes is its
    answer."""
    passes: Names = ()
    """agent: variables that `command` inherits though they look like secrets (…_TOKEN, …_API_KEY, AWS_…); `launch`
    starts workers without some of them otherwise, for a function, too"""
    remote: str = ""
    """agent: instead, the address at which programs that run elsewhere ask for episodes, like http://10.0.0.5:9000;
    workers of one machine take ports from there on, the evaluator (eval.every) the port before."""
    silence_s: float = Field(120.0, gt=0)
    """agent: an episode that a program elsewhere has taken fails when the program asks for nothing for so long."""
    tools: Names = ()
    """agent: tools whose results count in the depth; empty: all."""
    parser: str = "hermes"
    """agent: how the policy writes tool calls, by the name of vLLM's parser: hermes, llama3_json, mistral, …"""
    reasoning_parser: str = ""
    """agent: how the policy writes its thoughts, by the name of vLLM's parser: qwen3, deepseek_r1, …; empty: as text"""
    ignores: Names = ()
    """agent: fields of requests that are ignored, where they would be refused: `temperature`, `tool_choice`, …"""
    searches: bool = True
    """agent: whether your program asks the run's retriever; false: the agent needs none"""
    metric: Metric = "squad"
    """agent: how answers are compared, as in the environment search."""

    @field_validator("remote")
    @classmethod
    def _without_slash(cls, address: str) -> str:
        """All environments of a run have the same."""
        return address.rstrip("/")

    @field_validator("command")
    @classmethod
    def _is_split(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        refuse_unsplit(words, "python,program.py")
        return words


class AgentEnvironment(Environment):
    """Questions that a program answers with the policy's help. Depth is the number of turns that asked for a tool and
    were given a result; without tools, of those that the program answered."""

    Settings = AgentSettings
    settings: AgentSettings

    def __init__(self, settings: Any, template: Template, search: Search, reward: Reward | None = None) -> None:
        """Raises: ConfigError when there is no agent, or it is no async function."""
        super().__init__(settings, Template(PLACE, notice=""), search, reward)  # the program writes the prompt
        function, command, remote = self.settings.agent, self.settings.command, self.settings.remote
        if sum(map(bool, (function, command, remote))) != 1:
            raise ConfigError(
                "the environment agent needs one of its settings agent, your function (package.module:function), "
                f"command, your program, and remote, an address; got {function!r}, {list(command)} and {remote!r}"
            )
        if remote:
            _check_address(remote)
        self.name = f"the agent {function or command[0]}" if not remote else f"an agent at {remote}"
        self.agent: Agent | None = functools.partial(run_program, command, self.settings.passes) if command else None
        """None: programs elsewhere ask for their episodes."""
        if function:
            self.agent = load_function("environment.LABEL.agent", function)
            if not inspect.iscoroutinefunction(self.agent):
                raise ConfigError(f"environment.LABEL.agent: {function!r} must be an async function")

    @classmethod
    def needs_retriever(cls, settings: Any) -> bool:
        return bool(settings.searches)

    async def score(self, episode: Episode) -> Score:
        """Of what the agent returned (`episode.memory`): an answer's reward is its F1. A number is the reward, and
        counts as an exact match from 1."""
        result, answers, metric = episode.memory, episode.question.answers, self.settings.metric
        if result is None:
            return Score(reward=0.0, format_valid=False)
        if not isinstance(result, str):
            return Score(reward=float(result), em=float(result >= 1))
        f1 = f1_score(result, answers, metric)
        return Score(reward=f1, em=exact_match(result, answers, metric), f1=f1, prediction=result)


def _check_address(url: str) -> None:
    """Raises: ConfigError."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme == "http" and bool(parts.hostname) and bool(parts.port) and parts.path in ("", "/")
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"environment.LABEL.remote: {url!r} must look like http://10.0.0.5:9000")
