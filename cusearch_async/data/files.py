"""Question files: rows of parquet, JSON lines, JSON arrays, CSV and TSV; all but parquet may be packed as .gz.

What is written is parquet or JSON lines, which `read_rows` reads back."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cusearch_async.data import columns
from cusearch_async.environments.templates import PAPER
from cusearch_async.errors import ConfigError, hub_reason, packages_of
from cusearch_async.files import write_file
from cusearch_async.paths import at_home
from cusearch_async.surrogates import half_character
from cusearch_async.types import Question

if TYPE_CHECKING:
    import pyarrow as pa

HUB = "hf:"
SUFFIXES = (".parquet", ".jsonl", ".json", ".ndjson", ".csv", ".tsv")
PACKED = ".gz"
WRITTEN = (".parquet", ".jsonl")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_GZIP = b"\x1f\x8b"
_NOT_LINES = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[|\{\s*\n\s*\")")
"""The beginning of an array, or of an object that is written over several lines."""
_TOO_MANY = "\n"
"""The name, which no column has, of the cells that a row has more than the header."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file, or its problem."""

    where: str
    """File and line, or file and row."""
    values: dict[str, Any]
    """By folded column names."""
    problem: str | None = None
    columns: Collection[str] = ()
    """All columns of the file, as it spells them; not all are in `values`."""


def locate(source: str, key: str) -> Path:
    """The file of a source: a local path, or hf:OWNER/NAME/FILE of a dataset on the Hugging Face Hub, downloaded once.

    Raises: ConfigError naming `key` and the file."""
    if not source.startswith(HUB):
        try:
            path = Path(at_home(source))
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
        if path.is_dir():
            raise ConfigError(f"{key}: {path} is a folder; give a file in it, one of {', '.join(SUFFIXES)}")
        if not path.is_file():
            raise ConfigError(f"{key}: cannot read {path}: there is no such file; give a .parquet or .jsonl file")
        return _of_known_kind(path, key)
    repository, file = hub_place(source, key)
    _of_known_kind(Path(file), key)
    from huggingface_hub import hf_hub_download  # noqa: PLC0415  (slow to import, and seldom needed)

    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset"))
    except Exception as error:  # a connection that breaks raises what the Hub's HTTP library has
        raise ConfigError(f"{key}: cannot get {source}: {hub_reason(error)}") from error


def hub_place(source: str, key: str) -> tuple[str, str]:
    """ "hf:OWNER/NAME/FILE" -> ("OWNER/NAME", "FILE"). Raises: ConfigError."""
    owner, _, rest = source.removeprefix(HUB).partition("/")
    name, _, file = rest.partition("/")
    if not (owner and name and file):
        raise ConfigError(f"{key}: {source!r} must look like hf:OWNER/NAME/FILE.parquet")
    return f"{owner}/{name}", file


def ending(path: Path) -> str:
    """ "a/train.jsonl.gz" -> ".jsonl"."""
    return Path(path.name.removesuffix(PACKED)).suffix.lower()


def read_rows(path: Path, key: str, others: Collection[str] = ()) -> Iterator[Row]:
    """`others`: names of columns that are read, too. Raises: ConfigError when the file itself cannot be read."""
    try:
        if ending(path) == ".parquet":
            yield from _parquet_rows(path, others)
            return
        with _opened(path) as file:
            if file.peek(2)[:2] in _UTF_16:
                raise ConfigError(f"{key}: {path} is UTF-16; save it as UTF-8")
            if ending(path) in (".csv", ".tsv"):
                yield from _table_rows(path, file)
            elif ending(path) == ".json" or _NOT_LINES.match(file.peek(1 << 13)):
                yield from _whole_rows(path, file.read())
            else:
                yield from _line_rows(path, file)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise ConfigError(f"{key}: cannot read {path}: {error}") from error


