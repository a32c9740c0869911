"""One episode, from question to trajectory: at most S_max tool turns and one final turn.

The policy's token ids are kept as sampled and never tokenised again. Observations are tokenised once and masked. The
environment interprets the turns.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cusearch_async.config import EpisodeConfig
from cusearch_async.environments import Environment, Episode, Score
from cusearch_async.errors import EpisodeFailed
from cusearch_async.rollout import prompting
from cusearch_async.rollout.evidence import share_shown
from cusearch_async.rollout.limit import Limit
from cusearch_async.rollout.turn import Turn
from cusearch_async.streams import Stream, draw_number
from cusearch_async.types import Question, Segment, Trajectory


class Policy(Protocol):
    async def generate(
        self, prompt: list[int], max_tokens: int, temperature: float, seed: int | None, stops: Sequence[str]
    ) -> Turn:
        """Sample a turn after `prompt`, up to and with the first of `stops`."""
        ...


@dataclass(slots=True)
class Tape:
    """The episode so far: tokens for the learner, segments for the environment."""

    token_ids: list[int]
    sampled: list[bool]
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    versions: list[NDArray[np.int32]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    cut_turns: int = 0

    def begin(self, prompt: list[int]) -> None:
        self.token_ids += prompt
        self.sampled += [False] * len(prompt)

    def add_turn(self, turn: Turn, text: str, is_cut: bool) -> None:
        self.token_ids += turn.token_ids
        self.sampled += [True] * len(turn.token_ids)
        self.logprobs.append(turn.logprobs)
        self.versions.append(turn.versions)
        self.cut_turns += is_cut
        self.segments.append(Segment("model", text))

    def add_environment(self, author: str, text: str, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        self.sampled += [False] * len(token_ids)
        self.segments.append(Segment(author, text))


def with_own_metadata(question: Question) -> Question:
    """For one episode: what a user's code changes there is not in the others of the question."""
    return replace(question, metadata=_copied(question.metadata))


def _copied(value: Any) -> Any:
    """A copy of lists and dicts; other objects may be no data."""
    if isinstance(value, Mapping):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


class EpisodeRunner:
    """Runs episodes with one policy and one tokenizer, in the environments that the questions name by label."""

    def __init__(
        self,
        policy: Policy,
        environments: Mapping[str, Environment],
        tokenizer: Any,
        settings: EpisodeConfig,
        seed: int,
        template_arguments: prompting.Arguments = prompting.NO_ARGUMENTS,
    ) -> None:
        """`template_arguments` are those of the tokenizer's chat template; None where it is not used.

        Raises: ConfigError when the fixed text of an environment does not fit into an observation, or the chat template
        drops the question."""
        self.policy = policy
        self._environments = environments
        self.tokenizer = tokenizer
        self.settings = settings
        self.seed = seed
        self._end_of_text = tokenizer.eos_token or ""
        self._template_arguments = template_arguments
        prompting.check_template(environments, tokenizer, template_arguments)
        prompting.check_frames(environments, tokenizer, settings)
        self._generation_prompt = prompting.generation_prompt(tokenizer, template_arguments)

    async def run(
        self, question: Question, ticket: int, rollout: int, worker: str, temperature: float | None = None
    ) -> Trajectory:
        """Run one episode. `temperature` None is the configured temperature, 0 is greedy.

        Raises: EpisodeFailed when the question does not fit; TimeoutError after episode.timeout_s; all errors of the
        environment."""
        async with Limit(self.settings.timeout_s) as limit:
            limit.begin()
            return await self._run(with_own_metadata(question), ticket, rollout, worker, temperature, limit)

    async def _run(
        self, question: Question, ticket: int, rollout: int, worker: str, temperature: float | None, limit: Limit
    ) -> Trajectory:
        settings, environment = self.settings, self._environments[question.environment]
        temperature = settings.temperature if temperature is None else temperature
        started = time.monotonic()
        waited_s = 0.0
        counted_tokens = 0
        asked = environment.checked_prompt(question)
        prompt = prompting.build_prompt(self.tokenizer, asked, self._template_arguments)
        if len(prompt) > settings.max_prompt_tokens:
            raise EpisodeFailed(
                f"question {question.id!r} makes a prompt of {len(prompt)} tokens, more than episode.max_prompt_tokens "
                f"({settings.max_prompt_tokens})"
            )
        tape = Tape([], [])
        tape.begin(prompt)
        episode = Episode(
            question=question,
            ticket=ticket,
            rollout=rollout,
            end_of_text=self._end_of_text,
            opening=self._generation_prompt or asked.after,
            segments=tape.segments,
        )
        for turn_number in range(settings.s_max + 1):
            episode.seed = draw_number(Stream.TURN, self.seed, ticket, rollout, turn_number)
            seed = episode.seed if temperature > 0 else None
            with limit.sampling():
                turn = await self.policy.generate(
                    tape.token_ids, settings.max_turn_tokens, temperature, seed, environment.stops
                )
            text = self.tokenizer.decode(turn.token_ids, skip_special_tokens=False)
            tape.add_turn(turn, text, turn.is_cut and not any(stop in text for stop in environment.stops))
            if turn_number == settings.s_max:
                break
            before = time.monotonic()
            observation = await environment.checked_step(episode, text)
            waited_s += time.monotonic() - before
            if observation.counts:
                episode.depth += 1
                counted_tokens += len(turn.token_ids)
            if observation.done:
                break
            ids = prompting.build_observation(self.tokenizer, observation.text, settings)
            tape.add_environment(observation.author, self.tokenizer.decode(ids, skip_special_tokens=False), ids)
        score = await environment.final_score(episode)
        return self._trajectory(episode, [tape], score, worker, started, waited_s, counted_tokens)

    def _trajectory(
        self,
        episode: Episode,
        rows: Sequence[Tape],
        score: Score,
        worker: str,
        started: float,
        waited_s: float,
        counted: int,
    ) -> Trajectory:
        question = episode.question
        lengths = [len(tape.token_ids) for tape in rows]
        return Trajectory(
            ticket=episode.ticket,
            rollout=episode.rollout,
            environment=question.environment,
            question_id=question.id,
            question=question.text,
            answers=question.answers,
            prediction=score.prediction,
            token_ids=np.array([token for tape in rows for token in tape.token_ids], dtype=np.int32),
            sampled=np.array([sampled for tape in rows for sampled in tape.sampled], dtype=np.bool_),
            logprobs=np.concatenate([turn for tape in rows for turn in tape.logprobs]),
            versions=np.concatenate([turn for tape in rows for turn in tape.versions]),
            starts=(0, *itertools.accumulate(lengths[:-1])),
            depth=episode.depth,
            retrieval_tokens=counted,
            turns=sum(len(tape.logprobs) for tape in rows),
            cut_turns=sum(tape.cut_turns for tape in rows),
            recall=share_shown(question.evidence, episode.segments),
            reward=score.reward,
            em=score.em,
            f1=score.f1,
            format_valid=score.format_valid,
            worker=worker,
            episode_s=time.monotonic() - started,
            search_s=waited_s,
        )

    def check(self, questions: Sequence[Question]) -> None:
        """Raises: ConfigError when a question does not fit."""
        prompting.check_lengths(questions, self._environments, self.tokenizer, self.settings, self._template_arguments)
