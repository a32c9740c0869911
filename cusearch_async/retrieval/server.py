"""The retriever process: Search-R1's protocol over HTTP.

    POST /retrieve {"queries": ["capital of Peru"], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "7", "contents": "..."}, "score": 11.2}, ...]]}

With "return_scores": false each inner list holds the documents alone. One field of ours may be added:
"draws": one integer per query, which makes the simulated noise and latency of that query reproducible.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from aiohttp import web

from cusearch_async.retrieval.bm25 import Passage, Scored

MAX_BODY_BYTES = 4 << 20
MAX_QUERIES = 1024
MAX_TOPK = 100


class Index(Protocol):
    passages: list[Passage]

    def search(self, queries: Sequence[str], topk: int) -> list[list[Scored]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What makes a local index behave like the web: other documents, and waiting."""

    distractors: int = 0
    """Of the documents found, how many are replaced by random ones; the best one stays."""
    noise: float = 0.0
    """Probability that a search returns random documents only."""
    latency_median_s: float = 0.0
    latency_p99_s: float = 0.0
    seed: int = 0

    def disturb(self, found: list[Scored], passages: list[Passage], topk: int, draw: int) -> list[Scored]:
        """The result of one search, with what the draw does to it."""
        if not self.noise and not self.distractors:
            return found
        rng = np.random.default_rng([self.seed, draw, 1])
        if rng.random() < self.noise:
            return [(passages[i], 0.0) for i in rng.integers(len(passages), size=topk)]
        kept = found[: max(1, len(found) - self.distractors)]
        return kept + [(passages[i], 0.0) for i in rng.integers(len(passages), size=len(found) - len(kept))]

    def latency_s(self, draw: int) -> float:
        """Log-normal waiting time with the given median and 99th percentile."""
        if not self.latency_median_s:
            return 0.0
        sigma = math.log(self.latency_p99_s / self.latency_median_s) / 2.3263
        normal = np.random.default_rng([self.seed, draw, 2]).standard_normal()
        return self.latency_median_s * math.exp(sigma * normal)


@dataclass(frozen=True, slots=True)
class Request:
    queries: list[str]
    topk: int
    return_scores: bool
    draws: list[int] | None


def parse_request(body: Any, default_topk: int) -> Request:
    """Raises: ValueError naming the field, the value and what would be right."""
    if not isinstance(body, dict):
        raise ValueError(f"the body must be a JSON object, got {type(body).__name__}")
    queries = body.get("queries")
    if not isinstance(queries, list) or not all(isinstance(q, str) for q in queries):
        raise ValueError("queries must be a list of strings")
    if len(queries) > MAX_QUERIES:
        raise ValueError(f"queries must hold at most {MAX_QUERIES}, got {len(queries)}")
    topk = default_topk if body.get("topk") is None else body["topk"]
    if type(topk) is not int or not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk must be an integer in [1, {MAX_TOPK}], got {topk!r}")
    scores = body.get("return_scores", False)
    if not isinstance(scores, bool):
        raise ValueError(f"return_scores must be true or false, got {scores!r}")
    draws = body.get("draws")
    if draws is not None and (
        not isinstance(draws, list) or len(draws) != len(queries) or not all(type(d) is int and d >= 0 for d in draws)
    ):
        raise ValueError("draws must hold one non-negative integer per query")
    return Request(queries, topk, scores, draws)


class Retriever:
    def __init__(self, index: Index, simulation: Simulation, default_topk: int = 3) -> None:
        self._index = index
        self._simulation = simulation
        self._default_topk = default_topk
        self._served = 0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/retrieve", self.retrieve)
        app.router.add_get("/health", self.health)
        return app

    async def retrieve(self, http: web.Request) -> web.Response:
        try:
            request = parse_request(await http.json(), self._default_topk)
        except web.HTTPRequestEntityTooLarge:
            return web.json_response({"error": f"the body must be at most {MAX_BODY_BYTES} bytes"}, status=413)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, LookupError):
            return web.json_response({"error": "the body must be JSON in UTF-8"}, status=400)
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        draws = request.draws or range(self._served, self._served + len(request.queries))
        self._served += len(request.queries)
        results = self._index.search(request.queries, request.topk)
        simulation = self._simulation
        disturbed = [
            simulation.disturb(found, self._index.passages, request.topk, draw)
            for found, draw in zip(results, draws, strict=True)
        ]
        await asyncio.sleep(max((simulation.latency_s(draw) for draw in draws), default=0.0))
        return web.json_response({"result": [_rows(found, request.return_scores) for found in disturbed]})

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "passages": len(self._index.passages), "queries": self._served})


def _rows(found: list[Scored], return_scores: bool) -> list[Any]:
    if return_scores:
        return [{"document": passage, "score": score} for passage, score in found]
    return [passage for passage, _ in found]
