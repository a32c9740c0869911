"""Demonstrations: episodes that a policy learns from before reinforcement learning, as trajectories of the run.

A written one is a row of a question file with two more columns: `turns`, what the policy writes in each turn, and
`documents`, what each of its searches finds. It is rolled out like any episode, with the text in place of the policy
and the documents in place of the retriever, so that prompt, tokens and mask are those that a rollout worker makes. An
exported one (`cusearch buffer export`, a recorded step) has its tokens already.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from cusearch_async.agents.episode import AgentRunner
from cusearch_async.config import Config
from cusearch_async.data.columns import read_literal
from cusearch_async.data.files import Row, locate, read_rows
from cusearch_async.data.questions import load_run_questions, needs_answers
from cusearch_async.data.rows import Origin, origin_of, parse_row
from cusearch_async.environments import AgentEnvironment, Environment
from cusearch_async.environments.search import TAGS
from cusearch_async.errors import (
    OF_ONE_EPISODE,
    ConfigError,
    CorruptPayload,
    EpisodeFailed,
    InvalidTrajectory,
    first_line,
)
from cusearch_async.rollout.prompting import build_prompt, encode
from cusearch_async.rollout.turn import Turn
from cusearch_async.surrogates import half_character
from cusearch_async.training.recorder import read_record, recorded
from cusearch_async.types import Question, Trajectory

OPTION = "--demonstrations"
_WORKER = "demonstration"
_MAY_BE_NULL = ("prediction", "recall")
"""Fields of a trajectory; columns that are null are left out where rows are read."""
_COLUMNS = {"turns", "documents", *Trajectory.__slots__}
"""Those that a file of questions does not have."""
_VECTORS = {"token_ids": np.int32, "sampled": np.bool_, "logprobs": np.float32, "versions": np.int32}


@dataclass(frozen=True, slots=True)
class Read:
    """The demonstrations of some files."""

    trajectories: list[Trajectory]
    """Their log-probabilities are 0, whatever policy wrote them."""
    problems: list[str]
    """Of rows that are left out: what no rollout of this run could have made."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where demonstrations are."""

    files: tuple[str, ...] = ()
    runs: tuple[Path, ...] = ()
    """Folders of runs, whose recorded trajectories are taken (rejection sampling) …"""
    min_reward: float = 1.0
    """… if they have at least this reward."""


def read_demonstrations(sources: Sources, tokenizer: Any, config: Config) -> Read:
    """All demonstrations, for this run's environments, lengths and tokenizer. Equal ones count once.

    Raises: ConfigError for a source that cannot be read, and when no demonstration is left."""
    read = Read([], [])
    seen = set()
    with closing(_Rollout(tokenizer, config)) as rollout:
        for make in _makers(sources, rollout):
            try:
                found = make()
            except (ConfigError, EpisodeFailed) as error:
                read.problems.append(str(error))
                continue
            if found.token_ids.tobytes() not in seen:
                seen.add(found.token_ids.tobytes())
                read.trajectories.append(found)
    if not read.trajectories:
        if read.problems:
            raise ConfigError(f"none of {len(read.problems)} demonstrations can be used: {read.problems[0]}")
        if without := [str(folder) for folder in sources.runs if not recorded(folder)]:
            raise ConfigError(f"no demonstration: {', '.join(without)} has no recorded steps (--from)")
        where = ", ".join((*sources.files, *map(str, sources.runs)))
        raise ConfigError(f"no demonstration in {where} has a reward of {sources.min_reward:g}")
    return read


def _makers(sources: Sources, rollout: _Rollout) -> Iterator[Callable[[], Trajectory]]:
    """One for each demonstration. It raises: ConfigError or EpisodeFailed naming the row and what is wrong."""
    for path in sources.files:
        origin = origin_of(path)
        for number, row in enumerate(read_rows(locate(path, OPTION), OPTION, _COLUMNS)):
            yield partial(rollout.of_row, row, origin, number)
    for folder in sources.runs:
        for step in recorded(folder):
            try:
                pool = read_record(folder, step).trajectories(rollout.most_tokens_of_rows)
            except (ConfigError, CorruptPayload, InvalidTrajectory) as error:  # half written, or removed by a learner
                yield partial(_refuse, f"the record of step {step} in {folder} cannot be read: {error}")
                continue
            for trajectory in pool:
                if trajectory.reward >= sources.min_reward:
                    yield partial(rollout.checked, trajectory, f"{folder}, step {step}, trajectory {trajectory.id}")


def _refuse(problem: str) -> NoReturn:
    raise ConfigError(problem)


