"""The retriever's protocol over HTTP, and the noise and latency it can simulate."""

from __future__ import annotations

import asyncio
import json
import math
import urllib.request
import zlib

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from pydantic import ValidationError

from cusearch_async.config import MAX_TOPK, RetrieverConfig
from cusearch_async.errors import SearchFailed
from cusearch_async.retrieval.bm25 import Bm25Index
from cusearch_async.retrieval.indexing import Degradation, IndexBackend
from cusearch_async.retrieval.protocol import MAX_DOCUMENTS, MAX_QUERIES
from cusearch_async.retrieval.server import MAX_BODY_BYTES, Retriever

PASSAGES = [{"id": str(i), "contents": f'"City {i}"\nThe number of city{i} is n{i}.'} for i in range(200)]
PERU = {"id": "peru", "contents": '"Peru"\nThe capital of Peru is Lima.'}
LODZ = {"id": "łódź", "contents": '"Łódź"\nThe country of Łódź is Poland.'}
INDEX = Bm25Index.in_memory([*PASSAGES, PERU, LODZ])
PLAIN = {"deterministic": True, "accepts_seed": False}
"""What /health reports of an engine without noise."""
CONTEXT = {"question": "q", "answers": ["a"], "step": 0}


def degradation(seed=0, **settings):
    return Degradation(RetrieverConfig(**settings), seed)


@pytest.fixture
async def serve():
    """A client of a retriever with the given simulation."""
    clients = []

    async def start(**simulation):
        clients.append(
            TestClient(TestServer(Retriever(IndexBackend(INDEX, degradation(**simulation)), 3).application()))
        )
        await clients[-1].start_server()
        return clients[-1]

    yield start
    for client in clients:
        await client.close()


async def ask(client, **body):
    """(status, answer) of a request with a JSON body."""
    async with client.post("/retrieve", json=body) as response:
        return response.status, await response.json()


async def post(client, data, content_type="application/json", encoding="identity"):
    headers = {"Content-Type": content_type, "Content-Encoding": encoding}
    async with client.post("/retrieve", data=data, headers=headers) as response:
        return response.status, await response.text()


async def found(client, **body):
    """Ids of the documents found for each query."""
    status, answer = await ask(client, **body)
    assert status == 200
    return [[document["id"] for document in result] for result in answer["result"]]


# Protocol.


async def test_with_scores_each_row_is_a_document_and_its_score(serve):
    status, answer = await ask(await serve(), queries=["capital Peru"], topk=1, return_scores=True)
    (((row,),)) = answer["result"]
    assert status == 200
    assert row["document"] == PERU
    assert row["score"] > 0


async def test_without_scores_each_row_is_the_document_alone(serve):
    client = await serve()
    for body in ({"return_scores": False}, {}):
        assert await ask(client, queries=["capital Peru"], topk=1, **body) == (200, {"result": [[PERU]]})


async def test_each_query_has_its_result_in_order(serve):
    queries = ["Peru", "no such word", "Łódź", "", "city7"]
    assert await found(await serve(), queries=queries, topk=1) == [["peru"], [], ["łódź"], [], ["7"]]


async def test_no_queries_have_no_results(serve):
    assert await ask(await serve(), queries=[]) == (200, {"result": []})


@pytest.mark.parametrize("query", ["Łódź", "ŁÓDŹ ?!", "łódź 京都 🙂"])
async def test_unicode_is_found_and_comes_back_whole(serve, query):
    assert await ask(await serve(), queries=[query], topk=1) == (200, {"result": [[LODZ]]})


async def test_half_a_character_finds_nothing(serve):
    assert await post(await serve(), b'{"queries": ["\\ud800"]}') == (200, '{"result": [[]]}')


