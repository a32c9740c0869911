"""BM25 over passages, by the bm25s library, and the words that it counts."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import regex
import xxhash
from numpy.typing import NDArray

from cusearch_async.errors import ConfigError, packages_of
from cusearch_async.extensions import load_function
from cusearch_async.files import put_in_place, remove, write_file, writing
from cusearch_async.folding import UNSPACED, folded
from cusearch_async.retrieval import manifest
from cusearch_async.retrieval.backend import OnProgress, Passage, Scored

# bm25s calls JAX where it is installed, and JAX takes three quarters of a GPU that it sees.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
with packages_of("retrieval"):
    import bm25s
    import numba  # noqa: F401  (bm25s scores with it)

log = logging.getLogger(__name__)
logging.getLogger("bm25s").setLevel(logging.WARNING)  # it would log every step

FORMAT = 1
_INDEX = "bm25"
_CHUNK = 50_000
_MOST_WORDS = 256
"""Of a query: each word costs a pass over all passages that have it, and other searches wait."""

Tokenizer = Callable[[str], Iterable[str]]
"""The words of a folded text (see `folding`)."""
UNICODE = "unicode"

_RUN = regex.compile(r"[\w\p{M}\p{N}]+")
_CHARACTER = rf"[{UNSPACED}\p{{Hangul}}]\p{{M}}*"
_PIECE = regex.compile(rf"(?:{_CHARACTER})+|[^{UNSPACED}\p{{Hangul}}]{{2,}}", regex.V1)
_CHARACTERS = regex.compile(_CHARACTER, regex.V1)
_SAMPLE = (
    "The capital of Peru is Lima, 9.7 million. 秘鲁的首都是利马。ペルーの首都はリマです。페루의 수도는 리마이다. "
    "เมืองหลวงของเปรูคือลิมา पेरू की राजधानी लीमा है। عاصمة بيرو هي ليما"
)


def unicode_words(text: str) -> list[str]:
    """Words of two letters or digits and more, as bm25s finds them in English. Where a script writes no spaces, and in
    Hangul, where endings are written on words: each character, and each two neighbours (as Lucene's CJKAnalyzer, with
    its single characters).

    "peru 秘鲁首都" -> ["peru", "秘", "鲁", "首", "都", "秘鲁", "鲁首", "首都"]."""
    words = []
    for run in _RUN.findall(text):
        if run.isascii():
            words += [run] if len(run) > 1 else []
            continue
        for piece in _PIECE.findall(run):
            characters = _CHARACTERS.findall(piece)
            words += [*characters, *map("".join, itertools.pairwise(characters))] if characters else [piece]
    return words


def words_of(text: str, tokenizer: Tokenizer) -> list[str]:
    """The words of any text: of a passage and of a query alike."""
    words = tokenizer(folded(text))
    if isinstance(words, str):  # else its letters would be the words
        raise TypeError(f"it gave one text, {words!r:.60}")
    return [word for word in words if word.strip()]


def tokenizer_named(name: str) -> Tokenizer:
    """`unicode`, or a user's own as package.module:function. Raises: ConfigError when it gives no words."""
    if name == UNICODE:
        return unicode_words
    key = "retriever.bm25.tokenizer"
    own: Tokenizer = load_function(key, name, (UNICODE,))
    try:
        words_of(_SAMPLE, own)
    except Exception as error:  # whatever a user's function does
        problem = f"must give the words of a text as a list of texts ({type(error).__name__}: {error})"
        raise ConfigError(f"{key}: {name} {problem}") from error
    return own


def identity(tokenizer: Tokenizer) -> str:
    """Its name, and a checksum of what it makes of a sample, so that an index by another version of it is known."""
    words = "\n".join(words_of(_SAMPLE, tokenizer))
    named = tokenizer if hasattr(tokenizer, "__qualname__") else type(tokenizer)
    return f"{named.__module__}:{named.__qualname__} ({xxhash.xxh3_64_hexdigest(words.encode())[:8]})"