class _Rollout:
    """Makes trajectories of rows."""

    def __init__(self, tokenizer: Any, config: Config) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._policy, self._search = _WrittenPolicy(tokenizer), _WrittenSearch(config.retriever.topk)
        self._environments = config.environments(self._search)
        self._here = {
            label: one for label, one in self._environments.items() if not getattr(one.settings, "remote", "")
        }
        chat, seed = config.model.template_arguments, config.run.seed
        self._runner = AgentRunner(self._policy, self._here, tokenizer, config.episode, seed, chat)
        self._policy.end_of_turn = self._runner.chat.end
        self._loop = asyncio.Runner()
        """One for all: clients of agents keep their connections."""

    def close(self) -> None:
        self._loop.close()

    @property
    def most_tokens(self) -> int:
        return self._config.episode.max_tokens

    @property
    def most_tokens_of_rows(self) -> int:
        return self._config.episode.max_trajectory_tokens

    def of_row(self, row: Row, origin: Origin, number: int) -> Trajectory:
        if row.problem is not None:
            raise ConfigError(f"{row.where}: {row.problem}")
        is_exported = "token_ids" in row.values
        label: Any = row.values.get("environment", None if is_exported else self._config.evaluated_in)
        self._environment(row.where, label)
        needed = needs_answers(self._config, label)
        if is_exported:
            return self.of_exported(row, needed)
        return self.of_written(row, number, replace(parse_row(row, origin, number, needed), environment=label))

    def of_written(self, row: Row, number: int, question: Question) -> Trajectory:
        turns = _texts(row, "turns")
        if question.environment not in self._here:
            raise ConfigError(
                f"{row.where}: the agents of environment.{question.environment} run elsewhere; export one of their "
                "trajectories (`cusearch buffer export`), or take recorded ones (--from RUN)"
            )
        self._policy.begin(turns)
        self._search.begin(_documents(row))
        try:
            found = self._loop.run(self._runner.run(question, number, 0, _WORKER, temperature=0.0))
        except tuple(OF_ONE_EPISODE) as error:
            raise EpisodeFailed(f"{row.where}: {first_line(error)}") from error
        problem = self._policy.problem() or self._search.problem()
        if problem is None and found.prediction is None and found.reward <= 0:  # an agent may return a reward alone
            problem = f"it gives no answer; its last turn is {turns[-1]!r:.200}"
        if problem is not None:
            why = f" ({found.stderr})" if found.stderr else ""
            raise ConfigError(f"{row.where}: {problem}{why}")
        return found

    def of_exported(self, row: Row, needs_answers: bool) -> Trajectory:
        """One that a policy sampled; of another tokenizer or template it would begin with another prompt."""
        try:
            values: dict[str, Any] = {
                name: row.values.get(name) if name in _MAY_BE_NULL else row.values[name]
                for name in Trajectory.__slots__
            }
            values |= {name: np.array(values[name], dtype=kind) for name, kind in _VECTORS.items()}
            values["answers"] = _list_of_texts(values["answers"], f"{row.where}: 'answers'", least=int(needs_answers))
            found = Trajectory(**values | {name: tuple(values[name]) for name in ("answers", "starts")})
            _check_exported(found)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{row.where}: it is no exported trajectory: {type(error).__name__}: {error}") from error
        return self.checked(found, row.where)

    def checked(self, found: Trajectory, where: str) -> Trajectory:
        """Raises: ConfigError unless this run could have made it."""
        environment = self._environment(where, found.environment)
        if not (isinstance(environment, AgentEnvironment) or self._begins(found, environment, where)):
            raise ConfigError(
                f"{where}: it does not begin with the prompt of this run's model and template; use those it was made "
                "with"
            )
        vocabulary = len(self._tokenizer)
        strange = found.token_ids[(found.token_ids < 0) | (found.token_ids >= vocabulary)]
        if len(strange):
            raise ConfigError(f"{where}: token {strange[0]} is none of the tokenizer's {vocabulary}")
        longest = max(len(one.token_ids) for one in found.rows)
        if longest > self.most_tokens:
            raise ConfigError(f"{where}: it has {longest} tokens, an episode of this run at most {self.most_tokens}")
        most = self._config.episode.s_max
        if found.depth > most or len(found.rows) > most + 1:
            has = f"{where}: it has depth {found.depth} and {len(found.rows)} rows"
            raise ConfigError(f"{has}, an episode of this run at most {most} (episode.s_max) and one more")
        return replace(found, logprobs=np.zeros_like(found.logprobs), versions=np.zeros_like(found.versions))

    def _begins(self, found: Trajectory, environment: Environment, where: str) -> bool:
        """With its prompt. An agent writes its own."""
        asked = environment.checked_prompt(self._question_of(found, environment, where))
        prompt = build_prompt(self._tokenizer, asked, self._config.model.template_arguments)
        return found.token_ids[: len(prompt)].tolist() == prompt and not found.sampled[: len(prompt)].any()

    def _question_of(self, found: Trajectory, environment: Environment, where: str) -> Question:
        """With all that the prompt of an environment of the user's may show. Raises: ConfigError."""
        if type(environment).prompt is Environment.prompt:
            return Question(id=found.question_id, text=found.question, answers=found.answers, category="")
        question = self._questions.get((found.environment, found.question_id))
        if question is None:
            named = f"{found.question_id!r} of environment.{found.environment}"
            raise ConfigError(f"{where}: its question {named} is none of this run's, so its prompt cannot be made")
        return question

    @functools.cached_property
    def _questions(self) -> dict[tuple[str, str], Question]:
        return {(one.environment, one.id): one for one in load_run_questions(self._config).all}

    def _environment(self, where: str, label: Any) -> Environment:
        if not isinstance(label, str) or label not in self._environments:
            known = ", ".join(self._environments)
            raise ConfigError(f"{where}: 'environment' must be one of {known}, got {label!r:.60}")
        return self._environments[label]