@pytest.mark.parametrize(("topk", "expected"), [(None, 3), (1, 1), (5, 5), (MAX_TOPK, MAX_TOPK)])
async def test_topk_is_the_number_of_documents_and_null_the_configured_one(serve, topk, expected):
    assert [len(result) for result in await found(await serve(), queries=["the number of"], topk=topk)] == [expected]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "missing required field `queries`"),
        ({"queries": "Peru"}, "$.queries"),
        ({"queries": None}, "$.queries"),
        ({"queries": ["Peru", 3]}, "$.queries[1]"),
        ({"queries": ["Peru"] * (MAX_QUERIES + 1)}, f"length <= {MAX_QUERIES} - at `$.queries`"),
        ({"queries": ["Peru"] * 2000, "topk": 51}, f"topk must be at most {MAX_DOCUMENTS}, got 2000 x 51; ask in seve"),
        ({"queries": ["Peru"], "topk": 0}, ">= 1 - at `$.topk`"),
        ({"queries": ["Peru"], "topk": MAX_TOPK + 1}, f"<= {MAX_TOPK} - at `$.topk`"),
        ({"queries": ["Peru"], "topk": 10**30}, "$.topk"),
        ({"queries": ["Peru"], "topk": 2.0}, "got `float` - at `$.topk`"),
        ({"queries": ["Peru"], "topk": "2"}, "got `str` - at `$.topk`"),
        ({"queries": ["Peru"], "topk": True}, "got `bool` - at `$.topk`"),
        ({"queries": ["Peru"], "return_scores": 1}, "$.return_scores"),
        ({"queries": ["Peru"], "return_scores": None}, "$.return_scores"),
        ({"queries": ["Peru"], "seeds": 3}, "$.seeds"),
        ({"queries": ["Peru"], "seeds": []}, "seeds must be a list with one entry per query (1)"),
        ({"queries": ["Peru"], "seeds": [1, 2]}, "seeds must be a list with one entry per query (1)"),
        ({"queries": ["Peru"], "seeds": [-1]}, "$.seeds[0]"),
        ({"queries": ["Peru"], "seeds": [1.5]}, "$.seeds[0]"),
        ({"queries": ["Peru"], "seeds": [True]}, "$.seeds[0]"),
        ({"queries": ["Peru"], "contexts": "x"}, "$.contexts"),
        ({"queries": ["Peru"], "contexts": []}, "contexts must be a list with one entry per query (1)"),
        ({"queries": ["Peru"], "contexts": [3]}, "$.contexts[0]"),
        ({"queries": ["Peru"], "contexts": [CONTEXT | {"question": " "}]}, "$.contexts[0].question"),
        ({"queries": ["Peru"], "contexts": [CONTEXT | {"answers": []}]}, "$.contexts[0].answers"),
        ({"queries": ["Peru"], "contexts": [CONTEXT | {"step": -1}]}, "$.contexts[0].step"),
    ],
)
async def test_a_wrong_field_is_refused_by_its_name(serve, body, named):
    status, answer = await ask(await serve(), **body)
    assert status == 400
    assert named in answer["error"]


@pytest.mark.parametrize("data", [b"", b"Peru", b'{"queries": ["Peru"', b"{'queries': []}", b"\xff\xfe", b'"\xe9"'])
async def test_a_body_that_is_not_json_is_refused(serve, data):
    status, text = await post(await serve(), data)
    assert status == 400
    assert json.loads(text) == {"error": "the body must be JSON in UTF-8, and not nested too deeply"}


@pytest.mark.parametrize("data", [b"null", b"[]", b'"Peru"', b"3", b"NaN"])
async def test_a_body_that_is_no_object_is_refused(serve, data):
    status, text = await post(await serve(), data)
    assert status == 400
    assert "Expected `object`" in text


@pytest.mark.parametrize("depth", [100, 950, 990, 1000, 100_000])
@pytest.mark.parametrize("field", ["", '{"queries": ["x"], "topk": ', '{"queries": ["x"], "contexts": '])
async def test_a_body_nested_beyond_reason_is_refused(serve, field, depth):
    """Below the depth that a parser reaches as well as above it, in few words."""
    nested = field.encode() + b"[" * depth + b"]" * depth + b"}" * bool(field)
    status, text = await post(await serve(), nested)
    assert status == 400
    assert len(json.loads(text)["error"]) < 300


async def test_a_compressed_body_is_read(serve):
    body = zlib.compress(b'{"queries": ["Peru"], "topk": 1}')
    assert (await post(await serve(), body, encoding="deflate"))[0] == 200


async def test_a_body_that_is_too_large_once_decompressed_is_refused_as_that(serve):
    body = zlib.compress(b" " * (MAX_BODY_BYTES + 1))
    assert len(body) < 50_000
    status, text = await post(await serve(), body, encoding="deflate")
    assert (status, json.loads(text)) == (413, {"error": f"the body must be at most {MAX_BODY_BYTES} bytes"})


async def test_a_body_that_is_not_compressed_as_it_says_is_refused(serve):
    status, text = await post(await serve(), b"garbage", encoding="deflate")
    assert (status, json.loads(text)) == (400, {"error": "the body does not match its Content-Encoding"})


async def test_a_body_in_an_unknown_encoding_is_refused(serve):
    status, text = await post(await serve(), b'{"queries": ["Peru"]}', "application/json; charset=klingon")
    assert status == 400
    assert "error" in json.loads(text)


async def test_a_body_that_is_too_large_is_refused_as_that(serve):
    client = await serve()
    status, text = await post(client, b'{"queries": ["' + b"x" * MAX_BODY_BYTES + b'"]}')
    assert status == 413
    assert json.loads(text) == {"error": f"the body must be at most {MAX_BODY_BYTES} bytes"}
    assert await found(client, queries=["Peru"], topk=1) == [["peru"]], "and the next request is answered"


