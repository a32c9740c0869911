"""The search client against real servers: a failure is retried, then raised by name, and never becomes documents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cusearch_async.config import RetrieverConfig
from cusearch_async.errors import RetrievalUnavailable
from cusearch_async.host import free_port
from cusearch_async.retrieval.bm25 import Bm25Index
from cusearch_async.retrieval.server import Retriever, Simulation
from cusearch_async.rollout.retrieval import SearchClient

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
        values = {"timeout_s": 5.0, "outage_s": 0.05} | settings
        config = RetrieverConfig(url=f"http://127.0.0.1:{server.port}", **values)
        async with SearchClient.session(config) as session:
            try:
                yield SearchClient(session, config, topk=2)
            finally:
                service.over.set()


async def test_documents_come_best_first():
    service = Service(finds("Lima", "Peru"))
    async with client_of(service) as client:
        assert await client.search("capital of Peru", 11) == ["Lima", "Peru"]
    assert service.bodies == [{"queries": ["capital of Peru"], "topk": 2, "return_scores": True, "draws": [11]}]
    assert (client.searches, client.failures) == (1, 0)


async def test_finding_nothing_is_an_answer():
    async with client_of(Service(finds())) as client:
        assert await client.search("capital of Atlantis", 0) == []
    assert (client.searches, client.failures) == (1, 0)


@pytest.mark.parametrize(
    "failure",
    [answers("down", 500), answers("busy", 503), answers("slow", 408), answers("too many", 429), hangs_up],
)
async def test_a_failure_that_passes_is_not_noticed(failure):
    service = Service(failure, finds("Lima"))
    async with client_of(service, outage_s=60) as client:
        assert await client.search("capital of Peru", 4) == ["Lima"]
    assert (client.searches, client.failures) == (1, 1)
    assert service.bodies[0] == service.bodies[1], "the same search with the same draw"


WRONG_SHAPES = [
    "null",
    "[]",
    "3",
    '"Lima"',
    "{}",
    '{"error": "down"}',
    '{"result": null}',
    '{"result": "Lima"}',
    '{"result": []}',
    '{"result": [[], []]}',
    '{"result": [null]}',
    '{"result": [3]}',
    '{"result": ["Lima"]}',
    '{"result": [{"error": "down"}]}',
    '{"result": [["Lima"]]}',
    '{"result": [[{"id": "0", "contents": "Lima"}]]}',
    '{"result": [[{"document": "Lima"}]]}',
    '{"result": [[{"document": {"id": "0"}}]]}',
    '{"result": [[{"document": {"id": "0", "contents": null}}]]}',
    '{"result": [[{"document": {"id": "0", "contents": 3}}]]}',
    '{"result": [[{"document": {"id": "0", "contents": "Lima"}}, {}]]}',
    # An empty text or object where a list of rows belongs is no empty list of rows.
    '{"result": [{}]}',
    '{"result": [""]}',
    '{"result": {"": []}}',
]


@pytest.mark.parametrize("body", ["", "<html>Bad gateway</html>", '{"result": [[', "{'result': []}", *WRONG_SHAPES])
async def test_an_answer_in_a_wrong_form_is_a_failure_and_not_an_empty_result(body):
    async with client_of(Service(answers(body))) as client:
        with pytest.raises(RetrievalUnavailable, match=r"has not answered properly for 0\.05 s"):
            await client.search("capital of Peru", 0)
    assert (client.searches, client.failures) == (0, 1)


@pytest.mark.parametrize("failure", [closes_early, hangs_up, answers('{"result": [[]]}', 500), answers("", 204)])
async def test_a_retriever_that_breaks_off_is_a_failure(failure):
    async with client_of(Service(failure)) as client:
        with pytest.raises(RetrievalUnavailable):
            await client.search("capital of Peru", 0)


async def test_bytes_that_are_no_utf8_are_a_failure():
    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        return web.Response(body=b'{"result": [[{"document": {"contents": "\xff"}}]]}', content_type="application/json")

    async with client_of(Service(answer)) as client:
        with pytest.raises(RetrievalUnavailable):
            await client.search("capital of Peru", 0)


async def test_a_retriever_that_hangs_is_given_up_after_the_timeout():
    async with client_of(Service(hangs), timeout_s=0.1) as client:
        with pytest.raises(RetrievalUnavailable, match="TimeoutError"):
            await client.search("capital of Peru", 0)


async def test_a_retriever_that_hangs_once_is_asked_again():
    async with client_of(Service(hangs, finds("Lima")), timeout_s=0.3, outage_s=60) as client:
        assert await client.search("capital of Peru", 0) == ["Lima"]


async def test_a_retriever_that_stays_down_is_asked_several_times_and_then_named():
    service = Service(answers("down", 500))
    async with client_of(service, outage_s=1.0) as client:
        with pytest.raises(RetrievalUnavailable) as caught:
            await client.search("capital of Peru", 0)
    assert 2 <= len(service.bodies) == client.failures <= 6
    assert client.searches == 0
    message = str(caught.value)
    assert "http://127.0.0.1:" in message
    assert "for 1 s" in message
    assert "500" in message
    assert "retriever.url" in message


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_a_request_that_is_refused_as_wrong_is_not_repeated(status):
    service = Service(answers('{"error": "topk must be an integer"}', status), finds("Lima"))
    async with client_of(service, outage_s=60) as client:
        with pytest.raises(RetrievalUnavailable, match=rf"refuses a search \({status}\): .*topk must be"):
            await client.search("capital of Peru", 0)
    assert len(service.bodies) == 1


async def test_a_retriever_that_is_not_there_is_named():
    config = RetrieverConfig(url=f"http://127.0.0.1:{free_port()}", outage_s=0.05)
    async with SearchClient.session(config) as session:
        with pytest.raises(RetrievalUnavailable, match=config.url):
            await SearchClient(session, config, topk=2).search("capital of Peru", 0)


async def test_waiting_for_a_retriever_has_its_own_limit():
    async with client_of(Service(answers("starting", 503), finds()), outage_s=0.01) as client:
        await client.wait_until_answering(60)
    async with client_of(Service(answers("starting", 503)), outage_s=60) as client:
        with pytest.raises(RetrievalUnavailable, match=r"for 0\.05 s"):
            await client.wait_until_answering(0.05)


async def test_searches_at_the_same_time_each_get_their_own_answer():
    async def echo(service: Service, request: web.Request) -> web.StreamResponse:
        (query,) = (await request.json())["queries"]
        return web.json_response({"result": [[{"document": {"id": "0", "contents": query}, "score": 1.0}]]})

    async with client_of(Service(echo)) as client:
        queries = [f"query {i}" for i in range(30)]
        found = await asyncio.gather(*(client.search(query, i) for i, query in enumerate(queries)))
    assert found == [[query] for query in queries]


async def test_the_client_understands_the_projects_own_retriever():
    index = Bm25Index([{"id": "0", "contents": '"Peru"\nThe capital of Peru is Lima.'}, {"id": "1", "contents": "x y"}])
    async with TestServer(Retriever(index, Simulation()).application()) as server:
        config = RetrieverConfig(url=f"http://127.0.0.1:{server.port}")
        async with SearchClient.session(config) as session:
            client = SearchClient(session, config, topk=3)
            assert await client.search("capital of Peru", 0) == ['"Peru"\nThe capital of Peru is Lima.']
            assert await client.search("zzz", 0) == []
