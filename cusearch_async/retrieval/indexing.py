"""A local index: made in memory or in a folder, or loaded from there; and as a backend of the retriever."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from cusearch_async.concurrency import Batcher
from cusearch_async.config import RetrieverConfig
from cusearch_async.errors import ConfigError
from cusearch_async.files import put_in_place, writing
from cusearch_async.retrieval import manifest
from cusearch_async.retrieval.backend import OnProgress, Passage, Query, Scored
from cusearch_async.retrieval.corpus import Corpus
from cusearch_async.streams import Stream, stream

_AT_ONCE = 64
_LONGEST_QUERY = 1 << 14
"""In characters; what follows is not searched for: others wait for a query of megabytes."""
_OWN = ("manifest.json", "progress.json", "chunks", "bm25", "bm25.old", "index.faiss", "vectors.f32")
"""What `build` makes beside the places of the passages, which it makes first."""


class Index(Protocol):
    passages: Sequence[Passage]

    def search(self, queries: Sequence[str], topk: int) -> list[list[Scored]]: ...


class Reranks(Protocol):
    def rerank(self, queries: Sequence[str], found: Sequence[Sequence[Scored]], topk: int) -> list[list[Scored]]: ...


@dataclass(frozen=True, slots=True)
class Degradation:
    """Makes a local index answer like the web, by the retriever's settings: with other documents, and late."""

    settings: RetrieverConfig
    seed: int = 0

    @property
    def disturbs(self) -> bool:
        return bool(self.settings.noise or self.settings.distractors)

    def disturb(self, found: list[Scored], passages: Sequence[Passage], topk: int, query: Query) -> list[Scored]:
        """The result of one search, with noise and distractors."""
        if not self.disturbs:
            return found
        seed = query.seed if self.settings.stochastic else xxhash.xxh32_intdigest(query.text.encode(errors="replace"))
        rng = stream(Stream.DISTRACTORS, self.seed, seed)
        if rng.random() < self.settings.noise:
            return [(passages[i], 0.0) for i in rng.integers(len(passages), size=topk).tolist()]
        kept = found[: max(1, len(found) - self.settings.distractors)]
        return kept + [(passages[i], 0.0) for i in rng.integers(len(passages), size=len(found) - len(kept)).tolist()]

    def latency_s(self, seed: int) -> float:
        """Log-normal waiting time with the given median and 99th percentile, cut at `longest_latency_s`."""
        median_s, p99_s = self.settings.latency_median_s, self.settings.latency_p99_s
        if not median_s:
            return 0.0
        sigma = math.log(p99_s / median_s) / 2.3263
        drawn_s = median_s * math.exp(sigma * stream(Stream.LATENCY, self.seed, seed).standard_normal())
        return min(drawn_s, self.settings.longest_latency_s)


class IndexBackend:
    """A `Backend` over an index, with a reranker or without."""

    def __init__(self, index: Index, degradation: Degradation, reranker: Reranks | None = None) -> None:
        self._index, self._degradation, self._reranker = index, degradation, reranker
        self.passages = index.passages
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")
        self._together: Batcher[tuple[str, int], list[Scored]] = Batcher(self._search_batch, _AT_ONCE)

    async def search(self, queries: Sequence[Query], topk: int) -> list[list[Scored]]:
        degradation = self._degradation
        found = await asyncio.gather(*(self._together((query.text[:_LONGEST_QUERY], topk)) for query in queries))
        await asyncio.sleep(max((degradation.latency_s(query.seed) for query in queries), default=0.0))
        return [
            degradation.disturb(result, self.passages, topk, query)
            for result, query in zip(found, queries, strict=True)
        ]

    @property
    def deterministic(self) -> bool:
        """An index and a reranker always are; noise and distractors may depend on the seed."""
        return not (self._degradation.disturbs and self._degradation.settings.stochastic)

    @property
    def accepts_seed(self) -> bool:
        return not self.deterministic or bool(self._degradation.settings.latency_median_s)

    def figures(self) -> dict[str, str | int | float]:
        return {"passages": len(self.passages)}

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _search_batch(self, asked: Sequence[tuple[str, int]]) -> list[list[Scored]]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._search, asked)

    def _search(self, asked: Sequence[tuple[str, int]]) -> list[list[Scored]]:
        """Each query's own number of documents, and the same ones whatever the others ask for."""
        found: list[list[Scored]] = [[] for _ in asked]
        for topk in {topk for _, topk in asked}:  # another cut leaves others of equal scores
            places = [place for place, one in enumerate(asked) if one[1] == topk]
            for place, result in zip(places, self._of_topk([asked[place][0] for place in places], topk), strict=True):
                found[place] = result
        return found

    def _of_topk(self, texts: Sequence[str], topk: int) -> list[list[Scored]]:
        if self._reranker is None:
            return self._index.search(texts, topk)
        candidates = self._index.search(texts, max(topk, self._degradation.settings.rerank.candidates))
        return self._reranker.rerank(texts, candidates, topk)


