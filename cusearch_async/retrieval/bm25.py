"""BM25 over passages, by the bm25s library."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cusearch_async.errors import packages_of
from cusearch_async.files import put_in_place, remove, write_file, writing
from cusearch_async.retrieval import manifest
from cusearch_async.retrieval.backend import Passage, Scored
from cusearch_async.retrieval.words import Tokenizer, identity, unicode_words, words_of

with packages_of("retrieval"):
    import bm25s
    import numba  # noqa: F401  (bm25s scores with it)

log = logging.getLogger(__name__)
logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to tell every step

FORMAT = 1
_INDEX = "bm25"
_CHUNK = 50_000


class Bm25Index:
    """Ranking is deterministic: equal queries give equal results. (In which order passages of equal score come may
    differ between an index in memory and one in a folder.)"""

    def __init__(self, passages: Sequence[Passage], index: Any, tokenizer: Tokenizer) -> None:
        self.passages = passages
        self._index = index
        self._tokenizer = tokenizer

    @classmethod
    def in_memory(cls, passages: Sequence[Passage], tokenizer: Tokenizer = unicode_words) -> Bm25Index:
        """Raises: ValueError without passages, without a word in them, or when one lacks `id` or `contents`."""
        if not passages:
            raise ValueError("the corpus has no passages; BM25 needs at least one")
        for row, passage in enumerate(passages):
            if not passage.get("contents", "").strip() or "id" not in passage:
                raise ValueError(f"corpus row {row} needs a non-blank 'contents' and an 'id', got {passage!r:.200}")
        vocabulary: dict[str, int] = {}
        ids = _numbered(passages, tokenizer, vocabulary)
        return cls(passages, _index_of(ids, vocabulary), tokenizer)

    @classmethod
    def load(cls, folder: Path, passages: Sequence[Passage], fingerprint: str, tokenizer: Tokenizer) -> Bm25Index:
        """An index that `build` has made, memory-mapped.

        Raises: ConfigError when there is none, or it is of another corpus or tokenizer, or damaged."""
        path = folder / _INDEX
        manifest.check(path, _dependencies(fingerprint, len(passages), tokenizer), missing="no finished index")
        try:
            index = bm25s.BM25.load(path, mmap=True, show_progress=False)
            index.backend = "numba"  # on a million passages six times as fast; a small corpus is not worth its start
            index.activate_numba_scorer()
        except (OSError, ValueError, KeyError) as error:
            raise manifest.damaged(path, str(error)) from error
        loaded = cls(passages, index, tokenizer)
        loaded.search([passages[0]["contents"]], 1)  # numba compiles now, and not while an episode waits
        return loaded

    def search(self, queries: Sequence[str], topk: int) -> list[list[Scored]]:
        """The `topk` best passages of each query, best first; only passages that share a word with it."""
        tokens = [words_of(query, self._tokenizer) for query in queries]
        found: list[list[Scored]] = [[] for _ in queries]
        asked = [number for number, words in enumerate(tokens) if words]
        if asked:
            topk = min(topk, len(self.passages))
            rows, scores = self._index.retrieve([tokens[number] for number in asked], k=topk, show_progress=False)
            for number, of_query, their_scores in zip(asked, rows.tolist(), scores.tolist(), strict=True):
                pairs = zip(of_query, their_scores, strict=True)
                found[number] = [(self.passages[row], score) for row, score in pairs if score > 0]
        return found


def build(
    passages: Sequence[Passage],
    folder: Path,
    fingerprint: str,
    tokenizer: Tokenizer,
    on_progress: Callable[[int, int], None],
) -> None:
    """Make the index of a corpus in `folder`. What was tokenised before an interruption is not tokenised again.

    `on_progress` is called with the passages done and the total."""
    chunks = folder / "chunks"
    dependencies = _dependencies(fingerprint, len(passages), tokenizer)
    _begin(folder, chunks, dependencies)
    vocabulary: dict[str, int] = {}
    ids: list[list[int]] = []
    for first in range(0, len(passages), _CHUNK):
        file = chunks / f"{first:012d}.npz"
        if not file.exists():
            _save_chunk(file, passages[first : first + _CHUNK], tokenizer)
        ids += _load_chunk(file, vocabulary)
        on_progress(min(first + _CHUNK, len(passages)), len(passages))
    index, old = folder / _INDEX, folder / f"{_INDEX}.old"
    with writing(index) as unfinished:
        _index_of(ids, vocabulary).save(unfinished, show_progress=False)
    remove(old)
    if index.exists():  # moved away, not written over: a retriever may be reading it
        index.rename(old)
    put_in_place(index)
    remove(old)
    manifest.seal(index, dependencies)
    shutil.rmtree(chunks)


def _index_of(ids: Any, vocabulary: dict[str, int]) -> Any:
    """Raises: ValueError when there is no word at all."""
    if not any(len(row) for row in ids):
        raise ValueError("the tokenizer finds no word in the corpus; BM25 has nothing to search for")
    index = bm25s.BM25(method="lucene")
    index.index((ids, vocabulary), show_progress=False)
    return index


def _begin(folder: Path, chunks: Path, dependencies: Mapping[str, Any]) -> None:
    """Chunks of the same corpus and tokenizer are kept, others are dropped."""
    source, made_of = chunks / "made_of.json", json.dumps(dependencies)
    if chunks.exists() and not (source.exists() and source.read_text(encoding="utf-8") == made_of):
        log.warning("%s holds parts of another corpus, or of another tokenizer; starting again", chunks)
        shutil.rmtree(chunks)
    manifest.break_seal(folder / _INDEX)
    chunks.mkdir(parents=True, exist_ok=True)
    write_file(source, made_of.encode())


def _numbered(passages: Sequence[Passage], tokenizer: Tokenizer, vocabulary: dict[str, int]) -> list[list[int]]:
    """Each passage's words as numbers of the `vocabulary`, which grows."""
    return [
        [vocabulary.setdefault(word, len(vocabulary)) for word in words_of(passage["contents"], tokenizer)]
        for passage in passages
    ]


def _save_chunk(file: Path, passages: Sequence[Passage], tokenizer: Tokenizer) -> None:
    """Flat word ids, their number per passage, and the words in the order of their ids."""
    vocabulary: dict[str, int] = {}
    rows = _numbered(passages, tokenizer, vocabulary)
    with writing(file) as unfinished:
        np.savez(
            unfinished,
            ids=np.array(list(itertools.chain.from_iterable(rows)), dtype=np.int32),
            lengths=np.array([len(row) for row in rows], dtype=np.int32),
            words=np.frombuffer(json.dumps(list(vocabulary)).encode(), dtype=np.uint8),
        )
    put_in_place(file)


def _load_chunk(file: Path, vocabulary: dict[str, int]) -> list[list[int]]:
    """The chunk's passages as ids of the whole `vocabulary`, which grows."""
    with np.load(file) as saved:
        words = json.loads(saved["words"].tobytes())
        flat, lengths = saved["ids"], saved["lengths"]
    renumbered = np.array([vocabulary.setdefault(word, len(vocabulary)) for word in words], dtype=np.int32)
    return [row.tolist() for row in np.split(renumbered[flat], np.cumsum(lengths)[:-1])]


def _dependencies(fingerprint: str, passages: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """What an index depends on."""
    return {"format": FORMAT, "corpus": fingerprint, "passages": passages, "tokenizer": identity(tokenizer)}
