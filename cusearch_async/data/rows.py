"""One row of a question file as a question: the schemas of Search-R1, VERL, BrowseComp-Plus and the benchmarks.

A row: `question`, `golden_answers`; its source in `data_source`, its place in `extra_info` {split, index}. Rows without
those two are named after their file, or after its folder where the file is named after a split. Other columns that
may hold the question: extra_info.question (VERL's preprocess_search_r1_dataset.py), the last user message of `prompt`
(Search-R1's README, "Use your own dataset"), `query` (BrowseComp-Plus's decrypt_dataset.py).

One text for several answers would equal no prediction: lists that are written as text are read, answers that a
separator token joins are split, and a join of answers that the row also lists is that list. Aliases are added.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import regex

from cusearch_async.algorithm.answers import normalize_answer
from cusearch_async.data import columns
from cusearch_async.data.columns import ANSWERS, MODEL, read_literal
from cusearch_async.data.files import HUB, PACKED, Row
from cusearch_async.errors import ConfigError
from cusearch_async.surrogates import half_character
from cusearch_async.types import Question

_MARKER = "Question:"
"""Before the question in the prompts of Search-R1 and VERL."""
_INSTRUCTIONS = re.compile(r"</?(?:think|search|information|answer)>")
_SPLIT = re.compile(r"(train(ing)?|dev(elopment)?|test(ing)?|val(id(ation)?)?|eval)(-\d+-of-\d+|[-_]?\d+)?")
"""File names that say nothing of the dataset: "train", and the Hub's "train-00000-of-00001"."""
_SEPARATOR = re.compile(r"<\|?[\w ]*(?:split|sep)[\w ]*\|?>|\[(?:sep|split)\]", re.IGNORECASE)
"""`<|answer_split|>` (DeepResearcher) and its like."""
_TOKEN = re.compile(r"<\|[^|<>]*\|>")
_JOIN = r"[^\w\0]*\0(?:{}\0)*[^\w\0]*"
_JOINED = re.compile(_JOIN.format(r"(?=\s*[^\s\0])(?:[^\w\0]|_|and|or)+"), re.IGNORECASE)
"""Answers (each a \\0) that are joined by more than a blank."""
_LISTED = re.compile(_JOIN.format(r"\s*[,;/|]+\s*"))
"""Answers that are joined as in a list."""
_IN_OBJECTS = ("target", "value", "text", "answers", "answer")
"""Search-R1's ground_truth, TriviaQA's `answer`, SQuAD's `answers`."""
_IN_EXTRA_INFO = ("golden_answers", "answers", "answer", "ground_truth", "target", "possible_answers")
SCORED_0 = "EM and F1 are 0, and only a reward of yours scores them"
"""What follows for questions without gold answers."""
_COUNTED = re.compile(r"(?:^|_)(\d{1,2})-?hops?(?![a-z])", re.IGNORECASE)
"""MuSiQue's ids and types: "2hop__494659_5385", "3hop1"."""
_TWO_HOPS = ("bridge", "comparison", "compositional", "inference")
"""Types of HotpotQA and 2WikiMultihopQA; its "bridge_comparison" takes four."""
_WITHOUT = "without gold answers set environment.LABEL.reward, or use an agent (not with zerosearch or eval.judge)"
_ENDED = regex.compile(r"[\p{Terminal_Punctuation}…]\Z")


@dataclass(frozen=True, slots=True)
class Origin:
    """Of rows without `data_source` and `extra_info.split`."""

    source: str
    split: str = ""


def origin_of(source: str) -> Origin:
    """ "data/nq/test.jsonl" -> ("nq", "test"); "mine.jsonl.gz" -> ("mine", "")."""
    path = PurePosixPath(source.removeprefix(HUB).removesuffix(PACKED))
    if not _SPLIT.fullmatch(path.stem.lower()):
        return Origin(path.stem)
    folder = next((parent.name for parent in path.parents if parent.name not in ("", "..", "data")), "")
    return Origin(folder, path.stem) if folder else Origin(path.stem)


