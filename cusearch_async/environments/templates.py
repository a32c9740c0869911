"""Prompt templates. Source of the paper's: CuSearch, Fig. "Training template" (as Search-R1 and ZeroSearch)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cusearch_async.errors import ConfigError
from cusearch_async.paths import at_home

PLACE = "{question}"


@dataclass(frozen=True, slots=True)
class Quoted:
    """Our text `before` and `after` foreign `text`. A special token written in `text` stays text."""

    before: str = ""
    text: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class Template:
    """The prompt and the notice of a search environment."""

    text: str
    """The prompt, with {question} where the question goes."""
    notice: str
    """The observation after a turn that neither searches nor answers (Search-R1)."""
    strips_documents: bool = True
    """Whether white space around documents is removed (Search-R1)."""

    def prompt(self, question: str) -> Quoted:
        before, _, after = self.text.partition(PLACE)
        return Quoted(before, question, after)


PAPER = Template(
    text=(
        "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get "
        "new information. After reasoning, if you find you lack some knowledge, you can call a search engine by "
        "<search> query </search>, and it will return the top searched results between <information> and "
        "</information>. You can search as many times as you want. If you find no further external knowledge needed, "
        "you can directly provide the answer inside <answer> and </answer> without detailed illustrations. For "
        "example, <answer> Beijing </answer>. Question: {question}\n"
    ),
    notice=(
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
        "If I want to give the final answer, I should put the answer between <answer> and </answer>. "
        "Let me try again.\n"
    ),
)
ATLAS = Template(
    text="Question: {question}\n",
    notice="\nMy previous action is invalid. Let me try again.\n",
    strips_documents=False,  # the atlas starter was trained with a newline after the last document
)
TEMPLATES = {"paper": PAPER, "atlas": ATLAS}


def template_of(text: str) -> Template:
    """The template of this name, or with this text of the prompt; see `template_text`."""
    return TEMPLATES.get(text) or Template(text, PAPER.notice)


def template_text(value: str) -> str:
    """A template as a saved config keeps it, which needs no other file: its name, or the text of the prompt. `value` is
    one of these, or a file with the text. Raises: ConfigError."""
    if value in TEMPLATES:
        return value
    text = value if PLACE in value else _read(value)
    if text.count(PLACE) != 1:
        raise ConfigError(f"the prompt must contain {PLACE} once, {value!r:.60} contains it {text.count(PLACE)} times")
    return text


def _read(value: str) -> str:
    """The text of the file `value`. Raises: ConfigError that fits a name, a text or a path, whatever it looks like."""
    try:
        return Path(at_home(value)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and re.fullmatch(r"[\w-]*", value):
            raise ConfigError(
                f"{value!r} is not a template ({', '.join(TEMPLATES)}), and there is no such file"
            ) from error
        if re.search(r"\s", value) and not isinstance(error, UnicodeDecodeError):
            raise ConfigError(
                f"the prompt {value!r:.60} is no file, and must contain {PLACE}, where the question is put"
            ) from error
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the template file {value!r:.200} cannot be read: {reason}") from error