async def test_health_counts_passages_and_queries(serve):
    client = await serve()
    await found(client, queries=["Peru", "Łódź"])
    await ask(client, queries=3)
    async with client.get("/health") as response:
        assert await response.json() == {"status": "ok", "queries": 2, **PLAIN, "passages": 202}


# Noise and distractors.


async def test_the_same_draw_brings_the_same_noise_and_another_draw_other_noise(serve):
    client = await serve(noise=1.0)
    one = await found(client, queries=["Peru", "Peru", "Peru"], seeds=[5, 6, 5], topk=5)
    again = await found(client, queries=["Łódź", "Peru"], seeds=[6, 5], topk=5)
    assert one[0] == one[2] == again[1]
    assert one[1] == again[0]
    assert one[0] != one[1]


async def test_two_servers_with_one_seed_agree_and_with_another_they_do_not(serve):
    body = {"queries": ["Peru"] * 4, "seeds": [0, 1, 2, 3], "topk": 5}
    servers = [await serve(noise=0.5, seed=seed) for seed in (1, 1, 2)]
    one, same, other = [await found(client, **body) for client in servers]
    assert one == same
    assert one != other


async def test_without_draws_every_search_is_drawn_again(serve):
    client = await serve(noise=1.0)
    results = [tuple((await found(client, queries=["Peru"], topk=5))[0]) for _ in range(5)]
    assert len(set(results)) == 5


async def test_without_noise_a_draw_changes_nothing(serve):
    client = await serve()
    results = await found(client, queries=["city7 number"] * 3, seeds=[0, 1, 2**70], topk=5)
    assert results[0] == results[1] == results[2]
    assert results[0][0] == "7"


async def test_full_noise_returns_random_documents_only(serve):
    results = await found(await serve(noise=1.0), queries=["Peru"] * 50, seeds=list(range(50)), topk=3)
    assert all(len(result) == 3 for result in results)
    assert sum("peru" in result for result in results) <= 5  # by chance 150 / 202
    assert len({number for result in results for number in result}) > 80


async def test_noise_may_be_the_querys_and_not_the_searchs(serve):
    """Equal queries are then equally lost, and in other words the same may be found; as many are lost."""
    client = await serve(noise=0.4, stochastic=False)
    again = await found(client, queries=["Peru zz"] * 20, seeds=list(range(20)), topk=2)
    assert len(set(map(tuple, again))) == 1
    results = await found(client, queries=[f"Peru zz{number}" for number in range(400)], seeds=[0] * 400, topk=1)
    assert sum(result != ["peru"] for result in results) / 400 == pytest.approx(0.4, abs=0.08)
    async with client.get("/health") as response:
        assert (await response.json())["deterministic"] is True


async def test_noise_is_as_frequent_as_it_is_set(serve):
    draws = list(range(1000))
    results = await found(await serve(noise=0.3), queries=["Peru"] * 1000, seeds=draws, topk=1)
    assert sum(result != ["peru"] for result in results) / 1000 == pytest.approx(0.3, abs=0.07)


async def test_distractors_replace_all_but_the_best(serve):
    query, draws = "city7 number of", list(range(20))
    plain = await found(await serve(), queries=[query], topk=4)
    some = await found(await serve(distractors=2), queries=[query] * 20, seeds=draws, topk=4)
    many = await found(await serve(distractors=9), queries=[query] * 20, seeds=draws, topk=4)
    assert all(result[:2] == plain[0][:2] and len(result) == 4 for result in some)
    assert all(result[0] == "7" and len(result) == 4 for result in many)
    assert len({tuple(result[2:]) for result in some}) > 15
    assert len({tuple(result[1:]) for result in many}) > 15


# Latency.


def test_latency_has_the_median_and_the_99th_percentile_it_is_set_to():
    """Standard errors of the two quantiles of 8,000 draws, sigma being 0.69: about 1 % and 3 %."""
    simulation = degradation(latency_median_s=0.1, latency_p99_s=0.5)
    waits = np.array([simulation.latency_s(draw) for draw in range(8000)])
    assert np.median(waits) == pytest.approx(0.1, rel=0.05)
    assert np.quantile(waits, 0.99) == pytest.approx(0.5, rel=0.15)
    assert np.log(waits).std() == pytest.approx(math.log(5) / 2.3263, rel=0.05)


def test_latency_is_less_than_a_worker_waits():
    """A search that is sent again draws the same: it was never answered, and the run ended."""
    simulation = degradation(latency_median_s=2.0, latency_p99_s=15.0)
    assert (
        max(simulation.latency_s(draw) for draw in range(20_000))
        == simulation.settings.longest_latency_s
        < simulation.settings.timeout_s
    )
    with pytest.raises(ValidationError, match=r"latency_p99_s \(30\) must be at most 0\.9 x timeout_s \(27\)"):
        RetrieverConfig(latency_median_s=1.0, latency_p99_s=30.0)


