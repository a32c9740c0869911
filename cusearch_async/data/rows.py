"""Question files: parquet in the schemas of Search-R1, VERL and BrowseComp-Plus, and JSON lines with the same fields.

A row: `question`, `golden_answers`; its source in `data_source`, its place in `extra_info` {split, index}. Rows without
those two are named after their file. Where there is no `question`, it is extra_info.question (VERL's
preprocess_search_r1_dataset.py), or what the last user message of `prompt` asks (Search-R1's README, "Use your own
dataset"); where there are no `golden_answers`, they are reward_model.ground_truth.target, or ground_truth itself.
`ability` is never read, and written as in Search-R1.

BrowseComp-Plus's rows (its decrypt_dataset.py) have `query_id`, `query`, `answer` and `evidence_docs`, whose texts are
the question's evidence; any row may have them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from cusearch_async.algorithm.answers import normalize_answer
from cusearch_async.environments.templates import PAPER
from cusearch_async.errors import ConfigError, first_line
from cusearch_async.surrogates import half_character
from cusearch_async.types import Question

HUB = "hf:"
SUFFIXES = (".parquet", ".jsonl", ".json")
_MARKER = "Question:"
"""What the question follows in the prompts of Search-R1 and VERL."""
_DOCUMENTS = pa.list_(pa.struct([("text", pa.string())]))
_INSTRUCTIONS = re.compile(r"</?(?:think|search|information|answer)>")


@dataclass(frozen=True, slots=True)
class Row:
    """A row as it is in the file, or what is wrong with it before it is one."""

    where: str
    """File and line, or file and row."""
    values: dict[str, Any]
    problem: str | None = None


def locate(source: str, key: str) -> Path:
    """The file of a source: a local path, or hf:OWNER/NAME/FILE of a dataset on the Hugging Face Hub, downloaded once.

    Raises: ConfigError naming `key` and what cannot be had."""
    if not source.startswith(HUB):
        path = Path(source)
        if not path.is_file():
            raise ConfigError(f"{key}: cannot read {path}: there is no such file; give a .parquet or .jsonl file")
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"{key}: {path} is a {path.suffix or 'nameless'} file; give .parquet or .jsonl")
        return path
    repository, file = hub_place(source, key)
    from huggingface_hub import hf_hub_download  # noqa: PLC0415  (slow to import, and seldom needed)

    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: cannot get {source}: {first_line(error)}") from error


def hub_place(source: str, key: str) -> tuple[str, str]:
    """ "hf:OWNER/NAME/FILE" -> ("OWNER/NAME", "FILE"). Raises: ConfigError."""
    owner, _, rest = source.removeprefix(HUB).partition("/")
    name, _, file = rest.partition("/")
    if not (owner and name and file):
        raise ConfigError(f"{key}: {source!r} must look like hf:OWNER/NAME/FILE.parquet")
    return f"{owner}/{name}", file


def read_rows(path: Path, key: str) -> Iterator[Row]:
    """Every row, or line that is none. Raises: ConfigError when the file itself cannot be read."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        else:
            yield from _json_rows(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{key}: cannot read {path}: {error}") from error


def parse_row(row: Row, stem: str, number: int) -> Question:
    """The question of a row. Raises: ConfigError naming the row and the field."""
    if row.problem is not None:
        raise ConfigError(f"{row.where}: {row.problem}")
    values = row.values
    text, answers = _question(row), _answers(row)
    source = values.get("data_source") or stem
    if not isinstance(source, str):
        raise ConfigError(f"{row.where}: 'data_source' must be text, got {source!r:.200}")
    place = values.get("extra_info") or {}
    if not isinstance(place, dict):
        raise ConfigError(f"{row.where}: 'extra_info' must hold split and index, got {place!r:.200}")
    found = (place.get("index"), values.get("id"), values.get("query_id"), number)
    index = next(index for index in found if index is not None)
    for name, value in (("index", index), ("split", place.get("split"))):
        if value is not None and not isinstance(value, str | int | float):
            raise ConfigError(f"{row.where}: {name!r} (or 'id') must be text or a number, got {value!r:.200}")
    parts = [source, *([str(place["split"])] if place.get("split") else []), str(index)]
    question = Question(
        id="/".join(parts), text=tidy(text), answers=tuple(answers), category=source, evidence=_evidence(row)
    )
    texts = [("question", text), *(("golden_answers", answer) for answer in answers), ("id", question.id)]
    texts += [("evidence_docs", evidence) for evidence in question.evidence or ()]
    for name, value in texts:
        if half := half_character(value):
            raise ConfigError(f"{row.where}: {name!r} holds half a character, {half}; fix the text")
    return question


def can_be_answered(question: Question) -> bool:
    """Whether any prediction can be right: scoring removes articles and punctuation, and of some gold answers
    ("The The", "!!!") nothing is left then."""
    return any(normalize_answer(answer) for answer in question.answers)


def _question(row: Row) -> str:
    """Raises: ConfigError."""
    values, place = row.values, row.values.get("extra_info")
    text = values.get("question")
    if text is None and isinstance(place, dict):
        text = place.get("question")
    if text is None:
        text = values.get("query")
    if text is None:
        text = _asked_in(values.get("prompt"), row.where)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{row.where}: 'question' must be non-blank text, got {text!r:.200}")
    return text


def _asked_in(prompt: Any, where: str) -> str | None:
    """The question of a chat: its last user message, or what follows "Question:" in that. Raises: ConfigError."""
    messages = prompt if isinstance(prompt, list) else []
    said = [
        message.get("content") for message in messages if isinstance(message, dict) and message.get("role") == "user"
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


def _answers(row: Row) -> list[str]:
    """Raises: ConfigError."""
    answers, name = row.values.get("golden_answers"), "golden_answers"
    if answers is None and isinstance(row.values.get("reward_model"), dict):
        truth, name = row.values["reward_model"].get("ground_truth"), "reward_model.ground_truth"
        answers = truth.get("target") if isinstance(truth, dict) else truth
    if answers is None and "answer" in row.values:
        answers, name = row.values["answer"], "answer"
    if isinstance(answers, str):
        answers = [answers]
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise ConfigError(f"{row.where}: {name!r} must be a list of non-blank texts, got {answers!r:.200}")
    return answers


def _evidence(row: Row) -> tuple[str, ...] | None:
    """The texts of `evidence_docs`. Raises: ConfigError."""
    documents = row.values.get("evidence_docs")
    if documents is None:
        return None
    texts = [document.get("text") if isinstance(document, dict) else None for document in _listed(documents)]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ConfigError(f"{row.where}: 'evidence_docs' must be a list of {{'text': ...}}, got {documents!r:.200}")
    return tuple(map(str, texts))


def _listed(value: Any) -> list[Any]:
    """A value that should be a list; one element that is no document for another."""
    return value if isinstance(value, list) else [None]


def tidy(text: str) -> str:
    """A question without blanks around it and with a question mark (Search-R1)."""
    text = text.strip()
    return text if text.endswith("?") else f"{text}?"


def write_parquet(questions: Sequence[Question], path: Path) -> None:
    """Search-R1's schema, the paper's template in `prompt`, and BrowseComp-Plus's `evidence_docs` where evidence is
    known; `read_rows` reads the same questions back."""
    rows = []
    for question in questions:
        # an id is source[/split]/index
        split, _, index = question.id.removeprefix(f"{question.category}/").rpartition("/")
        rows.append(
            {
                "id": index,
                "question": question.text,
                "golden_answers": list(question.answers),
                "data_source": question.category,
                "prompt": [{"role": "user", "content": PAPER.text.format(question=question.text)}],
                "ability": "fact-reasoning",
                "reward_model": {"style": "rule", "ground_truth": {"target": list(question.answers)}},
                "extra_info": {"split": split, "index": index},
            }
        )
    table = pa.Table.from_pylist(rows)
    if any(question.evidence is not None for question in questions):
        # from_pylist finds no type where no question has any
        documents = [
            None if question.evidence is None else [{"text": text} for text in question.evidence]
            for question in questions
        ]
        table = table.append_column("evidence_docs", pa.array(documents, _DOCUMENTS))
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path)


def _parquet_rows(path: Path) -> Iterator[Row]:
    file = parquet.ParquetFile(path)
    columns = set(file.schema_arrow.names)
    asks = columns & {"question", "extra_info", "query", "prompt"}
    answers = columns & {"golden_answers", "reward_model", "answer"}
    if not asks or not answers:
        raise ConfigError(
            f"{path}: has the columns {', '.join(sorted(columns))}; it needs 'question', 'extra_info' with a question, "
            "'query' or 'prompt', and 'golden_answers', 'reward_model' or 'answer' (the schemas of Search-R1, VERL and "
            "BrowseComp-Plus)"
        )
    wanted = asks | answers | columns & {"data_source", "extra_info", "id", "query_id", "evidence_docs"}
    if "question" in wanted:
        wanted.discard("prompt")  # long, and of no use then
    number = 0
    for batch in file.iter_batches(columns=sorted(wanted)):
        for values, problem in _values_of(batch):
            yield Row(f"{path}, row {number}", values, problem)
            number += 1


def _values_of(batch: pa.RecordBatch) -> list[tuple[dict[str, Any], str | None]]:
    """The rows of a batch, each with what is wrong with it: parquet files can hold text in another encoding."""
    try:
        return [(values, None) for values in batch.to_pylist()]
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [({}, f"is not UTF-8: {error}")]
        return [row for place in range(batch.num_rows) for row in _values_of(batch.slice(place, 1))]


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                values = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of 5,000 digits; nesting
                yield Row(where, {}, f"is not JSON: {error}")
                continue
            if isinstance(values, dict):
                yield Row(where, values)
            else:
                yield Row(where, {}, f"must be a JSON object, got {type(values).__name__}")
