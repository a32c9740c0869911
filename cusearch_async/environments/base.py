"""The interface of environments.

An environment writes the prompt, answers each turn of the policy, and scores the episode at its end. It works with
text. The runner converts text to tokens, keeps the policy's tokens as sampled, and masks everything else.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from cusearch_async.concurrency import CONTROL, in_daemon_thread
from cusearch_async.environments.templates import Quoted, Template
from cusearch_async.errors import ConfigError, EpisodeFailed, first_line
from cusearch_async.extensions import Settings
from cusearch_async.surrogates import without_surrogates
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
    """The text of the tokenizer's end-of-text token; a last turn may end with it."""
    opening: str = ""
    """The end of the prompt, after the question, from the chat template if there is one, else from the environment.
    The first turn may continue it, like `<think>`."""
    segments: list[Segment] = field(default_factory=list)
    """The policy's turns and the observations, in order, without the prompt."""
    depth: int = 0
    """Tool calls counted so far."""
    seed: int = 0
    """The random number of the current turn, 32 bits, for random choices of the environment."""
    memory: Any = None
    """Data of the environment."""


EMPTY = Quoted()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The environment's answer to a turn."""

    text: Quoted = EMPTY
    """Its text. If it is longer than episode.max_observation_tokens, the end of the quoted text is cut off."""
    author: str = "information"
    """The author of the segment: `information` for the result of a tool, `notice` for a correction, or your own
    name."""
    counts: bool = False
    """Whether the turn was a tool call that adds one to the episode's depth."""
    done: bool = False
    """Whether the episode is over. Then `text` is not used."""


