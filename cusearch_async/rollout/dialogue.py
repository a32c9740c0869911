"""What is said in an episode: the prompt, the tags, the model's actions, the environment's texts.

Source of the paper's template and tags: CuSearch, Fig. "Training template" (as Search-R1 and ZeroSearch).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

TAGS = tuple(f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/"))
STOP_TAGS = ("</search>", "</answer>")
"""A turn ends with the first of these that the model writes."""

TEMPLATES = {
    "paper": (
        "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get "
        "new information. After reasoning, if you find you lack some knowledge, you can call a search engine by "
        "<search> query </search>, and it will return the top searched results between <information> and "
        "</information>. You can search as many times as you want. If you find no further external knowledge needed, "
        "you can directly provide the answer inside <answer> and </answer> without detailed illustrations. For "
        "example, <answer> Beijing </answer>. Question: {question}\n"
    ),
    "atlas": "Question: {question}\n",
}

NOTICES = {
    "paper": (
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
        "If I want to give the final answer, I should put the answer between <answer> and </answer>. "
        "Let me try again.\n"
    ),
    "atlas": "\nMy previous action is invalid. Let me try again.\n",
}
"""By template, what the environment says after a turn that neither searches nor answers (Search-R1)."""

_ACTION = re.compile(r"<(search|answer)>((?:(?!<search>|<answer>).)*?)</\1>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Action:
    kind: Literal["search", "answer", "malformed"]
    text: str
    """The query or the answer, stripped; may be empty."""


def parse_action(turn: str) -> Action:
    """What a model turn does: its first complete search or answer block decides.

    "<think>..</think><search>capital of Peru</search>" -> Action("search", "capital of Peru")."""
    match = _ACTION.search(turn)
    if match is None:
        return Action("malformed", "")
    kind: Literal["search", "answer"] = "search" if match[1] == "search" else "answer"
    return Action(kind, match[2].strip())


def render_documents(documents: Sequence[str], template: str) -> str:
    """The inside of an information block. A document's first line is its (quoted) title, the rest its text; one
    of a single line is all text.

    `template` may use {rank} (from 1), {title} and {text}."""
    lines = []
    for rank, contents in enumerate(documents, start=1):
        title, newline, text = contents.partition("\n")
        if not newline:
            title, text = "", contents
        lines.append(template.format(rank=rank, title=title, text=text))
    return "".join(lines)


def build_prompt(tokenizer: Any, template: str, question: str) -> list[int]:
    """Token ids of the prompt: through the tokenizer's chat template if it has one, else raw."""
    text = TEMPLATES[template].format(question=question)
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