def test_latency_is_a_function_of_seed_and_draw():
    one, same, other = (degradation(latency_median_s=0.1, latency_p99_s=0.5, seed=seed) for seed in (1, 1, 2))
    assert [one.latency_s(draw) for draw in range(9)] == [same.latency_s(draw) for draw in range(9)]
    assert len({simulation.latency_s(draw) for simulation in (one, other) for draw in range(9)}) == 18


def test_no_latency_is_none_and_a_flat_one_is_constant():
    assert degradation().latency_s(3) == 0.0
    flat = degradation(latency_median_s=0.2, latency_p99_s=0.2)
    assert {flat.latency_s(draw) for draw in range(9)} == {0.2}


# What is added to the protocol, and what fails behind it.


class Failing:
    deterministic, accepts_seed = True, False

    def __init__(self, error):
        self.error = error

    async def search(self, queries, topk):
        raise self.error

    def figures(self):
        return {"passages": 7, "engine": "a text"}

    async def close(self):
        pass


async def test_an_engine_that_fails_is_answered_with_its_status_and_the_server_lives_on():
    failing = Failing(SearchFailed("the engine is out of order", 504))
    async with TestClient(TestServer(Retriever(failing).application())) as client:
        assert await ask(client, queries=["x"]) == (504, {"error": "the engine is out of order"})
        async with client.get("/health") as response:
            assert await response.json() == {"status": "ok", "queries": 1, **PLAIN, "passages": 7, "engine": "a text"}
        async with client.get("/metrics") as response:
            figures = await response.text()
    assert 'retriever_requests_total{status="504"} 1.0' in figures
    assert "retriever_passages 7.0" in figures
    assert "retriever_request_seconds_count 1.0" in figures


async def test_an_engine_that_breaks_is_a_500_with_its_reason():
    async with TestClient(TestServer(Retriever(Failing(MemoryError("no room"))).application())) as client:
        assert await ask(client, queries=["x"]) == (500, {"error": "MemoryError: no room"})
        async with client.get("/metrics") as response:
            assert 'retriever_requests_total{status="500"} 1.0' in await response.text()


async def test_concurrent_requests_are_searched_together(serve):
    client = await serve()
    found_alone = [await found(client, queries=[f"number of city{i}"], topk=1 + i % 3) for i in range(30)]
    batches = []
    search = INDEX.search
    INDEX.search = lambda queries, topk: batches.append(len(queries)) or search(queries, topk)
    try:
        together = await asyncio.gather(
            *(found(client, queries=[f"number of city{i}"], topk=1 + i % 3) for i in range(30))
        )
    finally:
        del INDEX.search
    assert together == found_alone
    assert sum(batches) == 30
    assert len(batches) < 15


class SearchR1Client:
    """Written from the description of Search-R1's protocol alone, with nothing of ours."""

    def __init__(self, url, topk):
        self.url, self.topk = url, topk

    def batch_search(self, queries):
        body = json.dumps({"queries": queries, "topk": self.topk, "return_scores": True}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return [self.as_text(result) for result in json.load(response)["result"]]

    def as_text(self, result):
        text = ""
        for rank, item in enumerate(result):
            title, *lines = item["document"]["contents"].split("\n")
            text += f"Doc {rank + 1}(Title: {title}) " + "\n".join(lines) + "\n"
        return text


async def test_a_client_of_search_r1_works_unchanged(serve):
    client = await serve()
    searches = SearchR1Client(str(client.make_url("/retrieve")), topk=2)
    peru, lodz, nothing = await asyncio.to_thread(searches.batch_search, ["capital of Peru", "Łódź country", "zzz"])
    assert peru.startswith('Doc 1(Title: "Peru") The capital of Peru is Lima.\nDoc 2(Title: ')
    assert lodz.startswith('Doc 1(Title: "Łódź") The country of Łódź is Poland.\n')
    assert nothing == ""


@pytest.mark.system
async def test_a_whole_training_batch_of_search_r1_is_one_request(serve):
    """Its train_grpo.sh plays 512 questions five times and asks for all of them at once."""
    client = await serve()
    searches = SearchR1Client(str(client.make_url("/retrieve")), topk=3)
    long = " ".join(["Łódź"] * 100)
    queries = [f"the number of city{i % 200} {long}" for i in range(2560)]
    texts = await asyncio.to_thread(searches.batch_search, queries)
    assert len(texts) == 2560
    assert all(f'(Title: "City {i % 200}")' in text for i, text in enumerate(texts))