DONE = Observation(done=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of an episode."""

    reward: float
    em: float = 0.0
    """1 for an exact match, else 0."""
    f1: float = 0.0
    """F1 of the answer, 0 to 1."""
    format_valid: bool = True
    prediction: str | None = None
    """The policy's answer; None if it gave none."""


Reward = Callable[[Episode, Score], float | Awaitable[float]]
"""A reward that replaces the environment's; it may be asynchronous, for example to ask a judge model. If it is not, it
is called in a thread, by several episodes at once. An error in it, and a result that is no finite number, fails the
episode, which is then retried."""


class Search(Protocol):
    async def search(self, query: str, seed: int, question: Question, ticket: int) -> list[str]:
        """Contents of the documents found, best first; empty when there are none.

        Raises: RetrievalUnavailable when the retriever fails, SearchRefused when it fails only this search."""
        ...


class NoSearch:
    """The search of a process that runs no episodes."""

    async def search(self, query: str, seed: int, question: Question, ticket: int) -> list[str]:
        raise RuntimeError("this process has no retriever")


class EnvironmentSettings(Settings):
    """An environment's own settings: keys of the config's [environment.LABEL], besides the shared ones."""


class Environment:
    """One environment of a run, in each process that runs episodes. Many episodes use it at the same time.

    In `step` and `score`, EpisodeFailed, SearchRefused and TimeoutError fail only this episode, and its ticket is
    requeued; any other error ends the worker."""

    Settings: ClassVar[type[EnvironmentSettings]] = EnvironmentSettings
    uses_retriever: ClassVar[bool] = False
    """Whether its episodes search. A run without such an environment needs no retriever."""
    needs_answers: ClassVar[bool] = False
    """Whether its score compares with gold answers: a question without any is refused then."""
    stops: ClassVar[tuple[str, ...]] = ()
    """A turn ends with the first of these texts that the policy writes, or with the end-of-text token."""

    def __init__(self, settings: Any, template: Template, search: Search, reward: Reward | None = None) -> None:
        if isinstance(self.stops, str):
            about = f"{type(self).__module__}:{type(self).__qualname__}.stops"
            raise ConfigError(f"{about} must be a tuple of texts, got {self.stops!r}; is a comma missing?")
        self.settings = settings
        self.template = template
        self.search = search
        self._reward = reward

    @classmethod
    def needs_retriever(cls, settings: Any) -> bool:
        """Whether its episodes search with these settings."""
        return cls.uses_retriever

    @classmethod
    def questions(cls) -> Sequence[Question] | None:
        """Its own questions; None when the config's `source` names them."""
        return None

    @property
    def fixed_texts(self) -> tuple[Quoted, ...]:
        """Its fixed text around observations, whose length is checked before any episode."""
        return ()

    def prompt(self, question: Question) -> Quoted:
        """The first message of an episode."""
        return self.template.prompt(question.text)

    def checked_prompt(self, question: Question) -> Quoted:
        """`prompt`. Raises: ConfigError when it gives anything but a Quoted."""
        prompt = self.prompt(question)
        if not isinstance(prompt, Quoted):
            raise ConfigError(f"{self._method('prompt')} must give a Quoted(before, text, after), got {prompt!r:.200}")
        return prompt

    async def step(self, episode: Episode, turn: str) -> Observation:
        """Answer a turn of the policy, the last of `episode.segments`. Not called after the last turn, number
        episode.s_max + 1."""
        raise NotImplementedError(f"{self._method('step')} is missing")

    async def checked_step(self, episode: Episode, turn: str) -> Observation:
        """`step`. Raises: ConfigError when it gives anything but an Observation; EpisodeFailed; all that it raises."""
        with _ending_one_episode(self._method("step")):
            found: Any = self.step(episode, turn)
            is_async = inspect.isawaitable(found)
            found = await found if is_async else found
        if not (is_async and isinstance(found, Observation) and isinstance(found.text, Quoted)):
            what = "an Observation whose text is a Quoted(before, text, after)"
            raise ConfigError(f"{self._method('step')} must be async and give {what}, got {found!r:.200}")
        return found

    async def score(self, episode: Episode) -> Score:
        """Score a finished episode. The reward must be finite, em 0 or 1, f1 from 0 to 1."""
        raise NotImplementedError(f"{self._method('score')} is missing")

    async def final_score(self, episode: Episode) -> Score:
        """The score of an episode, with the reward of the config if it names one.

        Raises: EpisodeFailed when that reward raises anything, or is no finite number, and for a score of the
        environment with other types than a trajectory can hold, or an em or f1 that is none."""
        with _ending_one_episode(self._method("score")):
            score, reward = self._plain(await self.score(episode)), self._reward
        if reward is None:
            return score
        name = f"the reward {getattr(reward, '__module__', '?')}:{getattr(reward, '__qualname__', reward)}"

        def called() -> float | Awaitable[float]:
            # within the thread: a StopIteration would not come out of it
            with _failing(name, "; make it async if it must not be called in a thread"):
                return reward(episode, score)

        with _ending_one_episode(name):
            given = called() if inspect.iscoroutinefunction(reward) else await in_daemon_thread(called)
            with _failing(name):
                number = float(await given if inspect.isawaitable(given) else given)
        if not math.isfinite(number):
            raise EpisodeFailed(f"{name} must give a finite number, got {number}")
        return replace(score, reward=number)

    def _method(self, name: str) -> str:
        """For messages."""
        return f"{type(self).__module__}:{type(self).__qualname__}.{name}()"

    def _plain(self, score: Score) -> Score:
        """`score` with numbers for bools and numpy's, as comparisons of answers give them."""
        about = self._method("score")
        try:
            numbers = {name: float(getattr(score, name)) for name in ("reward", "em", "f1")}
            valid, prediction = bool(score.format_valid), score.prediction
        except (AttributeError, TypeError, ValueError) as error:
            raise EpisodeFailed(f"{about} must give a Score of numbers, got {score!r:.200}") from error
        if numbers["em"] not in (0, 1) or not 0 <= numbers["f1"] <= 1:
            raise EpisodeFailed(f"{about} must give an em of 0 or 1 and an f1 from 0 to 1, got {score!r:.200}")
        if not (prediction is None or isinstance(prediction, str)):
            raise EpisodeFailed(f"{about} must give a text or None as its prediction, got {prediction!r:.200}")
        answer = None if prediction is None else without_surrogates(prediction)
        return Score(**numbers, format_valid=valid, prediction=answer)


@contextmanager
def _ending_one_episode(name: str) -> Iterator[None]:
    """A user's code, or a policy's that a tool runs, may not end the process, or leave without an error.

    Raises: EpisodeFailed."""
    try:
        yield
    except SystemExit as error:
        raise EpisodeFailed(f"{name} failed: SystemExit: {error}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # by us
            raise
        raise EpisodeFailed(f"{name} failed: CancelledError: it has cancelled itself") from error


@contextmanager
def _failing(name: str, if_of_threads: str = "") -> Iterator[None]:
    """A user's function may do anything. Raises: EpisodeFailed."""
    try:
        yield
    except (EpisodeFailed, *CONTROL):
        raise
    except BaseException as error:  # SystemExit, and what a library in Rust that panics raises
        why = f"{type(error).__name__}: {first_line(error)}"
        raise EpisodeFailed(f"{name} failed: {why}{if_of_threads if 'thread' in why else ''}") from error