class Bm25Index:
    """Ranking is deterministic: equal queries give equal results. (The order of passages of equal score may differ
    between an index in memory and one in a folder.)"""

    def __init__(self, passages: Sequence[Passage], index: Any, tokenizer: Tokenizer) -> None:
        self.passages, self._index, self._tokenizer = passages, index, tokenizer

    @classmethod
    def in_memory(cls, passages: Sequence[Passage], tokenizer: Tokenizer = unicode_words) -> Bm25Index:
        """Raises: ValueError without a word in the passages."""
        vocabulary: dict[str, int] = {}
        ids = _numbered(passages, tokenizer, vocabulary)
        return cls(passages, _index_of(ids, vocabulary), tokenizer)

    @classmethod
    def load(cls, folder: Path, passages: Sequence[Passage], tokenizer: Tokenizer, fingerprint: str) -> Bm25Index:
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
        tokens = [words_of(query, self._tokenizer)[:_MOST_WORDS] for query in queries]
        asked = {number: words for number, words in enumerate(tokens) if words}
        found: list[list[Scored]] = [[] for _ in queries]
        if asked:
            best = self._index.retrieve(list(asked.values()), k=min(topk, len(self.passages)), show_progress=False)
            for number, rows, scores in zip(asked, *(part.tolist() for part in best), strict=True):
                pairs = zip(rows, scores, strict=True)
                found[number] = [(self.passages[row], score) for row, score in pairs if score > 0]
        return found


def build(
    passages: Sequence[Passage], folder: Path, tokenizer: Tokenizer, fingerprint: str, on_progress: OnProgress
) -> None:
    """Make the index of a corpus in `folder`. What was tokenised before an interruption is not tokenised again."""
    chunks, dependencies = folder / "chunks", _dependencies(fingerprint, len(passages), tokenizer)
    source, made_of = chunks / "made_of.json", json.dumps(dependencies)
    if chunks.exists() and not (source.exists() and source.read_text(encoding="utf-8") == made_of):
        log.warning("%s holds parts of another corpus, or of another tokenizer; starting again", chunks)
        shutil.rmtree(chunks)
    chunks.mkdir(parents=True, exist_ok=True)
    write_file(source, made_of.encode())
    vocabulary: dict[str, int] = {}
    ids = _Rows()
    for first in range(0, len(passages), _CHUNK):
        file = chunks / f"{first:012d}.npz"
        if not file.exists():
            _save_chunk(file, passages[first : first + _CHUNK], tokenizer)
        ids.append(*_load_chunk(file, vocabulary))
        on_progress(min(first + _CHUNK, len(passages)), len(passages))
    index, old = folder / _INDEX, folder / f"{_INDEX}.old"
    with writing(index) as unfinished:
        _index_of(ids, vocabulary).save(unfinished, show_progress=False)
    manifest.break_seal(index)
    remove(old)
    if index.exists():  # moved away, not written over: a retriever may be reading it
        index.rename(old)
    put_in_place(index)
    remove(old)
    manifest.seal(index, dependencies)
    shutil.rmtree(chunks)


class _Rows:
    """The word ids of many passages, a list each as they are read: all these lists at once would take nine times the
    memory."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.int32], NDArray[np.int64]]] = []

    def append(self, flat: NDArray[np.int32], ends: NDArray[np.int64]) -> None:
        """Passages end to end, and where in `flat` each ends."""
        self._parts.append((flat, ends))

    def __len__(self) -> int:
        return sum(len(ends) for _, ends in self._parts)

    def __iter__(self) -> Iterator[list[int]]:
        for flat, ends in self._parts:
            for start, end in itertools.pairwise((0, *ends.tolist())):
                yield flat[start:end].tolist()


def _index_of(ids: Iterable[list[int]], vocabulary: dict[str, int]) -> Any:
    """Raises: ValueError when there is no word at all."""
    if not any(len(row) for row in ids):
        raise ValueError("the tokenizer finds no word in the corpus; BM25 has nothing to search for")
    index = bm25s.BM25(method="lucene")
    index.index(SimpleNamespace(ids=ids, vocab=vocabulary), show_progress=False)
    return index


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


def _load_chunk(file: Path, vocabulary: dict[str, int]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The chunk's passages as ids of the whole `vocabulary`, which grows, and where each ends."""
    with np.load(file) as saved:
        words = json.loads(saved["words"].tobytes())
        flat, lengths = saved["ids"], saved["lengths"]
    renumbered = np.array([vocabulary.setdefault(word, len(vocabulary)) for word in words], dtype=np.int32)
    return renumbered[flat], np.cumsum(lengths, dtype=np.int64)


def _dependencies(fingerprint: str, passages: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """What an index depends on."""
    return {"format": FORMAT, "corpus": fingerprint, "passages": passages, "tokenizer": identity(tokenizer)}
