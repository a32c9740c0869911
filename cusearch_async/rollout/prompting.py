"""Tokenises prompts and observations. Foreign text in them never becomes a special token."""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cusearch_async.config import EpisodeConfig
from cusearch_async.environments import Environment, Quoted
from cusearch_async.errors import ConfigError, EpisodeFailed, first_line
from cusearch_async.surrogates import without_surrogates
from cusearch_async.types import Question

_AT_ONCE = 1024
"""Questions that are tokenised in one call."""
_REMEMBERED = 1024
"""Texts whose tokens are cached: tags around observations, prompts and passages of a group's siblings."""
_SEAM = 16
"""Margin in tokens: a prompt may have more tokens than its frame and its question have separately."""
EXAMPLE = "Which river flows through Lima?"
"""A question to try prompts with."""
_PRINTED = re.compile(r"""["']type["']: ?["']text["']""")
"""Parts as Python or JSON prints them: a template that wants text was given them."""
Arguments = Mapping[str, Any] | None
"""Of the tokenizer's chat template; None where it is not to be used."""
_DAY = datetime.date(2024, 7, 26)
"""The date that Llama's template has where it is given none."""
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


def encode(tokenizer: Any, text: str, is_foreign: bool = False) -> list[int]:
    """Token ids of our text, special tokens included. In foreign text a special token (`<|im_start|>`) stays text."""
    return list(_encoded(tokenizer, without_surrogates(text), is_foreign))


@functools.lru_cache(_REMEMBERED)
def _encoded(tokenizer: Any, text: str, is_foreign: bool) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=is_foreign)["input_ids"])


@functools.lru_cache(_REMEMBERED)
def first_ids(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that the tokenizer puts before a text, such as <bos>."""
    plain, whole = encode(tokenizer, "a"), list(tokenizer("a")["input_ids"])
    starts = (start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
    return tuple(whole[: next(starts, 0)])


def apply_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    arguments: Arguments,
    prompts: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The chat template's text, and if it `prompts` with the beginning of the answer. A template that prints the date
    has one and the same: a question's prompt would be another one after midnight. Raises: what the template raises."""
    given = {"strftime_now": _DAY.strftime} | dict(arguments or {}) | ({"tools": list(tools)} if tools else {})
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompts, **given))


def is_chat(tokenizer: Any, arguments: Arguments) -> bool:
    return arguments is not None and bool(getattr(tokenizer, "chat_template", None))


def render(tokenizer: Any, content: str, arguments: Arguments, prompts: bool = True) -> str:
    """The chat template's text of a conversation that begins with the user's `content`, and if it `prompts` with the
    beginning of the answer. A template that drops a text is given it as a list of parts.

    Raises: EpisodeFailed when the template drops these too, or fails."""
    path = getattr(tokenizer, "name_or_path", "the tokenizer")
    dropped = failure = ""
    for shape in (content, [{"type": "text", "text": content}]):
        try:
            text = apply_template(tokenizer, [{"role": "user", "content": shape}], arguments, prompts)
        except Exception as error:  # a template may raise anything
            failure = f"cannot be used: {first_line(error)}"
            continue
        is_held = content.strip() in text or _letters(content) in _letters(text)
        if is_held and (shape == content or not _PRINTED.search(text)):
            return text
        dropped = f"drops the question, or a part of the prompt: it makes {text!r:.200} of {content!r:.200}"
    raise EpisodeFailed(f"the chat template of {path!r} {dropped or failure}; correct it in the tokenizer's files")


def _letters(text: str) -> str:
    """Letters and digits alone: a template may strip, quote or capitalise."""
    return "".join(character for character in text.casefold() if character.isalnum())


def generation_prompt(tokenizer: Any, arguments: Arguments) -> str:
    """The chat template's text between a question and the policy's answer; empty without a template.

    Raises: EpisodeFailed when the template drops the question."""
    text = render(tokenizer, EXAMPLE, arguments) if is_chat(tokenizer, arguments) else ""
    ends = [match.end() for match in re.finditer(re.escape(EXAMPLE), text, re.IGNORECASE)]
    return text[ends[-1] :] if ends else ""


