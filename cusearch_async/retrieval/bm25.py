"""BM25 over passages, by the bm25s library."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import bm25s

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to tell every step

Passage = dict[str, str]
"""One corpus row: `id` and `contents` (quoted title, newline, text)."""
Scored = tuple[Passage, float]


class Bm25Index:
    """An in-memory index. Ranking is deterministic: equal queries give equal results."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        """Raises: ValueError without passages, or when a passage lacks `id` or `contents`."""
        if not passages:
            raise ValueError("the corpus has no passages; BM25 needs at least one")
        for row, passage in enumerate(passages):
            if not passage.get("contents", "").strip() or "id" not in passage:
                raise ValueError(f"corpus row {row} needs a non-blank 'contents' and an 'id', got {passage!r:.200}")
        self.passages = list(passages)
        self._index = bm25s.BM25(method="lucene")
        tokens = bm25s.tokenize([p["contents"] for p in self.passages], stopwords=None, show_progress=False)
        if not any(len(ids) for ids in tokens.ids):
            raise ValueError("the corpus holds no word of two letters or more; BM25 has nothing to search for")
        self._index.index(tokens, show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Scored]]:
        """The `topk` best passages of each query, best first; only passages that share a word with it."""
        tokens = bm25s.tokenize(list(queries), stopwords=None, show_progress=False, return_ids=False)
        topk = min(topk, len(self.passages))
        found: list[list[Scored]] = []
        for words in tokens:
            if not words:
                found.append([])
                continue
            rows, scores = self._index.retrieve([words], k=topk, show_progress=False)
            pairs = zip(rows[0].tolist(), scores[0].tolist(), strict=True)
            found.append([(self.passages[row], score) for row, score in pairs if score > 0])
        return found