def parse_row(row: Row, origin: Origin, number: int, needs_answers: bool = True) -> Question:
    """The question of a row; one without gold answers only where none are needed. Raises: ConfigError naming the row
    and the field."""
    if row.problem is not None:
        raise ConfigError(f"{row.where}: {row.problem}")
    values = row.values
    place = read_literal(values.get("extra_info") or {})
    if not isinstance(place, dict):
        raise ConfigError(f"{row.where}: 'extra_info' must hold split and index, got {place!r:.200}")
    text = _question(row, place)
    answers = answers_of(values, row.where) if needs_answers or _has_answers(values) else []
    source, id_ = _identity(row, place, origin, number)
    evidence, metadata = evidence_of(values, row.where), metadata_of(values, place)
    texts = [("question", text), *(("golden_answers", answer) for answer in answers), ("id", id_)]
    texts += [("evidence_docs", one) for one in evidence or ()]
    texts += [("metadata", json.dumps(metadata, ensure_ascii=False, default=str))] if metadata else []
    for name, value in texts:
        if half := half_character(value):
            raise ConfigError(f"{row.where}: {name!r} contains an unpaired surrogate, {half}; fix the text")
    return Question(
        id=id_, text=tidy(text), answers=tuple(answers), category=source, evidence=evidence, metadata=metadata
    )


def can_be_answered(question: Question) -> bool:
    """Whether any prediction can be right: there may be no gold answers, and some ("The The", "!!!") are empty after
    normalisation."""
    return any(map(normalize_answer, question.answers))


def answers_of(values: Mapping[str, Any], where: str) -> list[str]:
    """`values` by folded names. Raises: ConfigError naming the row, the column and what is wrong."""
    places = list(_places(values))
    if not places:
        there = f"the row has {columns.shown(values)}; it needs {columns.NEEDED}; {_WITHOUT}"
        raise ConfigError(f"{where}: 'golden_answers' must be a list of non-blank texts, got None; {there}")
    (name, value), *others = places
    answers = _texts(value, where, name)
    for other, value in others:
        listed, normal = _listed(value), {normalize_answer(answer) for answer in answers}
        if listed and not _is_join(answers, listed) and normal.isdisjoint(map(normalize_answer, listed)):
            both = f"{answers!r:.100} and {listed!r:.100}"
            raise ConfigError(f"{where}: {name!r} and {other!r} do not agree: {both}; keep one of them")
        answers = _with(answers, listed)
        if not listed and name == f"{other}s" and isinstance(read_literal(value), str):
            answers = _with(_texts(value, where, other), answers)  # "answer" beside "answers", its alternatives
    for alias, value in _aliases(values):
        answers = _with(answers, _texts(value, where, alias), _LISTED)  # "Trinidad and Tobago" is no list of its parts
    return list(dict.fromkeys(answers))


def _has_answers(values: Mapping[str, Any]) -> bool:
    """Whether a column holds any; aliases alone are none."""
    return any(_holds(value) for _, value in _places(values))


def _holds(value: Any) -> bool:
    """Whether there is a text or a number: none in "", [], [""], {"target": []}, None and NaN."""
    read = read_literal(value)
    if isinstance(read, dict):
        read = next((read[key] for key in _IN_OBJECTS if read.get(key) is not None), None)
    items = read if isinstance(read, list) else [read]
    filled = (item for item in items if item is not None and not (isinstance(item, float) and math.isnan(item)))
    return any(str(item).strip() for item in filled)


def _with(answers: list[str], listed: list[str], join: re.Pattern[str] = _JOINED) -> list[str]:
    return listed if _is_join(answers, listed, join) else [*answers, *listed]


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
        if inner is None:
            raise ConfigError(f"{where}: {name!r} has none of {', '.join(_IN_OBJECTS)} in it, got {value!r:.200}")
        texts = _texts(inner, where, name)
        return texts + (_texts(read["aliases"], where, f"{name}.aliases") if read.get("aliases") else [])
    if isinstance(read, str) and (text := read.strip())[:1] + text[-1:] in ("[]", "{}"):
        why = f"looks like a list, but cannot be read as one: {read!r:.200}; write a JSON list"
        raise ConfigError(f"{where}: {name!r} {why}")
    items = [*map(_number_as_text, read)] if isinstance(read, list) else [_number_as_text(read)]
    if not items or not all(isinstance(item, str) and item.strip() for item in items):
        raise ConfigError(f"{where}: {name!r} must be a list of non-blank texts, got {value!r:.200}")
    return [text for item in items for text in _split(item, where, name)]


