"""How a retriever behaves it says itself, and the client goes by that and by nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from cusearch_async.config import EpisodeConfig, RerankConfig, RetrieverConfig, load_config
from cusearch_async.errors import RetrievalUnavailable
from cusearch_async.processes.retriever import make_backend
from cusearch_async.retrieval.backend import Query
from cusearch_async.retrieval.client import SearchClient
from cusearch_async.retrieval.indexing import Degradation, IndexBackend
from cusearch_async.retrieval.server import Retriever
from tests.http_service import Service, hangs, hangs_up, says
from tests.retrieval.retrievers import QUESTION, client_of, finds, waits_for_more

REPEATS = {"deterministic": True, "accepts_seed": False}
REPEATS_SLOWLY = {"deterministic": True, "accepts_seed": True}
DRAWS = {"deterministic": False, "accepts_seed": True}
CHANGES = {"deterministic": False, "accepts_seed": False}

LATENCY = ("--retriever.latency_median_s", "0.001", "--retriever.latency_p99_s", "0.002")
KINDS = [
    ((), REPEATS),
    (("--retriever.noise", "0.5"), DRAWS),
    (("--retriever.distractors", "2"), DRAWS),
    (LATENCY, REPEATS_SLOWLY),
    (("--retriever.backend", "zerosearch"), DRAWS),
    (("--retriever.backend", "serper"), CHANGES),
    (("--retriever.backend", "serpapi"), CHANGES),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Ten passages, which are indexed at once."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [{"id": str(row), "contents": f'"Peru {row}"\nThe capital of Peru is {row}.'} for row in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@asynccontextmanager
async def retriever_of(atlas_config, corpus, *overrides: str) -> AsyncIterator[TestClient[Any, Any]]:
    """The retriever process's application, on loopback."""
    backend = make_backend(load_config(atlas_config, ["--retriever.corpus", str(corpus), *overrides]))
    try:
        async with TestClient(TestServer(Retriever(backend).application())) as http:
            yield http
    finally:
        await backend.close()


@asynccontextmanager
async def client_at(url: str, **settings: Any) -> AsyncIterator[SearchClient]:
    config = RetrieverConfig(url=url.rstrip("/"), **settings)
    async with SearchClient.session(config) as session:
        client = SearchClient(session, config, EpisodeConfig(), 4)
        await client.wait_until_answering(20)
        yield client


async def search_together(client: SearchClient, count: int) -> list[list[str]]:
    return await asyncio.gather(*(client.search("capital of Peru", draw, QUESTION, 0) for draw in range(count)))


# What the server says.


@pytest.mark.parametrize(("overrides", "behaviour"), KINDS)
async def test_every_backend_says_how_it_behaves(atlas_config, corpus, monkeypatch, overrides, behaviour):
    for variable in ("SERPER_API_KEY", "SERPAPI_API_KEY"):
        monkeypatch.setenv(variable, "key")
    async with retriever_of(atlas_config, corpus, *overrides) as http, http.get("/health") as response:
        said = await response.json()
    assert {key: said[key] for key in behaviour} == behaviour


@pytest.mark.parametrize(("overrides", "behaviour"), KINDS[:4])
async def test_what_a_backend_says_is_true(atlas_config, corpus, overrides, behaviour):
    async with retriever_of(atlas_config, corpus, *overrides) as http:
        body = {"queries": ["the capital of Peru"] * 20, "seeds": list(range(20)), "topk": 5}
        async with http.post("/retrieve", json=body) as response:
            found = {str(documents) for documents in (await response.json())["result"]}
    assert (len(found) == 1) == behaviour["deterministic"]


# What the client makes of it.


@pytest.mark.parametrize(("overrides", "shared"), [((), 4), (LATENCY, 4), (("--retriever.noise", "0.5"), 0)])
@pytest.mark.parametrize("own", [{}, {"noise": 0.5}, {"backend": "dense"}, {"deterministic": True}])
async def test_the_server_decides_whether_searches_are_shared_and_not_the_workers_config(
    atlas_config, corpus, overrides, shared, own
):
    async with (
        retriever_of(atlas_config, corpus, *overrides) as http,
        client_at(str(http.make_url("/")), **own) as client,
    ):
        await search_together(client, 5)
        assert client.shared == shared


@pytest.mark.parametrize("behaviour", [REPEATS, REPEATS_SLOWLY, DRAWS, CHANGES])
async def test_the_draw_is_sent_to_those_who_accept_it(behaviour):
    service = Service(finds("Lima"))
    async with client_of(service, Service(says(behaviour))) as client:
        await client.search("capital of Peru", 5, QUESTION, 0)
    assert service.bodies[0].get("seeds") == ([5] if behaviour["accepts_seed"] else None)


async def test_health_is_asked_once_by_searches_that_come_together():
    service, health = Service(waits_for_more(9)), Service(says(DRAWS))
    async with client_of(service, health) as client:
        await search_together(client, 9)
        await search_together(client, 9)
    assert len(health.requests) == 1


async def test_simulated_engines_of_other_questions_do_not_share_an_answer():
    """Whatever a server says: what is sent differs."""
    service = Service(waits_for_more(2))
    other = type(QUESTION)(id="q/1", text="Where is Lima?", answers=("Peru",), category="q")
    async with client_of(service, deterministic=True, backend="zerosearch", timeout_s=60) as client:
        await asyncio.gather(*(client.search("Peru", 0, question, 0) for question in (QUESTION, QUESTION, other)))
    assert len(service.bodies) == 2


