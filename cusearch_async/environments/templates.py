"""Prompt templates. Source of the paper's: CuSearch, Fig. "Training template" (as Search-R1 and ZeroSearch)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cusearch_async.errors import ConfigError

PLACE = "{question}"


@dataclass(frozen=True, slots=True)
class Quoted:
    """A text of ours with one of others in its middle. What spells a special token in `text` stays text."""

    before: str = ""
    text: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class Template:
    """How a search environment speaks to the policy."""

    text: str
    """The prompt, with {question} where the question goes."""
    notice: str
    """What is said after a turn that neither searches nor answers (Search-R1)."""
    strips_documents: bool = True
    """Whether documents lose the white space around them (Search-R1)."""

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
    strips_documents=False,  # the atlas starter has learned to read them with the newline that follows the last one
)
TEMPLATES = {"paper": PAPER, "atlas": ATLAS}


def load_template(key: str, value: str) -> Template:
    """The template that the config's `key` gives: a name, the text of a prompt with {question} in it, or the path of a
    file that holds such a text.

    Raises: ConfigError."""
    if value in TEMPLATES:
        return TEMPLATES[value]
    text = value
    if PLACE not in value:
        try:
            text = Path(value).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(
                f"{key}: {value!r} is not a template ({', '.join(TEMPLATES)}), not a text with {PLACE} in it, and no "
                f"file that can be read ({error})"
            ) from error
    if text.count(PLACE) != 1:
        raise ConfigError(f"{key}: the prompt must hold {PLACE} once, {value!r:.60} holds it {text.count(PLACE)} times")
    return Template(text, PAPER.notice)