def _of_known_kind(path: Path, key: str) -> Path:
    """The path. Raises: ConfigError."""
    if ending(path) not in SUFFIXES:
        kind = f"is a {path.suffix} file" if path.suffix else "has no file extension"
        raise ConfigError(f"{key}: {path} {kind}; give one of {', '.join(SUFFIXES)} (or packed, .gz)")
    if ending(path) == ".parquet" and path.suffix == PACKED:
        raise ConfigError(f"{key}: {path} is packed, and parquet is compressed already; unpack it with gzip -d")
    return path


def _opened(path: Path) -> io.BufferedReader | gzip.GzipFile:
    file = path.open("rb")
    if path.suffix != PACKED and file.peek(2)[:2] != _GZIP:
        return file
    file.close()
    return gzip.open(path)


def _parquet_rows(path: Path, others: Collection[str]) -> Iterator[Row]:
    with packages_of("eval"):
        import pyarrow as pa  # noqa: PLC0415  (only for a parquet file)
        from pyarrow import parquet  # noqa: PLC0415

    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        _check_columns(path, names)
        wanted = [name for name in names if columns.is_read(name) or columns.folded(name) in others]
        if "question" in map(columns.folded, names):
            wanted = [name for name in wanted if columns.folded(name) != "prompt"]  # long, and of no use then
        rows = (row for batch in file.iter_batches(columns=wanted) for row in _values_of(batch))
        for number, (values, problem) in enumerate(rows):
            yield Row(f"{path}, row {number}", columns.by_name(values), problem, names)
    except pa.ArrowException as error:
        raise OSError(str(error)) from error


def _values_of(batch: pa.RecordBatch) -> list[tuple[dict[str, Any], str | None]]:
    """The rows of a batch, each with its problem: parquet files can hold text in another encoding."""
    try:
        return [(values, None) for values in batch.to_pylist()]
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [({}, f"is not UTF-8: {error}")]
        return [row for place in range(batch.num_rows) for row in _values_of(batch.slice(place, 1))]


def _check_columns(path: Path, names: Collection[str]) -> None:
    """Raises: ConfigError for a table without a question, or with two columns of one name."""
    if twice := next((name for place, name in enumerate(names) if name in list(names)[:place]), None):
        raise ConfigError(f"{path}: has two columns {twice!r}; keep one of them")
    if {columns.folded(name) for name in names}.isdisjoint((*columns.QUESTION, "extra_info", "prompt")):
        raise ConfigError(f"{path}: has the columns {columns.shown(sorted(names))}; it needs {columns.NEEDED}")


def _table_rows(path: Path, file: io.BufferedReader | gzip.GzipFile) -> Iterator[Row]:
    """Cells are text, as they are: "NA" may be an answer. Blank ones count as missing."""
    csv.field_size_limit(sys.maxsize)  # evidence may be long
    head = file.peek(1 << 16).partition(b"\n")[0]
    delimiter = "\t" if ending(path) == ".tsv" else max(",;\t|", key=lambda one: head.count(one.encode()))
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.DictReader(text, restkey=_TOO_MANY, delimiter=delimiter, strict=True)
    names = reader.fieldnames or ()
    _check_columns(path, names)
    asked = {name for name in names if columns.folded(name) in (*columns.QUESTION, *columns.ANSWERS)}
    while True:
        first = reader.reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield Row(f"{path}, {_lines(first, reader.reader.line_num)}", {}, f"is not CSV: {error}")
            continue
        if cells is None:
            return
        where = f"{path}, line {reader.line_num}"
        if delimiter == "\t" and any("\t" in cell and "\n" in cell for name in asked if (cell := cells[name])):
            yield Row(f"{path}, {_lines(first, reader.line_num)}", {}, "a quotation mark is open: all is one row")
        elif _TOO_MANY in cells:
            yield Row(where, {}, f"has more than the {len(names)} cells of the header")
        elif any(half_character(cell) for cell in cells.values() if cell):
            yield Row(where, {}, "is not UTF-8")
        else:
            yield Row(where, columns.by_name({name: cell for name, cell in cells.items() if cell}), columns=names)