# Servers of others.

FOREIGN = [
    None,
    says("Method Not Allowed", 405),
    says("Unsupported method ('GET')", 501),
    says("", 302, Location="/elsewhere"),
    says("OK"),
    says(""),
    says("[]"),
    says("[" * 100_000),
    says({"status": "healthy"}),
    says({"deterministic": True}),
    says({"deterministic": "yes", "accepts_seed": 1}),
]


@pytest.mark.parametrize("answer", FOREIGN)
@pytest.mark.parametrize(("deterministic", "asked"), [(False, 5), (True, 1)])
async def test_where_a_server_does_not_say_it_the_config_does(answer, deterministic, asked):
    service = Service(waits_for_more(asked))
    async with client_of(service, answer and Service(answer), deterministic=deterministic) as client:
        await search_together(client, 5)
        assert (len(service.bodies), client.shared, client.failures.total()) == (asked, 5 - asked, 0)
    assert all(set(body) == {"queries", "topk", "return_scores"} for body in service.bodies)


async def test_a_server_whose_health_fails_is_waited_for():
    service, health = Service(finds("Lima")), Service(says("loading", 503), says("busy", 500), says(REPEATS))
    async with client_of(service, health, outage_s=60) as client:
        assert await client.search("capital of Peru", 0, QUESTION, 0) == ["Lima"]
        assert client.failures == {"status": 2}
    assert len(service.bodies) == 1, "nothing is searched before it is known how"


@pytest.mark.parametrize(
    ("failure", "said"),
    [(says("loading", 503), "it answers 503: GET /health: loading"), (hangs, "TimeoutError: GET /health")],
)
async def test_a_server_whose_health_goes_on_failing_is_named_with_that(failure, said):
    async with client_of(Service(finds("Lima")), Service(failure), timeout_s=0.1) as client:
        with pytest.raises(RetrievalUnavailable, match=said):
            await client.search("capital of Peru", 0, QUESTION, 0)


# Another server at the same address.


async def test_after_an_outage_the_retriever_is_asked_again():
    service, health = Service(finds("Lima"), hangs_up, finds("Lima")), Service(says(DRAWS), says(REPEATS))
    async with client_of(service, health, outage_s=60) as client:
        for draw in (3, 4):
            await client.search("capital of Peru", draw, QUESTION, 0)
    assert [body.get("seeds") for body in service.bodies] == [[3], [4], None]


async def test_searches_that_shared_a_request_part_when_the_retriever_comes_back_as_one_that_draws():
    service, health = Service(finds("Lima"), hangs_up, finds("Lima")), Service(says(REPEATS), says(DRAWS))
    async with client_of(service, health, outage_s=60) as client:
        await client.wait_until_answering(60)
        assert await search_together(client, 3) == [["Lima"]] * 3
        assert client.shared == 0
    assert [body.get("seeds") for body in service.bodies[:2]] == [None, None]
    assert sorted(body["seeds"] for body in service.bodies[2:]) == [[0], [1], [2]]


def test_what_a_query_finds_does_not_depend_on_who_else_searches():
    """The reranker gets each query's own candidates; before, all had those of the query with the largest topk."""

    class Numbered:
        passages = tuple({"id": str(n), "contents": f"text {n}"} for n in range(50))

        def search(self, queries, topk):
            return [[(passage, -float(n)) for n, passage in enumerate(self.passages[:topk])] for _ in queries]

    class FromTheEnd:
        def rerank(self, queries, found, topk):
            return [its[::-1][:topk] for its in found]

    settings = RetrieverConfig(rerank=RerankConfig(candidates=10))
    backend = IndexBackend(Numbered(), Degradation(settings), FromTheEnd())
    alone, (together, many) = backend._search([("q", 3)])[0], backend._search([("q", 3), ("q", 50)])
    assert [passage["id"] for passage, _ in alone] == [passage["id"] for passage, _ in together] == ["9", "8", "7"]
    assert [passage["id"] for passage, _ in many[:2]] == ["49", "48"]


def test_which_of_equal_scores_a_query_finds_does_not_depend_on_who_else_searches():
    """BM25's heap keeps others of them for another topk."""

    class Equal:
        passages = tuple({"id": str(n), "contents": f"text {n}"} for n in range(50))

        def search(self, queries, topk):
            return [[(self.passages[topk + n], 1.0) for n in range(topk)] for _ in queries]

    backend = IndexBackend(Equal(), Degradation(RetrieverConfig()))
    assert backend._search([("q", 3)])[0] == backend._search([("r", 5), ("q", 3)])[1]


async def test_the_end_of_a_query_of_megabytes_is_not_searched_for():
    """A tokenizer reads all of it before it cuts, once for each candidate of a reranker, while all others wait."""
    lengths: list[int] = []

    class Measuring:
        passages = ({"id": "0", "contents": "text"},)

        def search(self, queries, topk):
            lengths.extend(map(len, queries))
            return [[(self.passages[0], 1.0)] for _ in queries]

        def rerank(self, queries, found, topk):
            lengths.extend(map(len, queries))
            return found

    backend = IndexBackend(Measuring(), Degradation(RetrieverConfig()), Measuring())
    await backend.search([Query("lima " * 200_000, 0)], 3)
    await backend.close()
    assert lengths == [1 << 14, 1 << 14]
