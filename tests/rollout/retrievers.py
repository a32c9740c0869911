"""Retrievers that answer as they are told, a client of one, and an episode that searches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import AutoTokenizer

from cusearch_async.config import EpisodeConfig, RetrieverConfig
from cusearch_async.rollout.episode import Player
from cusearch_async.rollout.retrieval import SearchClient
from cusearch_async.types import Question
from tests.conftest import SLOW
from tests.fakes import STARTER, ScriptedPolicy, searching

QUESTION = Question(id="q/0", text="What is the capital of Peru?", answers=("Lima",), category="q")

Answer = Callable[["Service", web.Request], Awaitable[web.StreamResponse]]


class Service:
    """A retriever that answers each request by the next of its answers, and by the last one for ever."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = answers
        self.bodies: list[dict[str, object]] = []
        self.over = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        return await self._answers[min(len(self.bodies), len(self._answers)) - 1](self, request)


def answers(body: str, status: int = 200) -> Answer:
    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        return web.Response(text=body, status=status, content_type="application/json")

    return answer


def finds(*contents: str) -> Answer:
    rows = [{"document": {"id": str(i), "contents": text}, "score": 1.0} for i, text in enumerate(contents)]

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        return web.json_response({"result": [rows]})

    return answer


async def hangs(service: Service, request: web.Request) -> web.StreamResponse:
    await service.over.wait()
    return web.Response()


def waits_for_more(count: int) -> Answer:
    """Finds Lima, once `count` requests are there."""

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        async with asyncio.timeout(5 * SLOW):
            while len(service.bodies) < count:
                await asyncio.sleep(0.01)
        return await finds("Lima")(service, request)

    return answer


async def closes_early(service: Service, request: web.Request) -> web.StreamResponse:
    """Half of an answer, then nothing."""
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"result": [[{"document": {"id": "0", "contents": "Lima"}}]]}')
    assert request.transport is not None
    request.transport.close()
    return response


async def hangs_up(service: Service, request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@asynccontextmanager
async def client_of(service: Service, **settings: float) -> AsyncIterator[SearchClient]:
    app = web.Application()
    app.router.add_post("/retrieve", service.handle)
    async with TestServer(app) as server:
        values = {"timeout_s": 5.0, "outage_s": 0.05, "topk": 2} | settings
        config = RetrieverConfig(url=f"http://127.0.0.1:{server.port}", **values)
        async with SearchClient.session(config) as session:
            try:
                yield SearchClient(session, config, EpisodeConfig(), 4)
            finally:
                service.over.set()


SEARCH_R1 = (
    '{"result": [[{"document": {"id": "0", "contents": "\\"Peru\\"\\nThe capital of Peru is Lima."}, "score": 7.5}]]}'
)
TOKENIZER = AutoTokenizer.from_pretrained(STARTER)


async def play(client):
    turns = ["<think>a</think><search>capital of Peru</search>", "<think>b</think><answer>Lima</answer><|endoftext|>"]
    settings = EpisodeConfig(max_observation_tokens=88)
    player = Player(ScriptedPolicy(TOKENIZER, turns), searching(client), TOKENIZER, settings, seed=0)
    return await player.play(QUESTION, 0, 0, "w")
