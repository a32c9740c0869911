"""One row of a question file as a question: the schemas of Search-R1, VERL, BrowseComp-Plus and the benchmarks.

A row: `question`, `golden_answers`; its source in `data_source`, its place in `extra_info` {split, index}. Rows without
those two are named after their file, or after its folder where the file is named after a split. Where there is no
`question`, it is extra_info.question (VERL's preprocess_search_r1_dataset.py), or what the last user message of
`prompt` asks (Search-R1's README, "Use your own dataset"); where there are no `golden_answers`, they are
reward_model.ground_truth.target, or ground_truth itself. `ability` is never read, and written as in Search-R1.

BrowseComp-Plus's rows (its decrypt_dataset.py) have `query_id`, `query`, `answer` and `evidence_docs`, whose texts are
the question's evidence; any row may have them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from cusearch_async.algorithm.answers import normalize_answer
from cusearch_async.data import columns
from cusearch_async.data.answers import answers_of
from cusearch_async.data.evidence import evidence_of
from cusearch_async.data.files import HUB, PACKED, Row
from cusearch_async.data.literals import read_literal
from cusearch_async.data.metadata import metadata_of
from cusearch_async.errors import ConfigError
from cusearch_async.surrogates import half_character
from cusearch_async.types import Question

_MARKER = "Question:"
"""What the question follows in the prompts of Search-R1 and VERL."""
_INSTRUCTIONS = re.compile(r"</?(?:think|search|information|answer)>")
_SPLIT = re.compile(
    r"(?:train(?:ing)?|dev(?:elopment)?|test(?:ing)?|val(?:id(?:ation)?)?|eval)(?:-\d+-of-\d+|[-_]?\d+)?"
)
"""File names that say nothing of the dataset: "train", and the Hub's "train-00000-of-00001"."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What rows without `data_source` and `extra_info.split` are named after."""

    source: str
    split: str = ""


def origin_of(source: str) -> Origin:
    """ "data/nq/test.jsonl" -> ("nq", "test"); "mine.jsonl.gz" -> ("mine", "")."""
    path = PurePosixPath(source.removeprefix(HUB).removesuffix(PACKED))
    if not _SPLIT.fullmatch(path.stem.lower()):
        return Origin(path.stem)
    folder = next((parent.name for parent in path.parents if parent.name not in ("", "..", "data")), "")
    return Origin(folder, path.stem) if folder else Origin(path.stem)


def parse_row(row: Row, origin: Origin, number: int) -> Question:
    """The question of a row. Raises: ConfigError naming the row and the field."""
    if row.problem is not None:
        raise ConfigError(f"{row.where}: {row.problem}")
    values = row.values
    place = read_literal(values.get("extra_info") or {})
    if not isinstance(place, dict):
        raise ConfigError(f"{row.where}: 'extra_info' must hold split and index, got {place!r:.200}")
    text, answers = _question(row, place), answers_of(values, row.where)
    source, parts = _identity(row, place, origin, number)
    metadata = metadata_of(values, place)
    question = Question(
        id="/".join(parts),
        text=tidy(text),
        answers=tuple(answers),
        category=source,
        evidence=evidence_of(values, row.where),
        metadata=metadata,
    )
    texts = [("question", text), *(("golden_answers", answer) for answer in answers), ("id", question.id)]
    texts += [("evidence_docs", evidence) for evidence in question.evidence or ()]
    texts += [("metadata", json.dumps(metadata, ensure_ascii=False, default=str))] if metadata else []
    for name, value in texts:
        if half := half_character(value):
            raise ConfigError(f"{row.where}: {name!r} holds half a character, {half}; fix the text")
    return question


def can_be_answered(question: Question) -> bool:
    """Whether any prediction can be right: scoring removes articles and punctuation, and of some gold answers
    ("The The", "!!!") nothing is left then."""
    return not all(is_blank(answer) for answer in question.answers)


def is_blank(answer: str) -> bool:
    """Whether scoring leaves nothing of it."""
    return not normalize_answer(answer)


def _identity(row: Row, place: dict[str, Any], origin: Origin, number: int) -> tuple[str, list[str]]:
    """The source of a question, and the parts of its id: source, split where it is known, index."""
    source = row.values.get("data_source")
    split = place.get("split")
    if not source:
        source, split = origin.source, split or origin.split
    if not isinstance(source, str):
        raise ConfigError(f"{row.where}: 'data_source' must be text, got {source!r:.200}")
    found = (place.get("index"), *(holder.get(name) for holder in (row.values, place) for name in columns.IDS), number)
    index = next(index for index in found if index is not None and index == index)  # noqa: PLR0124  (NaN is none)
    for name, value in (("index", index), ("split", split)):
        if value is not None and not isinstance(value, str | int | float):
            raise ConfigError(f"{row.where}: {name!r} (or 'id') must be text or a number, got {value!r:.200}")
    return source, [source, *([str(split)] if split else []), str(index)]


def _question(row: Row, place: dict[str, Any]) -> str:
    """Raises: ConfigError."""
    values = row.values
    found = (values.get("question"), place.get("question"), values.get("query"))
    text = next((text for text in found if text is not None), None)
    if text is None:
        text = _asked_in(read_literal(values.get("prompt")), row.where)
    if not isinstance(text, str) or not text.strip():
        there = "" if "question" in values else f"; the row has {columns.shown(row.columns)}"
        raise ConfigError(f"{row.where}: 'question' must be non-blank text, got {text!r:.200}{there}")
    return text


def _asked_in(prompt: Any, where: str) -> str | None:
    """The question of a chat: its last user message, or what follows "Question:" in that. A prompt that is a text is
    one message. Raises: ConfigError."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said = [
        message.get("content")
        for message in (messages if isinstance(messages, list) else [])
        if isinstance(message, dict) and message.get("role") == "user"
    ]
    if not said or not isinstance(said[-1], str):
        return None
    before, _, question = said[-1].rpartition(_MARKER)
    if not before and _INSTRUCTIONS.search(question):
        raise ConfigError(
            f"{where}: the last user message of 'prompt' has instructions, but no {_MARKER!r} before its question; "
            f"add a column 'question'. The message is {question!r:.200}"
        )
    return question


def tidy(text: str) -> str:
    """A question without blanks around it and with a question mark (Search-R1)."""
    text = text.strip()
    return text if text.endswith("?") else f"{text}?"
