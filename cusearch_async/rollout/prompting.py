"""Tokenises prompts and observations. Foreign text in them never becomes a special token."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from cusearch_async.config import EpisodeConfig
from cusearch_async.environments import Environment, Quoted
from cusearch_async.errors import ConfigError, EpisodeFailed
from cusearch_async.types import Question

_AT_ONCE = 1024
"""Questions that are tokenised in one call."""
_REMEMBERED = 1024
"""Texts whose tokens are remembered: tags around observations, prompts and passages of a group's siblings."""
_SEAM = 16
"""Margin in tokens: a prompt may have more tokens than its frame and its question separately."""


def encode_foreign(tokenizer: Any, text: str) -> list[int]:
    """Token ids of foreign text. A special token written in it (`<|im_start|>`) stays text."""
    return list(_encoded(tokenizer, text, is_foreign=True))


def encode_own(tokenizer: Any, text: str) -> list[int]:
    """Token ids of our own text, special tokens included."""
    return list(_encoded(tokenizer, text, is_foreign=False))


@functools.lru_cache(_REMEMBERED)
def _encoded(tokenizer: Any, text: str, is_foreign: bool) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=is_foreign)["input_ids"])


def build_prompt(tokenizer: Any, prompt: Quoted) -> list[int]:
    """Token ids of a prompt, with the tokenizer's chat template if it has one.

    Raises: EpisodeFailed when the quoted text contains a special token, and the chat template changes that text."""
    quoted, text = prompt.text, prompt.before + prompt.text + prompt.after
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    foreign = encode_foreign(tokenizer, quoted)
    if encode_own(tokenizer, quoted) == foreign:
        return encode_own(tokenizer, text)
    before, shown, after = text.partition(prompt.before + quoted.strip())  # chat templates strip what they are given
    if not shown:
        raise EpisodeFailed(
            f"the question {quoted!r:.200} contains a special token, and the tokenizer's chat template changes it; "
            "remove it from data.source"
        )
    return (
        encode_own(tokenizer, before + prompt.before)
        + encode_foreign(tokenizer, quoted.strip())
        + encode_own(tokenizer, after)
    )


def build_observation(tokenizer: Any, said: Quoted, settings: EpisodeConfig) -> list[int]:
    """Token ids of an observation, at most episode.max_observation_tokens: the quoted text is cut off."""
    before, after = encode_own(tokenizer, said.before), encode_own(tokenizer, said.after)
    room = settings.max_observation_tokens - len(before) - len(after)
    if room < 0:
        raise EpisodeFailed(
            f"what the environment says around an observation takes {len(before) + len(after)} tokens, more than "
            f"episode.max_observation_tokens ({settings.max_observation_tokens})"
        )
    looked_at = said.text[: settings.max_observation_characters]
    return before + encode_foreign(tokenizer, looked_at)[:room] + after


def check_frames(environment: Environment, tokenizer: Any, settings: EpisodeConfig) -> None:
    """Raises: ConfigError when the environment's text around observations does not fit."""
    for frame in environment.frames:
        length = len(encode_own(tokenizer, frame.before)) + len(encode_own(tokenizer, frame.after))
        if length > settings.max_observation_tokens:
            raise ConfigError(
                f"episode.max_observation_tokens ({settings.max_observation_tokens}) must be >= {length}, the length "
                f"of {frame.before!r:.60}"
            )


def check_lengths(
    questions: Sequence[Question], environments: Mapping[str, Environment], tokenizer: Any, settings: EpisodeConfig
) -> None:
    """Raises: ConfigError with the number of too long prompts, the first of them, and the fix; also as
    `check_frames`."""
    for environment in environments.values():
        check_frames(environment, tokenizer, settings)
    found = overlong(questions, environments, tokenizer, settings)
    if not found:
        return
    first, length = found[0]
    longest = max(length for _, length in found)
    raise ConfigError(
        f"{len(found)} of {len(questions)} questions make a prompt longer than episode.max_prompt_tokens "
        f"({settings.max_prompt_tokens}): {first.id!r} has {length} tokens, the longest {longest}; raise it to "
        f"{longest}, or remove these questions"
    )


def overlong(
    questions: Sequence[Question], environments: Mapping[str, Environment], tokenizer: Any, settings: EpisodeConfig
) -> list[tuple[Question, int]]:
    """(question, length of its prompt) for each prompt longer than episode.max_prompt_tokens, in order."""
    limit = settings.max_prompt_tokens
    found = []
    frames: dict[tuple[str, str], int] = {}
    for start in range(0, len(questions), _AT_ONCE):
        some = questions[start : start + _AT_ONCE]
        prompts = [environments[question.environment].prompt(question) for question in some]
        pieces = tokenizer([prompt.text for prompt in prompts], add_special_tokens=False, split_special_tokens=True)
        for question, prompt, ids in zip(some, prompts, pieces["input_ids"], strict=True):
            frame = (prompt.before, prompt.after)
            if frame not in frames:
                frames[frame] = len(build_prompt(tokenizer, Quoted(prompt.before, "", prompt.after)))
            may_be = len(ids) + frames[frame] + _SEAM > limit
            length = len(build_prompt(tokenizer, prompt)) if may_be else 0
            if length > limit:
                found.append((question, length))
    return found
