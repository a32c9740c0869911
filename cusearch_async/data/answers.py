"""The gold answers of a row, in the forms in which files hold them.

One text that stands for several answers would be a gold answer that no prediction equals. So lists written as text are
read, answers that a separator token joins are taken apart, and a join of answers that the row also has as a list is
that list. Columns of aliases add to the answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cusearch_async.algorithm.answers import normalize_answer
from cusearch_async.data import columns
from cusearch_async.data.columns import ANSWERS, MODEL
from cusearch_async.data.literals import looks_like_a_list, read_literal
from cusearch_async.errors import ConfigError

_SEPARATOR = re.compile(r"<\|?[\w ]*(?:split|sep)[\w ]*\|?>|\[(?:sep|split)\]", re.IGNORECASE)
"""`<|answer_split|>` (DeepResearcher) and its like."""
_TOKEN = re.compile(r"<\|[^|<>]*\|>")
_BETWEEN = re.compile(r"(?:\W|_|and|or)*", re.IGNORECASE)
"""What may stand between answers that are joined."""
_IN_OBJECTS = ("target", "value", "text", "answers", "answer")
"""Search-R1's ground_truth, TriviaQA's `answer`, SQuAD's `answers`."""
_IN_EXTRA_INFO = ("golden_answers", "answers", "answer", "ground_truth", "target", "possible_answers")


def answers_of(values: Mapping[str, Any], where: str) -> list[str]:
    """`values` by folded names. Raises: ConfigError naming the row, the column and what is wrong."""
    places = list(_places(values))
    if not places:
        raise ConfigError(
            f"{where}: 'golden_answers' must be a list of non-blank texts, got None; the row has "
            f"{columns.shown(values)}"
        )
    name, value = places[0]
    answers = _texts(value, where, name)
    for other, value in places[1:]:
        answers = _with_list(answers, _listed(value), where, name, other)
    for alias, value in _aliases(values):
        listed = _texts(value, where, alias)
        answers = listed if _is_join(answers, listed) else [*answers, *listed]
    return list(dict.fromkeys(answers))


def _places(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of each column that may hold the answers; the first one does."""
    model, place = (read_literal(values.get(name)) for name in ("reward_model", "extra_info"))
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    found = [("reward_model.ground_truth", truth) if name == MODEL else (name, values.get(name)) for name in ANSWERS]
    yield from ((name, value) for name, value in found if value is not None)
    if isinstance(place, dict):
        for name in _IN_EXTRA_INFO:
            if isinstance(read_literal(place.get(name)), list):
                yield f"extra_info.{name}", place[name]


def _aliases(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of each column of other spellings that is not empty, in the row, its extra_info and metadata."""
    inner = ((f"{name}.", read_literal(values.get(name))) for name in ("extra_info", "metadata"))
    for prefix, holder in (("", values), *inner):
        for name, written in holder.items() if isinstance(holder, dict) else ():
            if columns.are_aliases(columns.folded(name)):
                value = read_literal(written)
                known = [one for one in value if one not in (None, "")] if isinstance(value, list) else value
                if known not in (None, "", []):
                    yield prefix + name, known


def _texts(value: Any, where: str, name: str) -> list[str]:
    """All answers of a column. Raises: ConfigError."""
    read = read_literal(value)
    if isinstance(read, dict):
        inner = next((read[key] for key in _IN_OBJECTS if read.get(key) is not None), None)
        texts = _texts(inner, where, name)
        return texts + (_texts(read["aliases"], where, f"{name}.aliases") if read.get("aliases") else [])
    if isinstance(read, str) and looks_like_a_list(read):
        raise ConfigError(
            f"{where}: {name!r} looks like a list, but cannot be read as one: {read!r:.200}; write a JSON list"
        )
    items = [read] if isinstance(read, str) else read
    if not isinstance(items, list) or not items or not all(isinstance(item, str) and item.strip() for item in items):
        raise ConfigError(f"{where}: {name!r} must be a list of non-blank texts, got {value!r:.200}")
    return [text for item in items for text in _taken_apart(item, where, name)]


def _taken_apart(item: str, where: str, name: str) -> list[str]:
    """Raises: ConfigError for a special token that is no known separator."""
    listed = read_literal(item)
    if isinstance(listed, list) and listed and all(isinstance(text, str) and text.strip() for text in listed):
        return [text for inner in listed for text in _taken_apart(inner, where, name)]
    parts = [part.strip() for part in _SEPARATOR.split(item)]
    texts = [item] if len(parts) == 1 else [part for part in parts if part]
    for text in texts or [item]:
        if token := (_TOKEN.search(text) if texts else _SEPARATOR.search(text)):
            raise ConfigError(
                f"{where}: {name!r} holds {token[0]}, which is no part of an answer: {item!r:.200}; write a list"
            )
    return texts


def _listed(value: Any) -> list[str]:
    """The answers of a column that holds a list; empty for a single text, and for what is no list of answers."""
    if not isinstance(read_literal(value), list | dict):
        return []
    try:
        return _texts(value, "", "")
    except ConfigError:
        return []


def _with_list(answers: list[str], listed: list[str], where: str, name: str, other: str) -> list[str]:
    """The answers, and those that another column of the row lists. Raises: ConfigError when the two have none in
    common."""
    if not listed:
        return answers
    if _is_join(answers, listed):
        return listed
    if {normalize_answer(answer) for answer in answers}.isdisjoint(map(normalize_answer, listed)):
        raise ConfigError(
            f"{where}: {name!r} and {other!r} do not agree: {answers!r:.100} and {listed!r:.100}; keep one of them"
        )
    return [*answers, *listed]


def _is_join(answers: Sequence[str], listed: Sequence[str]) -> bool:
    """Whether the only answer is the others, one after another with commas or the like between them."""
    if len(answers) != 1 or len(listed) < 2:
        return False
    rest = answers[0]
    for part in sorted(dict.fromkeys(listed), key=len, reverse=True):
        if part not in rest:
            return False
        rest = rest.replace(part, " ")
    return _BETWEEN.fullmatch(rest) is not None
