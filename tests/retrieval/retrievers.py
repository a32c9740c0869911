"""Retrievers that answer as they are told, and a client of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from cusearch_async.config import EpisodeConfig, RetrieverConfig
from cusearch_async.retrieval.client import SearchClient
from cusearch_async.retrieval.protocol import SERVES
from cusearch_async.types import Question
from tests.conftest import SLOW
from tests.http_service import Answer, Service, closes_after

QUESTION = Question(id="q/0", text="What is the capital of Peru?", answers=("Lima",), category="q")

SEARCH_R1 = (
    '{"result": [[{"document": {"id": "0", "contents": "\\"Peru\\"\\nThe capital of Peru is Lima."}, "score": 7.5}]]}'
)

closes_early = closes_after(b'{"result": [[{"document": {"id": "0", "contents": "Lima"}}]]}')


def finds(*contents: str, serves: str | None = None) -> Answer:
    rows = [{"document": {"id": str(i), "contents": text}, "score": 1.0} for i, text in enumerate(contents)]

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        return web.json_response({"result": [rows]}, headers={SERVES: serves} if serves else {})

    return answer


def waits_for_more(count: int) -> Answer:
    """Finds Lima, once `count` requests are there."""

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        async with asyncio.timeout(5 * SLOW):
            while len(service.bodies) < count:
                await asyncio.sleep(0.01)
        return await finds("Lima")(service, request)

    return answer


@asynccontextmanager
async def client_of(service: Service, health: Service | None = None, **settings: Any) -> AsyncIterator[SearchClient]:
    """A client of a retriever that answers searches as `service` does, and GET /health as `health`; without, it has
    no /health."""
    app = web.Application()
    app.router.add_post("/retrieve", service.handle)
    if health is not None:
        app.router.add_get("/health", health.handle)
    async with TestServer(app) as server:
        values = {"timeout_s": 5.0 * SLOW, "outage_s": 0.05, "topk": 2} | settings
        config = RetrieverConfig(url=f"http://127.0.0.1:{server.port}", **values)
        async with SearchClient.session(config) as session:
            try:
                yield SearchClient(session, config, EpisodeConfig(), 4)
            finally:
                service.over.set()
                if health is not None:
                    health.over.set()