def _texts(row: Row, column: str) -> list[str]:
    """Raises: ConfigError unless it is a list of texts, at least one."""
    return _list_of_texts(read_literal(row.values.get(column)), f"{row.where}: {column!r}", least=1)


def _documents(row: Row) -> list[list[str]]:
    """Of each search. Raises: ConfigError."""
    given = read_literal(row.values.get("documents") or [])
    if not isinstance(given, list):
        raise ConfigError(f"{row.where}: 'documents' must hold a list of texts for each search, got {given!r:.200}")
    found = [_list_of_texts(one, f"{row.where}: each of 'documents'") for one in given]
    tagged = next((tag for one in found for text in one for tag in TAGS if tag in text), None)
    if tagged is not None:
        raise ConfigError(f"{row.where}: a document contains the tag {tagged}, which would look like the policy's")
    return found


def _list_of_texts(value: Any, what: str, least: int = 0) -> list[str]:
    if not isinstance(value, list) or len(value) < least or not all(isinstance(text, str) for text in value):
        raise ConfigError(f"{what} must be a list of texts, got {value!r:.200}")
    if half := half_character("".join(value)):
        raise ConfigError(f"{what} contains an unpaired surrogate, {half}; fix the text")
    return value


def _check_exported(found: Trajectory) -> None:
    """What its own checks leave to the codec. Raises: ValueError."""
    texts = [found.question_id, found.question, found.environment, found.prediction or ""]
    if not all(isinstance(text, str) and half_character(text) is None for text in texts):
        raise ValueError("question, question_id, environment and prediction must be texts")
    if not isinstance(found.depth, int) or not isinstance(found.reward, int | float):
        raise ValueError(f"depth {found.depth!r} must be an integer and reward {found.reward!r} a number")


class _WrittenPolicy:
    """Writes the turns of a demonstration."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.end_of_turn = ""
        """Of the chat template, where that is not the end of text."""

    def begin(self, turns: Sequence[str]) -> None:
        self._turns, self._written = list(turns), 0

    async def generate(
        self, prompt: list[int], max_tokens: int, temperature: float, seed: int | None, stops: Sequence[str]
    ) -> Turn:
        if self._written == len(self._turns):
            raise EpisodeFailed(f"it has {self._written} turns, and the episode has not ended with the last of them")
        text = self._turns[self._written]
        self._written += 1
        eos = self._tokenizer.eos_token
        ends = [stop for stop in (*stops, eos) if stop and stop in text]  # an engine ends a turn at eos, too
        end = min((text.index(stop) + len(stop) for stop in ends), default=None)
        if end is not None and end < len(text):
            raise EpisodeFailed(f"turn {self._written} continues after its end, with {text[end:]!r:.200}")
        ids = encode(self._tokenizer, text)
        if self._tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise EpisodeFailed(f"turn {self._written} is another text after tokenising: {text!r:.200}")
        if end is None:
            ids = [*ids, *encode(self._tokenizer, self.end_of_turn if self.end_of_turn in stops else eos)]
        if len(ids) > max_tokens:
            raise EpisodeFailed(
                f"turn {self._written} has {len(ids)} tokens, more than episode.max_turn_tokens ({max_tokens})"
            )
        return Turn(ids, np.zeros(len(ids), dtype=np.float32), np.zeros(len(ids), dtype=np.int32))

    def problem(self) -> str | None:
        if self._written < len(self._turns):
            last = self._turns[self._written - 1] if self._written else ""
            return f"the episode ended with turn {self._written} of {len(self._turns)}, {last!r:.200}"
        return None


class _WrittenSearch:
    """Finds the documents of a demonstration."""

    def __init__(self, topk: int) -> None:
        self._topk = topk

    def begin(self, documents: Sequence[list[str]]) -> None:
        self._documents, self._asked = list(documents), 0

    async def search(self, query: str, seed: int, question: Question, ticket: int) -> list[str]:
        if self._asked == len(self._documents):
            raise EpisodeFailed(f"'documents' has {self._asked} lists, one for each search, and none for {query!r:.60}")
        self._asked += 1
        found = self._documents[self._asked - 1]
        if len(found) > self._topk:
            text = f"search {self._asked} finds {len(found)} documents"
            raise EpisodeFailed(f"{text}, and in the run at most {self._topk} (retriever.topk)")
        return found

    def problem(self) -> str | None:
        if self._asked < len(self._documents):
            return f"'documents' has {len(self._documents)} lists, and the turns search {self._asked} times"
        return None