def _lines(first: int, last: int) -> str:
    return f"lines {first} to {last}" if last > first else f"line {last}"


def _line_rows(path: Path, file: io.BufferedReader | gzip.GzipFile) -> Iterator[Row]:
    """One JSON object a line."""
    for number, line in enumerate(file, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                # utf-8-sig drops the mark at the beginning of the file
                yield _row(where, json.loads(line.decode("utf-8-sig")))
            except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of 5,000 digits; nesting
                yield Row(where, {}, f"is not JSON: {error}")


def _whole_rows(path: Path, text: bytes) -> Iterator[Row]:
    """JSON values over several lines: [[{...}, ...]], [{"data": [{...}, ...]}] or [{...}, ...]."""
    values, place, decoder, blanks = [], 0, json.JSONDecoder(), re.compile(r"\s*")
    try:
        whole = text.decode("utf-8-sig").strip()
        while place < len(whole):
            value, place = decoder.raw_decode(whole, place)
            values.append(value)
            place = blanks.match(whole, place).end()  # type: ignore[union-attr]  # it matches nothing, too
    except (ValueError, RecursionError) as error:
        yield Row(str(path), {}, f"is neither a JSON array nor one object a line: {error}")
        return
    array = _array_in(values[0]) if len(values) == 1 else None
    for number, value in enumerate(values if array is None else array):
        yield _row(f"{path}, item {number}", value)


def _array_in(value: Any) -> list[Any] | None:
    """The rows in a file's only value; None where it is a row itself, or contains several arrays of objects."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict) or not columns.by_name(value).keys().isdisjoint((*columns.QUESTION, "prompt")):
        return None
    lists = [inner for inner in value.values() if isinstance(inner, list)]
    arrays = [inner for inner in lists if inner and all(isinstance(item, dict) for item in inner)]
    return arrays[0] if len(arrays) == 1 else None


def _row(where: str, values: Any) -> Row:
    if not isinstance(values, dict):
        return Row(where, {}, f"must be a JSON object, got {type(values).__name__}")
    return Row(where, columns.by_name(values), columns=values.keys())


def refuse_ending(path: Path, option: str) -> None:
    """Raises: ConfigError for a file of another kind."""
    if path.suffix not in WRITTEN:
        raise ConfigError(f"{option} must end in {' or '.join(WRITTEN)}, got {path}")


def write_questions(questions: Sequence[Question], path: Path) -> None:
    """Search-R1's schema, the paper's template in `prompt`; BrowseComp-Plus's `evidence_docs` where evidence is known,
    and `metadata` where there is any (in parquet as JSON text, because rows have different keys)."""
    if path.suffix == ".jsonl":
        rows = [_columns(question) | _known(question) for question in questions]
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        write_file(path, "".join(lines).encode())
        return
    with packages_of("eval"):
        import pyarrow as pa  # noqa: PLC0415  (only for a parquet file)
        from pyarrow import parquet  # noqa: PLC0415

    table = pa.Table.from_pylist([_columns(question) for question in questions])
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


def _columns(question: Question) -> dict[str, Any]:
    # an id is source[/split]/index
    split, _, index = question.id.removeprefix(f"{question.category}/").rpartition("/")
    answers = list(question.answers)
    return {
        **{"id": index, "question": question.text, "golden_answers": answers, "data_source": question.category},
        "prompt": [{"role": "user", "content": PAPER.text.format(question=question.text)}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "extra_info": {"split": split, "index": index},
    }


def _known(question: Question) -> dict[str, Any]:
    """The columns that not every question has."""
    evidence, metadata = question.evidence, question.metadata
    known: dict[str, Any] = {} if evidence is None else {"evidence_docs": [{"text": text} for text in evidence]}
    return known | ({"metadata": dict(metadata)} if metadata else {})