def in_memory(passages: Sequence[Passage], settings: RetrieverConfig) -> Index:
    """Raises: ConfigError."""
    with _bad_corpus_named(settings):
        _, kind, options = _parts(settings)
        index: Index = kind.in_memory(passages, options)
        return index


def _refuse_foreign(folder: Path) -> None:
    """Raises: ConfigError where a file would be replaced that no index of ours has left there."""
    there = sorted(name for name in _OWN if (folder / name).exists())
    if there and not any(folder.glob(_starts_file(folder, "*").name)):
        raise ConfigError(
            f"retriever.index {folder} holds {', '.join(there)}, which `cusearch index` has not made; choose an empty "
            "folder"
        )


def check(settings: RetrieverConfig) -> None:
    """Before a corpus is read. Raises: ConfigError where no index can be made with these settings."""
    _, _, options = _parts(settings)
    if settings.backend == "dense":
        from cusearch_async.retrieval.encoder_folder import resolved  # noqa: PLC0415  (the Hub's library, likewise)

        resolved(options)


def build(corpus: Corpus, folder: Path, settings: RetrieverConfig, on_progress: OnProgress) -> None:
    """Make the index of a corpus in `folder`; continues where it was interrupted. Raises: ConfigError."""
    make, _, options = _parts(settings)
    _refuse_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    starts = _starts_file(folder, corpus.fingerprint)  # an index of another corpus serves until this one is made
    with writing(starts) as unfinished:
        np.save(unfinished, corpus.starts)
    put_in_place(starts)
    with _bad_corpus_named(settings):
        make(corpus, folder, options, corpus.fingerprint, on_progress)
    for other in {*folder.glob(_starts_file(folder, "*").name)} - {starts}:
        other.unlink()


def load(path: Path, folder: Path, settings: RetrieverConfig) -> Index:
    """The index of the corpus at `path` that `build` has made in `folder`.

    Raises: ConfigError when the index is missing, damaged, or of another corpus."""

    def starts_of(fingerprint: str) -> NDArray[np.int64]:
        try:
            starts: NDArray[np.int64] = np.load(_starts_file(folder, fingerprint), mmap_mode="r")
        except FileNotFoundError as error:
            there = any(folder.glob(_starts_file(folder, "*").name))
            what = "was made from another corpus than retriever.corpus" if there else "holds no finished index"
            raise ConfigError(f"retriever.index {folder} {what}; build it with `cusearch index CONFIG`") from error
        except (OSError, ValueError, EOFError) as error:
            raise manifest.damaged(_starts_file(folder, fingerprint), str(error)) from error
        return starts

    corpus, (_, kind, options) = Corpus.opened(path, starts_of), _parts(settings)
    index: Index = kind.load(folder, corpus, options, corpus.fingerprint)
    return index


def _starts_file(folder: Path, fingerprint: str) -> Path:
    return folder / f"passages-{fingerprint}.npy"


def reranker(settings: RetrieverConfig) -> Reranks | None:
    if settings.rerank.model is None:
        return None
    from cusearch_async.retrieval.rerank import Reranker  # noqa: PLC0415  (torch only where it is needed)

    return Reranker(settings.rerank, settings.dense.device)


def _parts(settings: RetrieverConfig) -> tuple[Any, Any, Any]:
    """What makes the index in a folder, its class, and the options of both. Raises: ConfigError."""
    if settings.backend == "bm25":
        from cusearch_async.retrieval import bm25  # noqa: PLC0415  (numba only where it is needed)

        return bm25.build, bm25.Bm25Index, bm25.tokenizer_named(settings.bm25.tokenizer)
    if settings.backend == "dense":
        from cusearch_async.retrieval import dense  # noqa: PLC0415  (FAISS and torch, likewise)

        return dense.build, dense.DenseIndex, settings.dense
    raise ConfigError(f"retriever.backend {settings.backend!r} has no index; bm25 and dense have")


@contextmanager
def _bad_corpus_named(settings: RetrieverConfig) -> Iterator[None]:
    """Raises: ConfigError for a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"retriever.corpus {settings.corpus}: {error}") from error
