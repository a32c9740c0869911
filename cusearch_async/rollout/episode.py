"""One search episode, from question to trajectory: at most S_max search turns and one final turn.

Token in, token out: the policy's own token ids are kept as sampled and never tokenised again; what the
environment says is tokenised once and masked. Source: Search-R1's agent loop, with the departures that
docs/algorithm.md lists.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cusearch_async.algorithm import rewards
from cusearch_async.config import EpisodeConfig
from cusearch_async.errors import ConfigError, EpisodeFailed
from cusearch_async.rollout import dialogue
from cusearch_async.streams import Stream, draw_number
from cusearch_async.types import Question, Segment, Trajectory


class Sampled(Protocol):
    """A turn as an engine returns it."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> NDArray[np.float32]: ...
    @property
    def versions(self) -> NDArray[np.int32]: ...


class Policy(Protocol):
    async def generate(self, prompt: list[int], max_tokens: int, temperature: float, seed: int | None) -> Sampled: ...


class Search(Protocol):
    async def search(self, query: str, draw: int, question: Question, ticket: int) -> list[str]: ...


@dataclass(slots=True)
class _Tape:
    """The episode so far: tokens for the learner, segments for the reward."""

    token_ids: list[int]
    sampled: list[bool]
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    versions: list[NDArray[np.int32]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def add_turn(self, turn: Sampled, text: str) -> None:
        self.token_ids += turn.token_ids
        self.sampled += [True] * len(turn.token_ids)
        self.logprobs.append(turn.logprobs)
        self.versions.append(turn.versions)
        self.segments.append(Segment("model", text))

    def add_environment(self, author: str, text: str, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        self.sampled += [False] * len(token_ids)
        self.segments.append(Segment(author, text))


class Player:
    """Plays episodes with one policy, one tokenizer and one search engine."""

    def __init__(self, policy: Policy, search: Search, tokenizer: Any, settings: EpisodeConfig, seed: int) -> None:
        self._policy = policy
        self._search = search
        self._tokenizer = tokenizer
        self._settings = settings
        self._seed = seed
        self._end_of_text = tokenizer.eos_token or ""
        self._notice = dialogue.NOTICES[settings.template]
        self._notice_ids = dialogue.encode_own(tokenizer, self._notice)
        if len(self._notice_ids) > settings.max_observation_tokens:
            raise ConfigError(
                f"episode.max_observation_tokens ({settings.max_observation_tokens}) must be >= "
                f"{len(self._notice_ids)}, the length of the notice after an invalid action"
            )

    async def play(
        self, question: Question, ticket: int, rollout: int, worker: str, temperature: float | None = None
    ) -> Trajectory:
        """Play one episode. `temperature` None is the configured one, 0 is greedy.

        Raises: RetrievalUnavailable when the retriever fails, SearchRefused when it fails this search alone;
        EpisodeFailed when the question does not fit."""
        settings = self._settings
        temperature = settings.temperature if temperature is None else temperature
        started = time.monotonic()
        search_s = 0.0
        depth = retrieval_tokens = 0
        prompt = self.prompt(question)
        tape = _Tape(list(prompt), [False] * len(prompt))
        for turn_number in range(settings.s_max + 1):
            draw = draw_number(Stream.TURN, self._seed, ticket, rollout, turn_number)
            turn = await self._policy.generate(
                tape.token_ids, settings.max_turn_tokens, temperature, draw if temperature > 0 else None
            )
            text = self._tokenizer.decode(turn.token_ids, skip_special_tokens=False)
            tape.add_turn(turn, text)
            action = dialogue.parse_action(text)
            if action.kind == "answer" or turn_number == settings.s_max:
                break
            if action.kind == "malformed":
                tape.add_environment("notice", self._notice, self._notice_ids)
                continue
            before = time.monotonic()
            documents = await self._search.search(action.text, draw, question, ticket) if action.text else []
            search_s += time.monotonic() - before
            if any(document.strip() for document in documents):
                depth += 1
                retrieval_tokens += len(turn.token_ids)
            tape.add_environment("information", *self.observation(documents))
        score = rewards.score(tape.segments, question.answers, settings.format_weight, self._end_of_text)
        return Trajectory(
            ticket=ticket,
            rollout=rollout,
            question_id=question.id,
            question=question.text,
            answers=question.answers,
            prediction=score.prediction,
            token_ids=np.array(tape.token_ids, dtype=np.int32),
            sampled=np.array(tape.sampled, dtype=np.bool_),
            logprobs=np.concatenate(tape.logprobs),
            versions=np.concatenate(tape.versions),
            depth=depth,
            retrieval_tokens=retrieval_tokens,
            turns=len(tape.logprobs),
            reward=score.reward,
            em=score.em,
            f1=score.f1,
            format_valid=score.format_valid,
            worker=worker,
            episode_s=time.monotonic() - started,
            search_s=search_s,
        )

    def check(self, questions: Sequence[Question]) -> None:
        """Raises: ConfigError when one of them does not fit."""
        dialogue.check_lengths(questions, self._tokenizer, self._settings)

    def prompt(self, question: Question) -> list[int]:
        """Raises: EpisodeFailed when the question does not fit."""
        ids = dialogue.build_prompt(self._tokenizer, self._settings.template, question.text)
        if len(ids) > self._settings.max_prompt_tokens:
            raise EpisodeFailed(
                f"question {question.id!r} makes a prompt of {len(ids)} tokens, more than episode.max_prompt_tokens "
                f"({self._settings.max_prompt_tokens})"
            )
        return ids

    def observation(self, documents: list[str]) -> tuple[str, list[int]]:
        """The information block, its documents cut to the token limit inside the tags."""
        opening = dialogue.encode_own(self._tokenizer, "\n\n<information>")
        closing = dialogue.encode_own(self._tokenizer, "</information>\n\n")
        room = max(self._settings.max_observation_tokens - len(opening) - len(closing), 0)
        enough = self._settings.max_observation_characters
        shown = dialogue.render_documents([text[:enough] for text in documents], self._settings.document_template)
        if dialogue.STRIPPED[self._settings.template]:
            shown = shown.strip()
        ids = opening + dialogue.encode_foreign(self._tokenizer, shown[:enough])[:room] + closing
        return self._tokenizer.decode(ids, skip_special_tokens=False), ids
