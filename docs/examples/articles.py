"""A custom search backend: a dictionary of articles, served by the retriever's server.

[retriever]
backend = "docs.examples.articles:Articles"
options = { path = "articles.json" }
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from cusearch_async.retrieval.backend import Query, Scored


class Articles:
    """Finds the articles whose title a query names. `path` is a JSON object of title -> text."""

    deterministic = True
    accepts_seed = False

    def __init__(self, path: str) -> None:
        self._articles: dict[str, str] = json.loads(Path(path).read_text(encoding="utf-8"))
        self._asked = 0

    async def search(self, queries: Sequence[Query], topk: int) -> list[list[Scored]]:
        self._asked += len(queries)
        return [self._find(query.text.lower())[:topk] for query in queries]

    def _find(self, query: str) -> list[Scored]:
        return [
            ({"id": title, "contents": f'"{title}"\n{text}'}, float(len(title)))
            for title, text in sorted(self._articles.items(), key=lambda article: -len(article[0]))
            if title.lower() in query
        ]

    def figures(self) -> dict[str, str | int | float]:
        return {"articles": len(self._articles), "queries": self._asked}

    async def close(self) -> None:
        pass
