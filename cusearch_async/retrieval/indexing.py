"""The index that a config asks for: made in memory, made in a folder, or loaded from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cusearch_async.config import RetrieverConfig
from cusearch_async.errors import ConfigError
from cusearch_async.files import put_in_place, writing
from cusearch_async.retrieval.backend import Passage
from cusearch_async.retrieval.corpus import Corpus
from cusearch_async.retrieval.local import Index, Reranks
from cusearch_async.retrieval.words import tokenizer_named

STARTS = "passages.npy"

# bm25, dense and rerank bring numba, FAISS and torch, and only who asks for them waits for that.


def in_memory(passages: Sequence[Passage], settings: RetrieverConfig) -> Index:
    """Raises: ConfigError."""
    if settings.backend == "bm25":
        from cusearch_async.retrieval.bm25 import Bm25Index  # noqa: PLC0415

        with _bad_corpus_named(settings):
            return Bm25Index.in_memory(passages, tokenizer_named(settings.bm25.tokenizer))
    from cusearch_async.retrieval.dense import DenseIndex  # noqa: PLC0415

    return DenseIndex.in_memory(passages, settings.dense)


def build(corpus: Corpus, folder: Path, settings: RetrieverConfig, on_progress: Callable[[int, int], None]) -> None:
    """Make the index of a corpus in `folder`; goes on where it was interrupted. Raises: ConfigError."""
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder / STARTS) as unfinished:
        np.save(unfinished, corpus.starts)
    put_in_place(folder / STARTS)
    if settings.backend == "bm25":
        from cusearch_async.retrieval import bm25  # noqa: PLC0415

        with _bad_corpus_named(settings):
            bm25.build(corpus, folder, corpus.fingerprint, tokenizer_named(settings.bm25.tokenizer), on_progress)
    elif settings.backend == "dense":
        from cusearch_async.retrieval import dense  # noqa: PLC0415

        dense.build(corpus, folder, settings.dense, corpus.fingerprint, on_progress)
    else:
        raise ConfigError(f"retriever.backend {settings.backend!r} has no index; bm25 and dense have")


@contextmanager
def _bad_corpus_named(settings: RetrieverConfig) -> Iterator[None]:
    """Raises: ConfigError for a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"retriever.corpus {settings.corpus}: {error}") from error


def load(path: Path, folder: Path, settings: RetrieverConfig) -> Index:
    """The index of the corpus at `path` that `build` has made in `folder`.

    Raises: ConfigError when the index is missing, damaged, or of another corpus."""
    try:
        starts = np.load(folder / STARTS, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"retriever.index {folder} holds no finished index; build it with `cusearch index CONFIG`"
        ) from error
    corpus = Corpus.opened(path, starts)
    if settings.backend == "bm25":
        from cusearch_async.retrieval.bm25 import Bm25Index  # noqa: PLC0415

        return Bm25Index.load(folder, corpus, corpus.fingerprint, tokenizer_named(settings.bm25.tokenizer))
    from cusearch_async.retrieval.dense import DenseIndex  # noqa: PLC0415

    return DenseIndex.load(folder, corpus, settings.dense, corpus.fingerprint)


def reranker(settings: RetrieverConfig) -> Reranks | None:
    if settings.rerank.model is None:
        return None
    from cusearch_async.retrieval.rerank import Reranker  # noqa: PLC0415

    return Reranker(settings.rerank, settings.dense.device)
