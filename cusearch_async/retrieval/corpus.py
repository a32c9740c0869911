"""A corpus in a file of Search-R1's JSON lines, or a .tsv like DPR's psgs_w100.tsv, memory-mapped. A JSON array, or a
.gz file, is held in memory."""

from __future__ import annotations

import codecs
import csv
import gzip
import itertools
import json
import logging
import mmap
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import xxhash
from numpy.typing import NDArray

from cusearch_async.errors import ConfigError
from cusearch_async.retrieval.backend import OnProgress, Passage
from cusearch_async.run.provenance import fingerprint
from cusearch_async.surrogates import half_character

log = logging.getLogger(__name__)

_EVERY = 100_000
_BOM = b"\xef\xbb\xbf"
_IDS = ("id", "_id", "docid", "doc_id", "idx")
_TEXTS = ("text", "paragraph_text", "passage")
"""Columns of corpora without `contents`: BEIR's, BrowseComp-Plus's, HippoRAG's."""


_FORMS = 'lines of {"id", "contents"}, or a .tsv with a header like id, text, title'


class Corpus(Sequence[Passage]):
    """Passages of a file's lines. Only the places where lines begin are in memory: 8 bytes a passage."""

    def __init__(self, path: Path, on_progress: OnProgress = lambda done, total: None) -> None:
        """Reads every line once; progress is in bytes. Duplicate ids are logged.

        Raises: ConfigError naming the file, the line and the field."""
        self._path = path
        self._text = _mapped(path)
        self._header = _header(self._text, path)
        starts: list[int] = []
        ids = array("Q")
        position = self._text.tell()
        for number, line in _lines(self._text, self._header):
            if line.strip():
                where = f"{path}, line {number}"
                passage = _read_line(line, where, self._header)
                if half := half_character(passage["contents"]):
                    raise ConfigError(f"{where}: 'contents' contains an unpaired surrogate, {half}; fix the text")
                ids.append(xxhash.xxh3_64_intdigest(passage["id"].encode(errors="surrogatepass")))
                starts.append(position)
            position += len(line)
            if number % _EVERY == 0:
                on_progress(position, len(self._text))
        if not starts:
            raise ConfigError(f"retriever.corpus {path} holds no passages")
        on_progress(position, len(self._text))
        self.starts = np.array([*starts, len(self._text)], dtype=np.int64)
        """[passages + 1] Where each line begins, and where the last one ends."""
        _, first = np.unique(np.frombuffer(ids, dtype=np.uint64), return_index=True)
        duplicates = np.delete(np.arange(len(ids)), first)
        if len(duplicates):  # no error: parts of one document may share its id
            example = self[int(duplicates[0])]["id"]
            log.warning("%s: %d of %d passages have a duplicate id, like %r", path, len(duplicates), len(ids), example)

    @classmethod
    def opened(cls, path: Path, starts_of: Callable[[str], NDArray[np.int64]]) -> Corpus:
        """A corpus that was read before; `starts_of` gives the `starts` of the corpus with a fingerprint."""
        corpus = cls.__new__(cls)
        corpus._path, corpus._text = path, _mapped(path)
        corpus._header = _header(corpus._text, path)
        corpus.starts = starts_of(corpus.fingerprint)
        return corpus

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self._text)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, row: int) -> Passage: ...
    @overload
    def __getitem__(self, row: slice) -> list[Passage]: ...
    def __getitem__(self, row: int | slice) -> Passage | list[Passage]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        line = self._text[self.starts[row] : self.starts[row + 1]].partition(b"\n")[0]  # empty lines may follow
        return _read_line(line, f"{self._path}, row {row}", self._header)


def read_start(path: Path, most: int) -> None:
    """Read the first `most` lines. Raises: ConfigError naming the file, the line and the field."""
    text = _mapped(path)
    header = _header(text, path)
    for number, line in itertools.islice(_lines(text, header), most):
        if line.strip():
            _read_line(line, f"{path}, line {number}", header)


def _lines(text: mmap.mmap, header: Sequence[str]) -> Iterator[tuple[int, bytes]]:
    """(number, line) of each line after the header."""
    return enumerate(iter(text.readline, b""), start=2 if header else 1)


