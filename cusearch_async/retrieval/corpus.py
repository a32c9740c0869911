"""A corpus in a file of Search-R1's JSON lines, memory-mapped. A JSON array, or a .gz file, is held in memory."""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import logging
import mmap
import zlib
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import overload

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


class Corpus(Sequence[Passage]):
    """Passages of {"id", "contents"} lines. Only the places where lines begin are in memory: 8 bytes a passage."""

    def __init__(self, path: Path, on_progress: OnProgress = lambda done, total: None) -> None:
        """Reads every line once; progress is in bytes. Duplicate ids are logged.

        Raises: ConfigError naming the file, the line and the field."""
        self._path = path
        self._text = _mapped(path)
        starts: list[int] = []
        ids = array("Q")
        position = 0
        for number, line in enumerate(iter(self._text.readline, b""), start=1):
            if line.strip():
                where = f"{path}, line {number}"
                passage = _read_line(line, where)
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
        return _read_line(self._text[self.starts[row] : self.starts[row + 1]], f"{self._path}, row {row}")


def read_start(path: Path, most: int) -> None:
    """Read the first `most` lines. Raises: ConfigError naming the file, the line and the field."""
    for number, line in enumerate(itertools.islice(iter(_mapped(path).readline, b""), most), start=1):
        if line.strip():
            _read_line(line, f"{path}, line {number}")


def _mapped(path: Path) -> mmap.mmap:
    """The file, or what it has packed or in an array. Raises: ConfigError."""
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
        raise ConfigError(f'retriever.corpus {path} is empty; it needs lines of {{"id", "contents"}}') from error
    except (OSError, EOFError, zlib.error) as error:
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


def _read_line(line: bytes, where: str) -> Passage:
    """Raises: ConfigError naming the line and the field."""
    try:
        row = json.loads(line.decode("utf-8-sig"))  # which drops the mark at the beginning of a file
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of 5,000 digits; nesting
        is_utf_16 = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        remedy = "; it seems to be UTF-16: save it as UTF-8" if is_utf_16 else ""
        raise ConfigError(f"{where}: is not JSON: {error}{remedy}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: must be a JSON object, got {type(row).__name__}")
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
