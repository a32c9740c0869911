"""The retriever over HTTP: Search-R1's protocol in front of any backend.

A failure is answered with a status and {"error": "..."}. GET /health reports what is served and how it behaves, GET
/metrics Prometheus figures. What is served is part of the run contract, so that a run searches one corpus: words, with
a checksum of the settings that decide which documents a search gets.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cusearch_async.config import RetrieverConfig
from cusearch_async.errors import SearchFailed
from cusearch_async.retrieval import protocol
from cusearch_async.retrieval.backend import Backend, Passage, Query
from cusearch_async.retrieval.corpus import Corpus
from cusearch_async.retrieval.encoder_folder import resolved
from cusearch_async.run.identity import checksum

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 << 20
"""Decompressed. 4,096 queries of 500 tokens each take about 8 MiB of it, and more where JSON spells characters out."""
_OF_DENSE = {"batch", "device"}
_OF_SIMULATOR = {"url", "timeout_s"}


class Retriever:
    """Consumes searches over HTTP, produces documents of a backend."""

    def __init__(self, backend: Backend, default_topk: int = 3, serves: str | None = None) -> None:
        """`serves`: see `what_is_served`."""
        self._backend, self.serves, self._default_topk = backend, serves, default_topk
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
        headers = {protocol.SERVES: self.serves} if self.serves else {}
        try:
            status, answer = await self._answer(http)
        except SearchFailed as error:
            status, answer = error.status, {"error": str(error)}
            headers |= {"Retry-After": str(math.ceil(error.retry_after_s))} if error.retry_after_s else {}
        except Exception as error:  # any error of the engine: this client gets it, and others are still served
            log.exception("a search failed")
            status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
        self._seconds.observe(time.perf_counter() - began)
        self._statuses.labels(str(status)).inc()
        return web.json_response(answer, status=status, headers=headers)

    async def health(self, _: web.Request) -> web.Response:
        behaviour = protocol.Behaviour(self._backend.deterministic, self._backend.accepts_seed, self.serves)
        return web.json_response(protocol.encode_health(behaviour, self._served, self._backend.figures()))

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._figures), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _answer(self, http: web.Request) -> tuple[int, Any]:
        """Status and body. Raises: SearchFailed."""
        try:
            request = protocol.decode_request(await http.json(), self._default_topk)
        except web.HTTPRequestEntityTooLarge:
            return 413, {"error": f"the body must be at most {MAX_BODY_BYTES} bytes"}
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, LookupError):
            return 400, {"error": "the body must be JSON in UTF-8, and not nested too deeply"}
        except web.RequestPayloadError:
            return 400, {"error": "the body does not match its Content-Encoding"}
        except ValueError as error:
            return 400, {"error": str(error)}
        count = len(request.queries)
        seeds = request.seeds or range(self._served, self._served + count)
        contexts = request.contexts or [None] * count
        self._served += count
        self._queries.inc(count)
        queries = [Query(*one) for one in zip(request.queries, seeds, contexts, strict=True)]
        found = await self._backend.search(queries, request.topk or self._default_topk)
        self._documents.inc(sum(map(len, found)))
        return 200, protocol.encode_answer(found, request.return_scores)


class _BackendFigures(Collector):
    """The backend's numbers, read when they are asked for."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def collect(self) -> list[GaugeMetricFamily]:
        numbers = {name: value for name, value in self._backend.figures().items() if not isinstance(value, str)}
        return [
            GaugeMetricFamily(f"retriever_{name}", f"The backend's {name}", value) for name, value in numbers.items()
        ]


def what_is_served(settings: RetrieverConfig, seed: int, steps: int, passages: Sequence[Passage] = ()) -> str:
    """Of a retriever with these settings, run.seed and run.steps; `passages` are its corpus, for bm25 and dense. ASCII,
    for an HTTP header.

    Raises: ConfigError when pooling or prefixes of the encoder are not known."""
    facts: dict[str, Any] = {}
    if settings.has_corpus:
        name = f"{settings.backend} over {len(passages)} passages" + _changes(settings)
        rows = ([one["id"], one["contents"]] for one in passages)
        facts = {"corpus": passages.fingerprint if isinstance(passages, Corpus) else checksum(list(rows))}
        if settings.backend == "dense":
            facts["dense"] = resolved(settings.dense).model_dump(mode="json", exclude=_OF_DENSE)
        else:
            facts["bm25"] = settings.bm25.model_dump(mode="json")
        if settings.rerank.model:
            facts["rerank"] = settings.rerank.model_dump(mode="json")
        if settings.noise or settings.distractors:
            facts["noise"] = settings.noise, settings.distractors, settings.stochastic, seed
    elif settings.backend == "zerosearch":
        simulator = settings.zerosearch
        name = f"zerosearch by {simulator.model or 'the model of its server'}, {simulator.mode}, temperature "
        decides = {"seed": seed, "steps": simulator.steps or steps}
        name += f"{simulator.temperature:g}, noise {simulator.p_start:g} to {simulator.p_end:g} over "
        name += f"{decides['steps']} steps"
        facts = simulator.model_dump(mode="json", exclude=_OF_SIMULATOR) | decides
    else:
        name = settings.backend
        facts = {"options": repr(settings.options), "url": settings.web.url}
    return f"{name} ({checksum(facts)})".encode("ascii", "backslashreplace").decode()


def _changes(settings: RetrieverConfig) -> str:
    """What distinguishes a search of a corpus, and what is done to its results."""
    dense, rerank, place = settings.dense, settings.rerank, "search" if settings.stochastic else "query"
    tokenizer = settings.bm25.tokenizer
    parts = (
        (settings.backend == "bm25" and tokenizer != "unicode", f"tokenizer {tokenizer}"),
        (settings.backend == "dense", f"encoder {dense.encoder} ({dense.kind})"),
        (rerank.model, f"the best of {rerank.candidates} by {rerank.model}"),
        (settings.distractors, f"{settings.distractors} distractors"),
        (settings.noise, f"noise {settings.noise:g}"),
        (settings.distractors or settings.noise, f"drawn for each {place}"),
    )
    said = ", ".join(text for is_there, text in parts if is_there)
    return f" with {said}" if said else ""