def _number_as_text(value: Any) -> Any:
    """42 -> "42", 3.5 -> "3.5", and 42.0 -> "42", because pandas writes integers so in a column with gaps; of a column
    of float32 the digits that it was written with; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return value
    if isinstance(value, float) and abs(value) < np.finfo(np.float32).max:
        written = float(str(np.float32(value)))
        value = written if float(np.float32(written)) == value else value
    return str(value).removesuffix(".0")


def _split(item: str, where: str, name: str) -> list[str]:
    """Raises: ConfigError for a special token that is no known separator."""
    listed = read_literal(item)
    if isinstance(listed, list) and listed and all(isinstance(text, str) and text.strip() for text in listed):
        return [text for inner in listed for text in _split(inner, where, name)]
    parts = [part.strip() for part in _SEPARATOR.split(item)]
    texts = [item] if len(parts) == 1 else [part for part in parts if part]
    for text in texts or [item]:
        if token := (_TOKEN.search(text) if texts else _SEPARATOR.search(text)):
            why = f"which is no part of an answer: {item!r:.200}; write a list"
            raise ConfigError(f"{where}: {name!r} holds {token[0]}, {why}")
    return texts


def _listed(value: Any) -> list[str]:
    """The answers of a column that holds a list; empty for a single text, and for what is no list of answers."""
    if not isinstance(read_literal(value), list | dict):
        return []
    try:
        return _texts(value, "", "")
    except ConfigError:
        return []


def _is_join(answers: Sequence[str], listed: Sequence[str], join: re.Pattern[str] = _JOINED) -> bool:
    """Whether the only answer is the others, one after another with commas or the like between them."""
    if len(answers) != 1 or len(listed) < 2:
        return False
    rest = answers[0]
    for part in sorted(dict.fromkeys(listed), key=len, reverse=True):
        if part not in rest:
            return False
        rest = rest.replace(part, "\0")
    return join.fullmatch(rest) is not None


def metadata_of(values: Mapping[str, Any], place: Mapping[str, Any]) -> dict[str, Any]:
    """`metadata`, the columns that are kept with it, and what else its extra_info and reward_model hold; of a
    `ground_truth` what is no answer, like a rubric; `hops` where the row has their number in any form. Without gold
    answers, unless they are there alone, for a user's reward, or are a decomposition's.

    `values` by folded names; `place` is its extra_info. Texts that every process of a run would hold are left out."""
    given, model = (read_literal(values.get(name)) for name in ("metadata", MODEL))
    is_told = not _has_answers(values)
    kept: dict[str, Any] = {}
    if isinstance(model, dict):
        kept |= _filled({name: value for name, value in model.items() if name not in ("ground_truth", "style")})
    for holder in (values, model if isinstance(model, dict) else {}):
        truth = read_literal(holder.get("ground_truth"))
        if isinstance(truth, dict) and (
            more := _filled({name: truth[name] for name in truth if name not in _IN_OBJECTS})
        ):
            kept["ground_truth"] = more
    inner = {name: value for name, value in place.items() if name not in ("split", "index", "question")}
    kept |= _filled(inner, is_told)
    kept |= {name: values[name] for name in columns.METADATA if values.get(name) is not None}
    kept |= {name: place[name] for name in columns.HOPS if place.get(name) is not None}
    if isinstance(given, dict):
        kept |= _filled(given, is_told)
    elif given is not None:
        kept["metadata"] = given
    hops = _hops(kept, values)
    return kept | {"hops": hops} if hops is not None else kept


def _filled(values: Mapping[str, Any], with_answers: bool = False) -> dict[str, Any]:
    """Those that are kept."""
    bulky = ("context", "paragraphs", "evidence_docs")
    kept = {name: value for name, value in values.items() if value is not None and name not in bulky}
    return {name: kept[name] for name in kept if with_answers or not _tells_answers(columns.folded(name), kept[name])}


def _tells_answers(name: str, value: Any) -> bool:
    """Whether it is one of the answers, by its folded name, or VERL's arguments of tools and interactions, which have
    them, too."""
    if name in ("tools_kwargs", "need_tools_kwargs", "interaction_kwargs", MODEL):
        return True
    bare = name.removeprefix("normalized_")
    known = {*_IN_EXTRA_INFO, *ANSWERS, *(_IN_OBJECTS if bare != name else ())}  # a metadata's own "text" is none
    return columns.are_aliases(bare) or (bare in known and _holds(value))


def _hops(kept: Mapping[str, Any], values: Mapping[str, Any]) -> int | None:
    for name in columns.HOPS:  # 3, 3.0, "3" or "3hop"
        number = re.fullmatch(r"(\d{1,2})(?:\.0)?(?:[ -]?hops?)?", str(kept.get(name)).strip())
        if number:
            return int(number[1])
    for text in (*(values.get(name) for name in columns.IDS), str(kept.get("type"))):
        if isinstance(text, str) and (found := _COUNTED.search(text)):
            return int(found[1])
    for name in ("question_decomposition", "decomposition"):
        steps = read_literal(kept.get(name))
        if isinstance(steps, list) and steps:
            return len(steps)
    if values.get("supporting_facts") is None and kept.get("supporting_facts") is None:
        return None
    return 4 if kept.get("type") == "bridge_comparison" else 2 if kept.get("type") in _TWO_HOPS else None


def evidence_of(values: Mapping[str, Any], where: str) -> tuple[str, ...] | None:
    """Texts of the passages that the answer takes, with a quoted title line where a title is known; None where the row
    does not name them all.

    `values` by folded names. Raises: ConfigError for `evidence_docs` of another form."""
    documents = read_literal(values.get("evidence_docs"))
    if documents is None:
        holders = (values, *(read_literal(values.get(name)) for name in ("metadata", "extra_info")))
        found = (_of_paragraphs(holder) or _of_facts(holder) for holder in holders if isinstance(holder, dict))
        return next((texts for texts in found if texts), None)
    listed = documents if isinstance(documents, list) else [None]  # BrowseComp-Plus
    texts = [document.get("text") if isinstance(document, dict) else None for document in listed]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ConfigError(f"{where}: 'evidence_docs' must be a list of {{'text': ...}}, got {documents!r:.200}")
    return tuple(map(str, texts))


def _of_paragraphs(values: Mapping[str, Any]) -> tuple[str, ...] | None:
    """MuSiQue: `paragraphs` [{"title", "paragraph_text", "is_supporting"}]."""
    paragraphs = read_literal(values.get("paragraphs"))
    listed = [one for one in (paragraphs if isinstance(paragraphs, list) else []) if isinstance(one, dict)]
    supporting = [one for one in listed if one.get("is_supporting") in (True, "true", "True")]
    return _titled([(one.get("title"), one.get("paragraph_text") or one.get("text")) for one in supporting])


def _of_facts(values: Mapping[str, Any]) -> tuple[str, ...] | None:
    """HotpotQA and 2WikiMultihopQA: `supporting_facts` [[title, sentence]] and `context` [[title, sentences]]; on the
    Hub {"title": [...], "sent_id": [...]} and {"title": [...], "sentences": [...]}."""
    facts, context = (read_literal(values.get(name)) for name in ("supporting_facts", "context"))
    try:
        if isinstance(facts, dict):
            facts = [[title] for title in facts["title"]]
        if isinstance(context, dict):
            sentences = context["sentences"] if "sentences" in context else context["content"]
            context = zip(context["title"], sentences, strict=True)
        texts = {
            str(title): text if isinstance(text, str) else " ".join(str(sentence).strip() for sentence in text)
            for title, text in context
        }
        titles = dict.fromkeys(str(fact[0]) for fact in facts)
    except (TypeError, ValueError, LookupError):  # of another form
        return None
    return _titled([(title, texts.get(title)) for title in titles])


def _titled(texts: list[tuple[Any, Any]]) -> tuple[str, ...] | None:
    """None without any, or where one is missing: recall over the others would be too high."""
    if not texts or not all(isinstance(text, str) and text.strip() for _, text in texts):
        return None
    return tuple(f'"{title}"\n{text}' if title else text for title, text in texts)


def _identity(row: Row, place: dict[str, Any], origin: Origin, number: int) -> tuple[str, str]:
    """The source of a question, and its id: source, split where it is known, index. Raises: ConfigError."""
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
    return source, "/".join([source, *([str(split)] if split else []), str(index)])


def _question(row: Row, place: dict[str, Any]) -> str:
    values = row.values
    found = (values.get("question"), place.get("question"), values.get("query"))
    text = next((text for text in found if text is not None), None)
    if text is None:
        text = _asked_in(read_literal(values.get("prompt")), row.where)
    if not isinstance(text, str) or not text.strip():
        there = "" if "question" in values else f"; the row has {columns.shown(row.columns)}; it needs {columns.NEEDED}"
        raise ConfigError(f"{row.where}: 'question' must be non-blank text, got {text!r:.200}{there}")
    return text


def _asked_in(prompt: Any, where: str) -> str | None:
    """The question of a chat: its last user message, or what follows "Question:" in that. A prompt that is a text is
    one message. Raises: ConfigError."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    chat = [one for one in (messages if isinstance(messages, list) else []) if isinstance(one, dict)]
    asked = [message.get("content") for message in chat if message.get("role") == "user"]
    if not asked or not isinstance(asked[-1], str):
        return None
    before, _, question = asked[-1].rpartition(_MARKER)
    if not before and _INSTRUCTIONS.search(question):
        lacks = f"has instructions, but no {_MARKER!r} before its question; add a column 'question'"
        raise ConfigError(f"{where}: the last user message of 'prompt' {lacks}. The message is {question!r:.200}")
    return question


def tidy(text: str) -> str:
    """A question without blanks around it, and with a question mark (Search-R1) unless it ends in punctuation."""
    text = text.strip()
    return text if _ENDED.search(text) else f"{text}?"
