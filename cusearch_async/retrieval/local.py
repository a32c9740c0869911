"""An index on this machine as a backend: concurrent searches are made in batches, in a thread of their own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import xxhash

from cusearch_async.batcher import Batcher
from cusearch_async.retrieval.backend import Passage, Query, Scored
from cusearch_async.streams import Stream, stream

_AT_ONCE = 64


class Index(Protocol):
    passages: Sequence[Passage]

    def search(self, queries: Sequence[str], topk: int) -> list[list[Scored]]: ...


class Reranks(Protocol):
    def rerank(self, queries: Sequence[str], found: Sequence[Sequence[Scored]], topk: int) -> list[list[Scored]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Degradation:
    """Makes a local index answer like the web: with other documents, and late."""

    distractors: int = 0
    """Of the documents found, how many are replaced by random ones; the best one stays."""
    noise: float = 0.0
    """Probability that a search returns random documents only."""
    stochastic: bool = True
    """Whether both are drawn for each search; else for each query, so that equal queries have equal results."""
    latency_median_s: float = 0.0
    latency_p99_s: float = 0.0
    seed: int = 0

    @property
    def disturbs(self) -> bool:
        return bool(self.noise or self.distractors)

    def disturb(self, found: list[Scored], passages: Sequence[Passage], topk: int, query: Query) -> list[Scored]:
        """The result of one search, with what its draw does to it."""
        if not self.disturbs:
            return found
        draw = query.draw if self.stochastic else xxhash.xxh32_intdigest(query.text.encode())
        rng = stream(Stream.DISTRACTORS, self.seed, draw)
        if rng.random() < self.noise:
            return [(passages[i], 0.0) for i in rng.integers(len(passages), size=topk).tolist()]
        kept = found[: max(1, len(found) - self.distractors)]
        return kept + [(passages[i], 0.0) for i in rng.integers(len(passages), size=len(found) - len(kept)).tolist()]

    def latency_s(self, draw: int) -> float:
        """Log-normal waiting time with the given median and 99th percentile."""
        if not self.latency_median_s:
            return 0.0
        sigma = math.log(self.latency_p99_s / self.latency_median_s) / 2.3263
        normal = stream(Stream.LATENCY, self.seed, draw).standard_normal()
        return self.latency_median_s * math.exp(sigma * normal)


class IndexBackend:
    """A `Backend` over an index, with a reranker or without."""

    def __init__(
        self,
        index: Index,
        degradation: Degradation,
        reranker: Reranks | None = None,
        candidates: int = 0,
    ) -> None:
        """With a reranker, `candidates` documents are found before the best topk of them are kept."""
        self._index = index
        self._degradation = degradation
        self._reranker = reranker
        self._candidates = candidates
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")
        self._together: Batcher[tuple[str, int], list[Scored]] = Batcher(self._search_batch, _AT_ONCE)

    @property
    def passages(self) -> Sequence[Passage]:
        return self._index.passages

    async def search(self, queries: Sequence[Query], topk: int) -> list[list[Scored]]:
        degradation = self._degradation
        found = await asyncio.gather(*(self._together((query.text, topk)) for query in queries))
        await asyncio.sleep(max((degradation.latency_s(query.draw) for query in queries), default=0.0))
        return [
            degradation.disturb(result, self._index.passages, topk, query)
            for result, query in zip(found, queries, strict=True)
        ]

    @property
    def deterministic(self) -> bool:
        """An index and a reranker always are; what noise and distractors do may depend on the draw."""
        return not (self._degradation.disturbs and self._degradation.stochastic)

    @property
    def accepts_draw(self) -> bool:
        return not self.deterministic or bool(self._degradation.latency_median_s)

    def figures(self) -> dict[str, str | int | float]:
        return {"passages": len(self._index.passages)}

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _search_batch(self, asked: Sequence[tuple[str, int]]) -> list[list[Scored]]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._search, asked)

    def _search(self, asked: Sequence[tuple[str, int]]) -> list[list[Scored]]:
        """Each query's own number of documents; ranking does not depend on how many are asked for."""
        texts = [text for text, _ in asked]
        most = max(topk for _, topk in asked)
        found = self._index.search(texts, max(most, self._candidates))
        if self._reranker is not None:
            found = self._reranker.rerank(texts, found, most)
        return [result[:topk] for result, (_, topk) in zip(found, asked, strict=True)]
