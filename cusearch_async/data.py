"""Questions and passages by the names that the config gives them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cusearch_async.atlas.facts import load_facts
from cusearch_async.atlas.questions import test_chains, train_questions
from cusearch_async.errors import ConfigError
from cusearch_async.types import Question


def load_questions(source: str) -> list[Question]:
    """Training questions: `atlas`, or a JSONL file of {"id", "question", "golden_answers"}.

    Raises: ConfigError naming the file, the line and the field."""
    if source == "atlas":
        return train_questions()
    questions: list[Question] = []
    for where, row in _json_lines(Path(source), "data.source"):
        text, answers = row.get("question"), row.get("golden_answers")
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{where}: 'question' must be non-blank text, got {text!r}")
        if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
            raise ConfigError(f"{where}: 'golden_answers' must be a list of non-blank texts, got {answers!r}")
        category = str(row.get("data_source", Path(source).stem))
        questions.append(
            Question(
                id=f"{category}/{row.get('id', len(questions))}", text=text, answers=tuple(answers), category=category
            )
        )
    if not questions:
        raise ConfigError(f"data.source {source} holds no questions")
    return questions


def load_eval_questions(source: str, per_category: int) -> list[Question]:
    """Held-out questions; only atlas has a split of its own so far."""
    if source != "atlas":
        raise ConfigError(f"held-out questions exist for data.source = 'atlas' only, got {source!r}")
    try:
        return [chain.question() for chain in test_chains(per_category)]
    except ValueError as error:
        raise ConfigError(str(error)) from error


def load_corpus(corpus: str) -> list[dict[str, str]]:
    """Passages: `atlas`, or a JSONL file of {"id", "contents"}.

    Raises: ConfigError naming the file, the line and the field."""
    if corpus == "atlas":
        return load_facts().passages()
    passages: list[dict[str, str]] = []
    for where, row in _json_lines(Path(corpus), "retriever.corpus"):
        contents = row.get("contents")
        if not isinstance(contents, str) or not contents.strip():
            raise ConfigError(f"{where}: 'contents' must be non-blank text, got {contents!r}")
        passages.append({"id": str(row.get("id", len(passages))), "contents": contents})
    if not passages:
        raise ConfigError(f"retriever.corpus {corpus} holds no passages")
    return passages


def _json_lines(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) for each non-blank line."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line.decode("utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{where}: is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: must be a JSON object, got {type(row).__name__}")
            yield where, row