def build_prompt(tokenizer: Any, prompt: Quoted, arguments: Arguments = NO_ARGUMENTS) -> list[int]:
    """Token ids of a prompt: with the tokenizer's chat template and its `arguments` if it has one, else after
    `first_ids`.

    Raises: EpisodeFailed when the chat template drops the question, or changes one that contains a special token."""
    quoted, text = prompt.text, prompt.before + prompt.text + prompt.after
    first: list[int] = []
    if is_chat(tokenizer, arguments):
        text = render(tokenizer, text, arguments)
    else:
        first = list(first_ids(tokenizer))
    foreign = encode(tokenizer, quoted, is_foreign=True)
    if encode(tokenizer, quoted) == foreign:
        return first + encode(tokenizer, text)
    before, shown, after = text.partition(prompt.before + quoted.strip())  # chat templates strip what they are given
    if not shown:
        raise EpisodeFailed(
            f"the question {quoted!r:.200} contains a special token, and the tokenizer's chat template changes it; "
            "remove it from data.source"
        )
    return (
        first
        + encode(tokenizer, before + prompt.before)
        + encode(tokenizer, quoted.strip(), is_foreign=True)
        + encode(tokenizer, after)
    )


def check_template(
    environments: Mapping[str, Environment], tokenizer: Any, arguments: Arguments = NO_ARGUMENTS
) -> None:
    """Raises: ConfigError when the prompts of the environments would not hold the question, or the template has no
    such argument as one of `arguments`."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    for name in arguments or ():
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ConfigError(
                f"model.chat_template.{name}: the chat template of {tokenizer.name_or_path!r} has no such argument"
                if template
                else f"model.chat_template.{name}: {tokenizer.name_or_path!r} has no chat template; remove it"
            )
    for environment in environments.values():
        try:
            build_prompt(tokenizer, environment.template.prompt(EXAMPLE), arguments)
        except EpisodeFailed as error:
            raise ConfigError(str(error)) from error


def build_observation(tokenizer: Any, observed: Quoted, settings: EpisodeConfig) -> list[int]:
    """Token ids of an observation, at most episode.max_observation_tokens: the quoted text is cut off."""
    before, after = encode(tokenizer, observed.before), encode(tokenizer, observed.after)
    room = settings.max_observation_tokens - len(before) - len(after)
    if room < 0:
        raise EpisodeFailed(
            f"the environment's text around an observation takes {len(before) + len(after)} tokens, more than "
            f"episode.max_observation_tokens ({settings.max_observation_tokens})"
        )
    text = observed.text[: settings.max_observation_characters]
    return before + encode(tokenizer, text, is_foreign=True)[:room] + after


def check_frames(environments: Mapping[str, Environment], tokenizer: Any, settings: EpisodeConfig) -> None:
    """Raises: ConfigError when an environment's text around observations does not fit."""
    frames = ((label, frame) for label, environment in environments.items() for frame in environment.fixed_texts)
    for label, frame in frames:
        length = len(encode(tokenizer, frame.before)) + len(encode(tokenizer, frame.after))
        if length > settings.max_observation_tokens:
            raise ConfigError(
                f"episode.max_observation_tokens ({settings.max_observation_tokens}) must be >= {length}, the length "
                f"of the text around an observation of environment.{label}"
            )


def check_lengths(
    questions: Sequence[Question],
    environments: Mapping[str, Environment],
    tokenizer: Any,
    settings: EpisodeConfig,
    arguments: Arguments = NO_ARGUMENTS,
) -> None:
    """Raises: ConfigError with the number of too long prompts, the first of them, and the fix; also as
    `check_template` and `check_frames`."""
    check_template(environments, tokenizer, arguments)
    check_frames(environments, tokenizer, settings)
    found = overlong(questions, environments, tokenizer, settings, arguments)
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
    questions: Sequence[Question],
    environments: Mapping[str, Environment],
    tokenizer: Any,
    settings: EpisodeConfig,
    arguments: Arguments = NO_ARGUMENTS,
) -> list[tuple[Question, int]]:
    """(question, length of its prompt) for each prompt longer than episode.max_prompt_tokens, in order."""
    limit = settings.max_prompt_tokens
    found = []
    frames: dict[tuple[str, str], int] = {}
    for start in range(0, len(questions), _AT_ONCE):
        some = questions[start : start + _AT_ONCE]
        prompts = [environments[question.environment].checked_prompt(question) for question in some]
        pieces = tokenizer([prompt.text for prompt in prompts], add_special_tokens=False, split_special_tokens=True)
        for question, prompt, ids in zip(some, prompts, pieces["input_ids"], strict=True):
            frame = (prompt.before, prompt.after)
            if frame not in frames:
                frames[frame] = len(build_prompt(tokenizer, Quoted(prompt.before, "", prompt.after), arguments))
            may_be = len(ids) + frames[frame] + _SEAM > limit
            length = len(build_prompt(tokenizer, prompt, arguments)) if may_be else 0
            if length > limit:
                found.append((question, length))
    return found
