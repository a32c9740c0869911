"""Services that speak as serper.dev and as SerpApi do, and web searches of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cusearch_async.config import WebConfig
from cusearch_async.errors import SearchFailed
from cusearch_async.retrieval import websearch
from cusearch_async.retrieval.backend import Query
from cusearch_async.retrieval.websearch import WebSearch
from tests.conftest import SLOW
from tests.http_service import Answer, Service, closes_after, says

ENGINES = ("serper", "serpapi")
RESULTS = {"serper": "organic", "serpapi": "organic_results"}
BOX = {"serper": "answerBox", "serpapi": "answer_box"}
VARIABLE = {"serper": "SERPER_API_KEY", "serpapi": "SERPAPI_API_KEY"}
KEY = "s3cret+key/of=mine"
"""Characters that a URL writes differently are in it."""

LIMA = {"title": "Lima", "link": "https://example.org/lima", "snippet": "Lima is the capital of Peru."}
CUSCO = {"title": "Cusco", "link": "https://example.org/cusco", "snippet": "Cusco was the capital of the Incas."}
LIMA_PASSAGE = {"id": "https://example.org/lima", "contents": '"Lima"\nLima is the capital of Peru.'}
CUSCO_PASSAGE = {"id": "https://example.org/cusco", "contents": '"Cusco"\nCusco was the capital of the Incas.'}

closes_early = closes_after(b'{"organic": [], "organic_results": []}')


def finds(*rows: dict[str, Any]) -> Answer:
    """Results under the names of both services."""
    return says({"organic": list(rows), "organic_results": list(rows)})


def unless_asked_for(word: str, otherwise: Answer) -> Answer:
    """Finds Lima, but not for queries with `word`."""

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        is_it = word in service.bodies[-1]["q"]
        return await (otherwise if is_it else finds(LIMA))(service, request)

    return answer


async def says_nothing_http(service: Service, request: web.Request) -> web.StreamResponse:
    """Bytes that are no HTTP."""
    assert request.transport is not None
    request.transport.write(b"GARBAGE nothing\r\n\r\n")
    request.transport.close()
    return web.Response()


@asynccontextmanager
async def served(*answers: Answer) -> AsyncIterator[tuple[Service, str]]:
    """A service and its address, without the path."""
    service = Service(*answers)
    app = web.Application()
    app.router.add_post("/serper", service.handle)
    app.router.add_get("/serpapi", service.handle)
    async with TestServer(app) as server:
        try:
            yield service, f"http://127.0.0.1:{server.port}"
        finally:
            service.over.set()


@asynccontextmanager
async def search_of(engine: str, address: str, **settings: Any) -> AsyncIterator[WebSearch]:
    values = {"per_second": 1000.0, "attempts": 1, "timeout_s": 5.0 * SLOW} | settings
    search = WebSearch(engine, WebConfig(url=f"{address}/{engine}", **values), KEY)  # type: ignore[arg-type]
    try:
        yield search
    finally:
        await search.close()


@asynccontextmanager
async def asking(engine: str, *answers: Answer, **settings: Any) -> AsyncIterator[tuple[Service, WebSearch]]:
    async with served(*answers) as (service, address), search_of(engine, address, **settings) as search:
        with patch.object(websearch, "_FIRST_PAUSE_S", 0.05):
            yield service, search


async def found(search: WebSearch, *texts: str, topk: int = 3) -> list[list[dict[str, str]]]:
    answers = await search.search([Query(text, draw) for draw, text in enumerate(texts)], topk)
    return [[passage for passage, _ in answer] for answer in answers]


async def failure(search: WebSearch, text: str = "capital of Peru") -> SearchFailed:
    with pytest.raises(SearchFailed) as caught:
        await found(search, text)
    return caught.value


def queries(service: Service) -> list[str]:
    return [fields["q"] for fields in service.bodies]