def _mapped(path: Path) -> mmap.mmap:
    """The file, or what it has packed or in an array. Raises: ConfigError."""
    if path.suffix in (".csv", ".parquet"):
        raise ConfigError(f"retriever.corpus {path} is a {path.suffix} file; it needs {_FORMS}")
    try:
        with path.open("rb") as file:
            if path.suffix != ".gz" and file.peek(1).removeprefix(_BOM).lstrip()[:1] != b"[":
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            text = _as_lines(gzip.decompress(file.read()) if path.suffix == ".gz" else file.read(), path)
        if not text:
            raise ValueError("nothing cannot be mapped")
        mapped = mmap.mmap(-1, len(text))
        mapped.write(text)
        mapped.seek(0)
        return mapped
    except ValueError as error:  # empty
        raise ConfigError(f"retriever.corpus {path} is empty; it needs {_FORMS}") from error
    except (OSError, EOFError, zlib.error) as error:
        if str(path).startswith("hf:"):
            remedy = "get it from the Hub with `hf download`, and give its path"
            raise ConfigError(f"retriever.corpus {path} must be a file of this machine; {remedy}") from error
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"retriever.corpus: cannot read {path}: {reason}; choose another") from error


def _as_lines(text: bytes, path: Path) -> bytes:
    """The objects of an array, one a line; anything else as it is. Raises: ConfigError."""
    if text.removeprefix(_BOM).lstrip()[:1] != b"[":
        return text
    try:
        passages = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is neither one JSON array nor an object a line: {error}") from error
    return b"".join(json.dumps(passage).encode() + b"\n" for passage in passages)


def _header(text: mmap.mmap, path: Path) -> list[str]:
    """The columns of a .tsv, whose first line is then read; empty for JSON lines. Raises: ConfigError."""
    if not path.name.removesuffix(".gz").endswith(".tsv"):
        return []
    csv.field_size_limit(sys.maxsize)  # passages may be long
    names = [name.strip().lower() for name in _cells(text.readline(), f"{path}, line 1")]
    if {*names}.isdisjoint(_IDS) or {*names}.isdisjoint(("contents", *_TEXTS)):
        raise ConfigError(f"{path}, line 1: must be a header like id, text, title, got {', '.join(names):.200}")
    return names


def _cells(line: bytes, where: str, count: int = 0) -> list[str]:
    """Of a line of a .tsv with `count` columns; as in CSV, one with a quotation mark is in quotation marks, unless the
    line is no CSV, or has as many columns only without that. Raises: ConfigError."""
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except ValueError as error:
        raise ConfigError(f"{where}: is not TSV: {error}") from error
    plain = text.split("\t")
    try:
        cells = next(csv.reader([text], delimiter="\t", strict=True), [])
    except csv.Error:
        cells = plain
    return plain if len(cells) != count == len(plain) else cells


def _object(line: bytes, where: str) -> dict[str, Any]:
    """Raises: ConfigError naming the line."""
    try:
        row = json.loads(line.decode("utf-8-sig"))  # which drops the mark at the beginning of a file
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of 5,000 digits; nesting
        is_utf_16 = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        remedy = "; it seems to be UTF-16: save it as UTF-8" if is_utf_16 else ""
        raise ConfigError(f"{where}: is not JSON: {error}{remedy}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: must be a JSON object, got {type(row).__name__}")
    return row


def _record(line: bytes, where: str, header: Sequence[str]) -> dict[str, Any]:
    """The cells of a line that are not empty. Raises: ConfigError."""
    cells = _cells(line, where, len(header))
    if len(cells) != len(header):
        raise ConfigError(f"{where}: has {len(cells)} cells, and the header {len(header)}")
    return {name: cell for name, cell in zip(header, cells, strict=True) if cell}


def _read_line(line: bytes, where: str, header: Sequence[str]) -> Passage:
    """`header`: the columns of a .tsv. Raises: ConfigError naming the line and the field."""
    row = _record(line, where, header) if header else _object(line, where)
    text = next((row[name] for name in _TEXTS if isinstance(row.get(name), str) and row[name].strip()), None)
    title = row.get("title")
    title = " ".join(str(title).split()) if isinstance(title, str | int) else ""  # pandas writes NaN for none
    titled = f'"{title}"\n{text}' if text and title else text  # Search-R1's form
    contents = row.get("contents", titled)
    if not isinstance(contents, str) or not contents.strip():
        there = "" if "contents" in row else f"; its fields are {', '.join(row)}"
        raise ConfigError(f"{where}: 'contents' must be non-blank text, got {contents!r:.200}{there}")
    id_ = next((row[name] for name in _IDS if row.get(name) is not None), None)
    if id_ is None:
        raise ConfigError(f"{where}: has no 'id'")
    return {"id": str(id_), "contents": contents}
