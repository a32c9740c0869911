"""Writes questions as parquet or JSON lines that `read_rows` reads back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cusearch_async.environments.templates import PAPER
from cusearch_async.errors import ConfigError, packages_of
from cusearch_async.files import write_file
from cusearch_async.types import Question

ENDINGS = (".parquet", ".jsonl")


def refuse_ending(path: Path, option: str) -> None:
    """Raises: ConfigError for a file of another kind."""
    if path.suffix not in ENDINGS:
        raise ConfigError(f"{option} must end in {' or '.join(ENDINGS)}, got {path}")


def write_questions(questions: Sequence[Question], path: Path) -> None:
    """Search-R1's schema, the paper's template in `prompt`; BrowseComp-Plus's `evidence_docs` where evidence is known,
    and `metadata` where there is any (in parquet as JSON text, because rows have different keys)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        rows = [_row(question) | _known(question) for question in questions]
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        write_file(path, "".join(lines).encode())
        return
    with packages_of("eval"):
        import pyarrow as pa  # noqa: PLC0415  (only for a parquet file)
        from pyarrow import parquet  # noqa: PLC0415

    table = pa.Table.from_pylist([_row(question) for question in questions])
    known = [_known(question) for question in questions]
    if any("evidence_docs" in one for one in known):
        # from_pylist finds no type where no question has any
        documents = pa.list_(pa.struct([("text", pa.string())]))
        table = table.append_column("evidence_docs", pa.array([one.get("evidence_docs") for one in known], documents))
    if any("metadata" in one for one in known):
        texts = [json.dumps(one["metadata"], default=str) if "metadata" in one else None for one in known]
        table = table.append_column("metadata", pa.array(texts, pa.string()))
    with path.open("wb") as file:  # given a path, pyarrow deletes what it cannot write to, also a device
        parquet.write_table(table, file)


def _row(question: Question) -> dict[str, Any]:
    # an id is source[/split]/index
    split, _, index = question.id.removeprefix(f"{question.category}/").rpartition("/")
    return {
        "id": index,
        "question": question.text,
        "golden_answers": list(question.answers),
        "data_source": question.category,
        "prompt": [{"role": "user", "content": PAPER.text.format(question=question.text)}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.answers)}},
        "extra_info": {"split": split, "index": index},
    }


def _known(question: Question) -> dict[str, Any]:
    """The columns that not every question has."""
    known: dict[str, Any] = {}
    if question.evidence is not None:
        known["evidence_docs"] = [{"text": text} for text in question.evidence]
    if question.metadata:
        known["metadata"] = dict(question.metadata)
    return known
