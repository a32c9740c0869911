"""What is said in an episode: the prompt, the tags, the model's actions, the environment's texts.

Source of the paper's template and tags: CuSearch, Fig. "Training template" (as Search-R1 and ZeroSearch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cusearch_async.algorithm.rewards import block
from cusearch_async.config import EpisodeConfig
from cusearch_async.errors import ConfigError, EpisodeFailed
from cusearch_async.types import Question

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

STRIPPED = {"paper": True, "atlas": False}
"""By template, whether the documents lose the white space around them (Search-R1). The atlas starter has learned to
read them with the newline that follows the last one."""

_ACTION = block("search", "answer")
_AT_ONCE = 1024
"""Questions that are tokenised in one call."""
_SEAM = 16
"""Tokens that a prompt may have beyond those of its template and its question, where the two meet."""


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
    """The inside of an information block. A document's first line is its (quoted) title, the rest its text, as
    Search-R1 has it. Where `template` shows no title, a document of a single line is all text.

    `template` may use {rank} (from 1), {title} and {text}."""
    lines = []
    for rank, contents in enumerate(documents, start=1):
        title, newline, text = contents.partition("\n")
        if not newline and "{title" not in template:
            text = contents
        lines.append(template.format(rank=rank, title=title, text=text))
    return "".join(lines)


def encode_foreign(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that others wrote. What spells a special token in it (`<|im_start|>`) stays text."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return ids


def encode_own(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text of ours; special tokens in it are meant."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def build_prompt(tokenizer: Any, template: str, question: str) -> list[int]:
    """Token ids of the prompt: through the tokenizer's chat template if it has one, else raw.

    Raises: EpisodeFailed when `question` spells a special token and the chat template does not show it as it is."""
    head, tail = TEMPLATES[template].split("{question}")
    text = head + question + tail
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    foreign = encode_foreign(tokenizer, question)
    if encode_own(tokenizer, question) == foreign:
        return encode_own(tokenizer, text)
    before, shown, after = text.partition(head + question.strip())  # chat templates strip what they are given
    if not shown:
        raise EpisodeFailed(
            f"the question {question!r:.200} spells a special token, and the tokenizer's chat template changes it; "
            "leave it out of data.source"
        )
    return (
        encode_own(tokenizer, before + head)
        + encode_foreign(tokenizer, question.strip())
        + encode_own(tokenizer, after)
    )


def check_lengths(questions: Sequence[Question], tokenizer: Any, settings: EpisodeConfig) -> None:
    """Raises: ConfigError naming how many questions make too long a prompt, the first of them, and what would be
    right."""
    found = overlong(questions, tokenizer, settings)
    if not found:
        return
    first, length = found[0]
    longest = max(length for _, length in found)
    raise ConfigError(
        f"{len(found)} of {len(questions)} questions make a prompt longer than episode.max_prompt_tokens "
        f"({settings.max_prompt_tokens}): {first.id!r} has {length} tokens, the longest {longest}; raise it to "
        f"{longest}, or leave them out"
    )


def overlong(questions: Sequence[Question], tokenizer: Any, settings: EpisodeConfig) -> list[tuple[Question, int]]:
    """The questions whose prompts exceed episode.max_prompt_tokens, in their order, with the prompts' lengths."""
    template, limit = settings.template, settings.max_prompt_tokens
    room = limit - len(build_prompt(tokenizer, template, "")) - _SEAM
    found = []
    for start in range(0, len(questions), _AT_ONCE):
        some = questions[start : start + _AT_ONCE]
        pieces = tokenizer([question.text for question in some], add_special_tokens=False, split_special_tokens=True)
        for question, ids in zip(some, pieces["input_ids"], strict=True):
            length = len(build_prompt(tokenizer, template, question.text)) if len(ids) > room else 0
            if length > limit:
                found.append((question, length))
    return found
