"""What an environment is: the world that an episode is played in.

An environment poses a question, answers each turn of the policy, and scores the episode when it is over. It works with
text; the player turns text into tokens, keeps the policy's own tokens as they were sampled, and masks everything else.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from cusearch_async.environments.templates import Quoted, Template
from cusearch_async.types import Question, Segment


@dataclass(slots=True, kw_only=True)
class Episode:
    """An episode so far, as its environment sees it."""

    question: Question
    ticket: int
    """Its group."""
    rollout: int
    """Its index in the group."""
    end_of_text: str = ""
    """What the tokenizer's end-of-text token spells; a last turn may end with it."""
    segments: list[Segment] = field(default_factory=list)
    """The policy's turns and the observations, in order, without the prompt."""
    depth: int = 0
    """Tool calls that were counted."""
    draw: int = 0
    """The random number of the current turn, 32 bits, for whatever the environment draws."""
    memory: Any = None
    """The environment's own."""


SILENCE = Quoted()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an environment answers to a turn."""

    said: Quoted = SILENCE
    """At most episode.max_observation_tokens; what is too long is cut at the end of the quoted text."""
    author: str = "information"
    """Whose segment it is: `information` for the result of a tool, `notice` for a correction, or a name of your own."""
    counts: bool = False
    """Whether the turn was a tool call that adds one to the episode's depth."""
    ends: bool = False
    """Whether the episode is over. Nothing is said then."""


ENDS = Observation(ends=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How an episode fared."""

    reward: float
    em: float = 0.0
    """1 for an exactly right answer, else 0."""
    f1: float = 0.0
    """How much of the answer is right, 0 to 1."""
    format_valid: bool = True
    prediction: str | None = None
    """What the policy answered; None if it never did."""


Reward = Callable[[Episode, Score], float | Awaitable[float]]
"""A reward in place of the environment's own; it may be asynchronous, so that a judge model can give it."""


class Search(Protocol):
    async def search(self, query: str, draw: int, question: Question, ticket: int) -> list[str]:
        """Contents of the documents found, best first; empty when there are none.

        Raises: RetrievalUnavailable when the retriever fails, SearchRefused when it fails this search alone."""
        ...


class NoSearch:
    """Of a process that plays no episodes."""

    async def search(self, query: str, draw: int, question: Question, ticket: int) -> list[str]:
        raise RuntimeError("this process has no retriever")


class EnvironmentSettings(BaseModel):
    """An environment's own settings: keys of the config's [environment.LABEL], beside those that all share."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Environment:
    """One environment of a run, made once per process; many episodes are played in it at once.

    In `step` and `score`, EpisodeFailed fails this episode alone and its ticket is tried again; any other error ends
    the worker."""

    Settings: ClassVar[type[EnvironmentSettings]] = EnvironmentSettings
    uses_retriever: ClassVar[bool] = False
    """Whether its episodes search; if none of a run does, the run needs no retriever."""
    stops: ClassVar[tuple[str, ...]] = ()
    """A turn ends with the first of these that the policy writes, or with its end-of-text token."""
    frames: ClassVar[tuple[Quoted, ...]] = ()
    """What it says around observations, so that their room can be checked before anything is played."""

    def __init__(self, settings: Any, template: Template, search: Search, reward: Reward | None = None) -> None:
        self.settings = settings
        self.template = template
        self.search = search
        self._reward = reward

    @classmethod
    def questions(cls) -> Sequence[Question] | None:
        """Questions of its own; None where the config's `source` names them."""
        return None

    def prompt(self, question: Question) -> Quoted:
        """The first message of an episode."""
        return self.template.prompt(question.text)

    async def step(self, episode: Episode, turn: str) -> Observation:
        """Answer a turn of the policy, the last of `episode.segments`. Not asked after the last turn, number
        episode.s_max + 1."""
        raise NotImplementedError

    async def score(self, episode: Episode) -> Score:
        """Judge an episode that is over. The reward must be finite."""
        raise NotImplementedError

    async def judge(self, episode: Episode) -> Score:
        """Its score, with the reward that the config has put in place of its own."""
        score = await self.score(episode)
        if self._reward is None:
            return score
        reward = self._reward(episode, score)
        return replace(score, reward=float(await reward if inspect.isawaitable(reward) else reward))
