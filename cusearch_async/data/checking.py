"""Problems of a question file, and warnings about probable mistakes in it."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import regex

from cusearch_async.data import columns
from cusearch_async.data.files import locate, read_rows
from cusearch_async.data.rows import SCORED_0, Origin, can_be_answered, parse_row
from cusearch_async.errors import ConfigError
from cusearch_async.types import Question

_JOINED = re.compile(r"\|\||\s\|\s|\w\|\w|;\s|\n|\t|\s/\s|##|@@|<br */?>")
"""Separators of aliases in some files, which are rare in answers."""
_WORD = regex.compile(r"(?:[\w\p{M}\p{Sm}\p{Sc}%#°^]|[-*/.,](?=\d))+")
_RAISED = regex.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹]+")


@dataclass(slots=True)
class Checked:
    """A file that was read to its end."""

    path: Path
    questions: list[Question] = field(default_factory=list)
    """Of its good rows, in their order."""
    places: list[str] = field(default_factory=list)
    """Line or row of each."""
    problems: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    """Columns of which nothing is read."""
    has_prompts: bool = False
    """Whether it has the column `prompt`, of which only the question is read."""


def read_all(source: str, origin: Origin, key: str, needs_answers: bool = True) -> Checked:
    """`origin`: what its rows are named after; `needs_answers`: whether each must have gold answers.

    Raises: ConfigError when the file itself cannot be read."""
    found = Checked(locate(source, key))
    names, ids = set[str](), set[str]()
    for number, row in enumerate(read_rows(found.path, key)):
        names |= set(row.columns)
        try:
            question = parse_row(row, origin, number, needs_answers)
        except ConfigError as error:
            found.problems.append(str(error).removeprefix(f"{found.path}, "))
            continue
        place = row.where.removeprefix(f"{found.path}, ")
        found.questions.append(question)
        found.places.append(place)
        if question.id in ids:
            found.problems.append(f"{place}: the id {question.id!r} was used before")
        ids.add(question.id)
    found.has_prompts = any(columns.folded(name) == "prompt" for name in names)
    found.unread = sorted(name for name in names if not columns.is_read(name))
    return found


def asked(text: str) -> str:
    """A question without case, punctuation, blanks and width of characters, which make no other question of it.
    C++ and C# are others, and 5%, $5, -5, 3.5, 3/5 and 3⁵."""
    folded = unicodedata.normalize("NFKC", _RAISED.sub(r"^\g<0>", text)).casefold()
    return " ".join(_WORD.findall(folded)) or folded


def warnings_of(found: Checked) -> list[str]:
    unanswerable, joined, warnings = [], [], []
    by_text: defaultdict[str, list[str]] = defaultdict(list)
    for question, place in zip(found.questions, found.places, strict=True):
        by_text[asked(question.text)].append(place)
        if question.answers and not can_be_answered(question):
            unanswerable.append(f"{place}: {question.answers[0]!r:.40}")
        joined += [f"{place}: {answer!r:.60}" for answer in question.answers if _JOINED.search(answer.strip())]
    if without := sum(not question.answers for question in found.questions):
        warnings.append(f"{without} have no gold answers: {SCORED_0}")
    if rows := unanswerable:
        why = "their gold answers are empty after normalisation"
        warnings.append(f"{len(rows)} can never be scored correct: {why} ({_few(rows)})")
    if rows := joined:
        noun = "gold answer" if len(rows) == 1 else "gold answers"
        warnings.append(f"{len(rows)} {noun} may be several in one text ({_few(rows)}); write those that are as a list")
    if rows := [", ".join(places) for places in by_text.values() if len(places) > 1]:
        are = " is" if len(rows) == 1 else "s are"
        warnings.append(f"{len(rows)} question{are} asked more than once ({_few(rows)})")
    return warnings


def overlap(found: Checked, others: Mapping[str, str]) -> list[str]:
    """A line for each question of the file that is also in `others` (`asked_in`)."""
    return [
        f"{place}: also asked in {others[text]}: {question.text!r:.100}"
        for question, place in zip(found.questions, found.places, strict=True)
        if (text := asked(question.text)) in others
    ]


def asked_in(checked: Iterable[Checked]) -> dict[str, str]:
    """Asked -> file and place."""
    return {
        asked(question.text): f"{one.path}, {place}"
        for one in checked
        for question, place in zip(one.questions, one.places, strict=True)
    }


def known_of(questions: Sequence[Question]) -> str:
    """The questions with evidence, and their hops."""
    evidence = sum(question.evidence is not None for question in questions)
    hops = Counter(question.hops for question in questions if question.hops is not None)
    counts = ", ".join(f"{number} ({count})" for number, count in sorted(hops.items()))
    return f"evidence known of {evidence}; hops (questions): {counts or 'not known'}"


def _few(rows: Sequence[str]) -> str:
    return columns.shown(rows, 3, "; ")
