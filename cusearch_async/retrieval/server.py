"""The retriever over HTTP: Search-R1's protocol in front of any backend.

    POST /retrieve {"queries": ["capital of Peru"], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "7", "contents": "..."}, "score": 11.2}, ...]]}

With "return_scores": false each inner list holds the documents alone. Two fields of ours may be added, each with
one entry per query: "draws", integers which make simulated noise and latency reproducible; "contexts",
{"question", "answers", "step"} for a simulated engine. What fails is answered with a status and {"error": "..."}.
GET /health says what is served, GET /metrics the same as Prometheus figures.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cusearch_async.errors import SearchFailed
from cusearch_async.retrieval.backend import Backend, Context, Query, Scored

log = logging.getLogger(__name__)

MAX_QUERIES = 4096
"""In one request. Search-R1's training sends those of all its trajectories at once, 512 x 5 = 2,560."""
MAX_BODY_BYTES = 32 << 20
"""Decompressed. 4,096 queries of 500 tokens each take about 8 MiB of it, and more where JSON spells characters out."""
MAX_TOPK = 100
MAX_DOCUMENTS = 100_000
"""Of one answer: queries x topk."""


@dataclass(frozen=True, slots=True)
class Request:
    texts: list[str]
    topk: int
    return_scores: bool
    draws: list[int] | None
    contexts: list[Context | None]


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
        raise ValueError(f"topk must be an integer in [1, {MAX_TOPK}], got {topk!r:.200}")
    if len(queries) * topk > MAX_DOCUMENTS:
        raise ValueError(
            f"queries x topk must be at most {MAX_DOCUMENTS}, got {len(queries)} x {topk}; ask in several requests"
        )
    scores = body.get("return_scores", False)
    if not isinstance(scores, bool):
        raise ValueError(f"return_scores must be true or false, got {scores!r:.200}")
    draws = _one_per_query(body, "draws", queries)
    if draws is not None and not all(type(d) is int and d >= 0 for d in draws):
        raise ValueError("draws must hold one non-negative integer per query")
    contexts = _one_per_query(body, "contexts", queries) or [None] * len(queries)
    return Request(queries, topk, scores, draws, [None if c is None else parse_context(c) for c in contexts])


def parse_context(row: Any) -> Context:
    """Raises: ValueError naming the field and what would be right."""
    if not isinstance(row, dict):
        raise ValueError(f"contexts must hold objects, got {type(row).__name__}")
    question, answers, step = row.get("question"), row.get("answers"), row.get("step")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"contexts: question must be non-blank text, got {question!r:.200}")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise ValueError(f"contexts: answers must be a list of texts, got {answers!r:.200}")
    if type(step) is not int or step < 0:
        raise ValueError(f"contexts: step must be a non-negative integer, got {step!r:.200}")
    return Context(question, tuple(answers), step)


class Retriever:
    """Consumes searches over HTTP, produces documents of a backend."""

    def __init__(self, backend: Backend, default_topk: int = 3) -> None:
        self._backend = backend
        self._default_topk = default_topk
        self._served = 0
        self._figures = CollectorRegistry()
        self._figures.register(_BackendFigures(backend))
        self._seconds = Histogram("retriever_request_seconds", "Time to answer a request", registry=self._figures)
        self._queries = Counter("retriever_queries", "Searches asked for", registry=self._figures)
        self._documents = Counter("retriever_documents", "Documents returned", registry=self._figures)
        self._statuses = Counter("retriever_requests", "Requests by HTTP status", ["status"], registry=self._figures)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/retrieve", self.retrieve)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        return app

    async def retrieve(self, http: web.Request) -> web.Response:
        began = time.perf_counter()
        try:
            status, answer = await self._answer(http)
        except Exception as error:  # the engine's own; whoever asked must be told, and others still be served
            log.exception("a search failed")
            status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
        self._seconds.observe(time.perf_counter() - began)
        self._statuses.labels(str(status)).inc()
        return web.json_response(answer, status=status)

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "queries": self._served, **self._backend.facts()})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._figures), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _answer(self, http: web.Request) -> tuple[int, Any]:
        """Status and body."""
        try:
            request = parse_request(await http.json(), self._default_topk)
        except web.HTTPRequestEntityTooLarge:
            return 413, {"error": f"the body must be at most {MAX_BODY_BYTES} bytes"}
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, LookupError):
            return 400, {"error": "the body must be JSON in UTF-8, and not nested beyond reason"}
        except web.RequestPayloadError:
            return 400, {"error": "the body is not compressed as its Content-Encoding says"}
        except ValueError as error:
            return 400, {"error": str(error)}
        draws = request.draws or range(self._served, self._served + len(request.texts))
        self._served += len(request.texts)
        self._queries.inc(len(request.texts))
        queries = [Query(*one) for one in zip(request.texts, draws, request.contexts, strict=True)]
        try:
            found = await self._backend.search(queries, request.topk)
        except SearchFailed as error:
            return error.status, {"error": str(error)}
        self._documents.inc(sum(map(len, found)))
        return 200, {"result": [_rows(result, request.return_scores) for result in found]}


class _BackendFigures(Collector):
    """The backend's numbers, read when they are asked for."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def collect(self) -> list[GaugeMetricFamily]:
        numbers = {name: value for name, value in self._backend.facts().items() if not isinstance(value, str)}
        return [
            GaugeMetricFamily(f"retriever_{name}", f"The backend's {name}", value) for name, value in numbers.items()
        ]


def _one_per_query(body: dict[str, Any], field: str, queries: list[str]) -> list[Any] | None:
    values = body.get(field)
    if values is not None and (not isinstance(values, list) or len(values) != len(queries)):
        raise ValueError(f"{field} must be a list with one entry per query ({len(queries)})")
    return values


def _rows(found: list[Scored], return_scores: bool) -> list[Any]:
    if return_scores:
        return [{"document": passage, "score": score} for passage, score in found]
    return [passage for passage, _ in found]
