"""The search client against real servers: a failure is retried, then raised, and never becomes documents."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cusearch_async.config import EpisodeConfig, RetrieverConfig
from cusearch_async.errors import ConfigError, RetrievalUnavailable, SearchRefused
from cusearch_async.retrieval.bm25 import Bm25Index
from cusearch_async.retrieval.client import SearchClient
from cusearch_async.retrieval.indexing import Degradation, IndexBackend
from cusearch_async.retrieval.server import Retriever
from tests.conftest import free_port
from tests.http_service import Service, hangs, hangs_up, says
from tests.retrieval.retrievers import QUESTION, client_of, closes_early, finds, waits_for_more


async def test_documents_come_best_first():
    service = Service(finds("Lima", "Peru"))
    async with client_of(service) as client:
        assert await client.search("capital of Peru", 11, QUESTION, 0) == ["Lima", "Peru"]
    assert service.bodies == [{"queries": ["capital of Peru"], "topk": 2, "return_scores": True}]
    assert (client.searches, client.failures.total()) == (1, 0)


async def test_finding_nothing_is_an_answer():
    async with client_of(Service(finds())) as client:
        assert await client.search("capital of Atlantis", 0, QUESTION, 0) == []
    assert (client.searches, client.failures.total()) == (1, 0)


@pytest.mark.parametrize("failure", [*(says("", status) for status in (401, 403, 404, 408, 429, 500, 503)), hangs_up])
async def test_a_failure_that_passes_is_not_noticed(failure):
    """401, 403 and 404 are what a gateway answers while its backend is down."""
    service = Service(failure, finds("Lima"))
    async with client_of(service, outage_s=60) as client:
        assert await client.search("capital of Peru", 4, QUESTION, 0) == ["Lima"]
    assert (client.searches, client.failures.total()) == (1, 1)
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
    '{"result": [{"error": "down"}]}',
    # An empty text or object where a list of rows belongs is no empty list of rows.
    '{"result": [{}]}',
    '{"result": [""]}',
    '{"result": {"": []}}',
]
OTHER_SCHEMAS = [
    '{"result": [[{"document": {"id": "0", "title": "Peru", "text": "Lima"}}]]}',
    '{"result": [[{"document": {"id": "0", "contents": "Lima"}}, {"document": {"text": "Lima"}}]]}',
    '{"result": [[{"document": {"id": "0", "contents": "Lima"}}, {}]]}',
    '{"result": [[{"id": "0", "title": "Peru", "text": "Lima"}]]}',
    '{"result": [[{"document": {"\\u001b[31m": "0"}}]]}',
    '[[{"id": "0", "text": "Lima"}]]',
    '{"documents": [{"page_content": "Lima"}]}',
    '{"result": [[{"id": "0", "contents": "Lima"}]]}',
    '{"result": [["Lima"]]}',
    '{"result": ["Lima"]}',
    '{"result": [[{"document": "Lima"}]]}',
    '{"result": [[{"document": {"id": "0", "contents": null}}]]}',
    '{"results": [[{"document": {"contents": "Lima"}, "score": 1}]]}',
    '{"result": [{"document": {"contents": "Lima"}, "score": 1}]}',
    '[[{"document": {"contents": "Lima"}, "score": 1}]]',
]


@pytest.mark.parametrize("body", OTHER_SCHEMAS)
async def test_documents_in_another_schema_are_named_at_the_first_answer_and_not_waited_for(body):
    service = Service(says('{"result": [[]]}'), says(body))
    async with client_of(service, outage_s=300) as client:
        await client.wait_until_answering(300)  # found nothing
        with pytest.raises(ConfigError) as caught:
            await client.search("capital of Peru", 0, QUESTION, 0)
    assert "does not speak Search-R1's protocol: " in str(caught.value)
    assert f"; the answer is {json.loads(body)!r:.200}" in str(caught.value), "no control characters"
    assert len(service.bodies) == 2
    async with client_of(Service(says(body)), outage_s=300) as client:
        with pytest.raises(ConfigError, match=r"retriever\.url http://127\.0\.0\.1"):
            await client.wait_until_answering(300)


@pytest.mark.parametrize("body", OTHER_SCHEMAS)
async def test_another_server_that_answers_for_a_while_is_an_outage(body):
    service = Service(finds("Lima"), says(body), finds("Lima"))
    async with client_of(service, outage_s=60) as client:
        for _ in range(2):
            assert await client.search("capital of Peru", 0, QUESTION, 0) == ["Lima"]
        assert client.failures == {"garbage": 1}


async def test_more_documents_than_were_asked_for_are_cut_and_told_once(caplog):
    async with client_of(Service(finds("a", "b", "c", "d"))) as client:
        for _ in range(3):
            assert await client.search("capital of Peru", 0, QUESTION, 0) == ["a", "b"]
    assert [m for m in caplog.messages if "answers with 4 documents, and retriever.topk is 2" in m] == caplog.messages
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("body", ["", "<html>Bad gateway</html>", '{"result": [[', "{'result': []}", *WRONG_SHAPES])
async def test_an_answer_in_a_wrong_form_is_a_failure_and_not_an_empty_result(body):
    async with client_of(Service(says(body))) as client:
        with pytest.raises(RetrievalUnavailable, match=r"has given no valid answer for 0\.05 s"):
            await client.search("capital of Peru", 0, QUESTION, 0)
    assert (client.searches, client.failures.total()) == (0, 1)


async def says_no_utf8(service: Service, request: web.Request) -> web.StreamResponse:
    return web.Response(body=b'{"result": [[{"document": {"contents": "\xff"}}]]}', content_type="application/json")


WRONG_ANSWERS = [closes_early, hangs_up, says_no_utf8, says('{"result": [[]]}', 500), says("", 204)]


@pytest.mark.parametrize("failure", WRONG_ANSWERS)
async def test_a_retriever_that_breaks_off_is_a_failure(failure):
    async with client_of(Service(failure)) as client:
        with pytest.raises(RetrievalUnavailable):
            await client.search("capital of Peru", 0, QUESTION, 0)


async def test_a_retriever_that_hangs_is_given_up_after_the_timeout():
    async with client_of(Service(hangs), timeout_s=0.1) as client:
        with pytest.raises(RetrievalUnavailable, match="TimeoutError"):
            await client.search("capital of Peru", 0, QUESTION, 0)


async def test_a_retriever_that_stays_down_is_asked_several_times_and_then_named():
    service = Service(says("down", 500))
    async with client_of(service, outage_s=1.0) as client:
        with pytest.raises(RetrievalUnavailable) as caught:
            await client.search("capital of Peru", 0, QUESTION, 0)
    assert 2 <= len(service.bodies) - 1 == client.failures.total() <= 12, "and another search is asked once"
    assert client.searches == 0
    message = str(caught.value)
    assert "http://127.0.0.1:" in message
    assert "for 1 s" in message
    assert "500" in message
    assert "retriever.url" in message


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_request_that_is_refused_as_wrong_fails_this_search_alone_and_is_not_repeated(status):
    service = Service(says('{"error": "topk must be an integer"}', status), finds("Lima"))
    async with client_of(service, outage_s=60) as client:
        with pytest.raises(SearchRefused, match=rf"refuses the search for 'capital.*\({status}\): .*topk must be"):
            await client.search("capital of Peru", 0, QUESTION, 0)
        assert len(service.bodies) == 1
        assert await client.search("capital of Chile", 0, QUESTION, 0) == ["Lima"]


async def test_a_retriever_that_is_not_there_is_named():
    config = RetrieverConfig(url=f"http://127.0.0.1:{free_port()}", outage_s=0.05)
    async with SearchClient.session(config) as session:
        with pytest.raises(RetrievalUnavailable, match=config.url):
            await SearchClient(session, config, EpisodeConfig(), 4).search("capital of Peru", 0, QUESTION, 0)


async def test_waiting_for_a_retriever_has_its_own_limit():
    async with client_of(Service(says("starting", 503), finds()), outage_s=0.01) as client:
        await client.wait_until_answering(60)
        status = client.status()
        assert (status["searches"], status["search_failures"], status["search_p99_s"]) == (0, 0, 0), (
            "as in a first step"
        )
    async with client_of(Service(says("starting", 503)), outage_s=60) as client:
        with pytest.raises(RetrievalUnavailable, match=r"for 0\.05 s"):
            await client.wait_until_answering(0.05)


async def test_searches_at_the_same_time_each_get_their_own_answer():
    async def echo(service: Service, request: web.Request) -> web.StreamResponse:
        (query,) = (await request.json())["queries"]
        return web.json_response({"result": [[{"document": {"id": "0", "contents": query}, "score": 1.0}]]})

    async with client_of(Service(echo)) as client:
        queries = [f"query {i}" for i in range(30)]
        found = await asyncio.gather(*(client.search(query, i, QUESTION, 0) for i, query in enumerate(queries)))
    assert found == [[query] for query in queries]


async def test_the_client_understands_the_projects_own_retriever():
    index = Bm25Index.in_memory(
        [{"id": "0", "contents": '"Peru"\nThe capital of Peru is Lima.'}, {"id": "1", "contents": "x y"}]
    )
    async with TestServer(Retriever(IndexBackend(index, Degradation(RetrieverConfig()))).application()) as server:
        config = RetrieverConfig(url=f"http://127.0.0.1:{server.port}")
        async with SearchClient.session(config) as session:
            client = SearchClient(session, config, EpisodeConfig(), 4)
            assert await client.search("capital of Peru", 0, QUESTION, 0) == ['"Peru"\nThe capital of Peru is Lima.']
            assert await client.search("zzz", 0, QUESTION, 0) == []


# What the client does for many episodes at once.


async def test_equal_searches_in_flight_are_asked_once_of_a_deterministic_engine():
    service = Service(waits_for_more(3))
    async with client_of(service, deterministic=True) as client:
        asked = [client.search("capital of Peru", draw, QUESTION, 0) for draw in range(5)]
        others = [client.search(f"capital {i}", i, QUESTION, 0) for i in range(2)]
        found = await asyncio.gather(*asked, *others)
    assert len(service.bodies) == 3
    assert found == [["Lima"]] * 7
    assert (client.searches, client.shared) == (3, 4)
    assert found[0] is not found[1], "each may do with its list what it wants"


async def test_only_a_simulated_engine_is_told_the_question_and_its_answers():
    for backend, contexts in (
        ("bm25", None),
        ("serper", None),
        ("zerosearch", [{"question": QUESTION.text, "answers": ["Lima"], "step": 3}]),
    ):
        service = Service(finds("Lima"))
        async with client_of(service, backend=backend, timeout_s=60) as client:
            await client.search("capital of Peru", 1, QUESTION, 14)
        assert service.bodies[0].get("contexts") == contexts


async def test_a_retriever_in_trouble_gets_one_attempt_at_a_time():
    service = Service(says("down", 500))
    async with client_of(service, outage_s=1.5) as client:
        asked = [asyncio.create_task(client.search(f"q{i}", i, QUESTION, 0)) for i in range(40)]
        while client.failures.total() < 40:
            await asyncio.sleep(0.01)
        begun = len(service.bodies)
        await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
        most = len(service.bodies) - begun
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    assert most <= 12, "40 that retry by themselves would have asked over 100 times"


async def test_the_breaker_closes_with_the_first_answer():
    failing = [says("down", 500)] * 12
    service = Service(*failing, finds("Lima"))
    async with client_of(service, outage_s=60) as client:
        found = await asyncio.gather(*(client.search(f"q{i}", i, QUESTION, 0) for i in range(12)))
        assert found == [["Lima"]] * 12
        status = client.status()
    assert (status["searches"], status["search_failures_by_kind"], status["retriever_down_s"]) == (12, "status:12", 0.0)
    assert status["search_p99_s"] > 0


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(says("down", 500), "status"), (hangs_up, "closed"), (says("{}"), "garbage"), (hangs, "timeout")],
)
async def test_failures_are_told_apart(failure, kind):
    async with client_of(Service(failure, finds()), timeout_s=0.3, outage_s=60) as client:
        await client.search("q", 0, QUESTION, 0)
        assert client.failures == {kind: 1}


async def refuses_what_is_wrong(service, request):
    query = (await request.json())["queries"][0]
    return await (says("topk", 422) if query == "wrong" else says("down", 500))(service, request)


async def test_a_retriever_that_refuses_a_search_as_wrong_has_answered():
    async with client_of(Service(refuses_what_is_wrong), outage_s=60) as client:
        failing = asyncio.create_task(client.search("q", 0, QUESTION, 0))
        while not client.down_s:
            await asyncio.sleep(0.01)
        client._failed_in_a_row = 3
        with pytest.raises(SearchRefused, match="refuses the search for 'wrong'"):
            await client.search("wrong", 0, QUESTION, 0)
        assert (client.down_s, client._last_failure, client._failed_in_a_row) == (0.0, "", 0)
        failing.cancel()


async def test_a_search_that_is_refused_after_a_failure_leaves_the_retriever_up():
    service = Service(says("down", 500), says("topk", 422), says("down", 500), finds("Lima"))
    async with client_of(service, outage_s=0.6) as client:
        with pytest.raises(SearchRefused):
            await client.search("q", 0, QUESTION, 0)
        assert client.status()["retriever_down_s"] == 0.0
        await asyncio.sleep(0.7)
        assert await client.search("q", 0, QUESTION, 0) == ["Lima"], "no outage of 0.6 s"


async def test_a_search_that_is_cancelled_leaves_no_retriever_down():
    service = Service(says("down", 500), says("down", 500), finds("Lima"))
    async with client_of(service, outage_s=0.6) as client:
        failing = asyncio.create_task(client.search("q", 0, QUESTION, 0))
        while not client.down_s:
            await asyncio.sleep(0.01)
        failing.cancel()
        await asyncio.wait([failing])
        assert (client.down_s, client._last_failure, client._failed_in_a_row) == (0.0, "", 0)
        await asyncio.sleep(0.7)
        assert await client.search("q", 0, QUESTION, 0) == ["Lima"], "no outage of 0.6 s"


GIVEN_UP_S = 0.3


async def give_up(client, count: int) -> None:
    """Searches that are cancelled after GIVEN_UP_S, as by the end of their episodes' time."""
    for number in range(count):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GIVEN_UP_S):
                await client.search(f"q{number}", number, QUESTION, 0)


async def test_searches_that_are_given_up_one_after_the_other_do_not_hide_an_outage():
    """Each began another outage, which none outlived: the retriever was never named."""
    async with client_of(Service(says("down", 500)), outage_s=0.6) as client:
        with pytest.raises(RetrievalUnavailable, match="has given no valid answer"):
            await give_up(client, 10)


async def test_searches_that_were_given_up_long_ago_are_of_another_outage():
    """The time before added to failures at any later time, and ended the worker after seconds of them."""
    service = Service(says("down", 500))
    async with client_of(service, outage_s=GIVEN_UP_S) as client:
        client._failed_s, client._rested_at = 0.9 * GIVEN_UP_S, time.monotonic() - 1.1 * GIVEN_UP_S
        service._answers = (says("down", 500), finds("Lima"))
        assert await client.search("q", 0, QUESTION, 0) == ["Lima"]


async def test_an_answer_ends_the_outage_of_searches_that_were_given_up():
    down = says("down", 500)
    service = Service(down)
    async with client_of(service, outage_s=0.6) as client:
        await give_up(client, 1)
        service._answers = (finds("Lima"),)
        assert await client.search("q", 0, QUESTION, 0) == ["Lima"]
        service._answers = (down,)
        await give_up(client, 1)


async def test_a_search_that_is_never_answered_while_others_are_is_refused_by_itself():
    async def poisoned(service, request):
        query = (await request.json())["queries"][0]
        return await (says("content filter", 502) if query == "poison" else finds("Lima"))(service, request)

    async with client_of(Service(poisoned), outage_s=0.5) as client:
        failing = asyncio.create_task(client.search("poison", 0, QUESTION, 0))
        number = 0
        while not failing.done():
            assert await client.search(f"q{number}", number, QUESTION, 0) == ["Lima"]
            number += 1
        with pytest.raises(SearchRefused, match=r"answers other searches.*'poison'.*it answers 502: content filter"):
            await failing


async def test_a_search_that_is_never_answered_is_refused_by_itself_where_nobody_else_searches():
    """It ended the worker, whose successor got the same ticket, and ended, too."""

    async def poisoned(service, request):
        query = (await request.json())["queries"][0]
        return await (says("content filter", 502) if query == "poison" else finds("Lima"))(service, request)

    async with client_of(Service(poisoned), outage_s=0.5) as client:
        for _ in range(2):
            with pytest.raises(SearchRefused, match=r"answers other searches.*'poison'.*it answers 502: content filt"):
                await client.search("poison", 0, QUESTION, 0)
        assert await client.search("Peru", 0, QUESTION, 0) == ["Lima"]


async def test_what_was_answered_before_does_not_hide_an_outage():
    """A retriever that keeps its answers has that to the first search of each worker, also when its budget is spent."""
    kept = {"first search"}

    async def spent(service, request):
        query = (await request.json())["queries"][0]
        return await (finds("kept") if query in kept else says("spent", 403))(service, request)

    async with client_of(Service(spent), outage_s=0.5) as client:
        await client.wait_until_answering(5.0)
        with pytest.raises(RetrievalUnavailable, match=r"has given no valid answer for 0\.5 s"):
            await client.search("Peru", 0, QUESTION, 0)


async def test_a_search_that_alone_is_never_answered_is_asked_for_ever_more_rarely():
    """Eight times a second for five minutes: each may be paid for, or fail the others of its batch."""

    async def poisoned(service, request):
        query = (await request.json())["queries"][0]
        return await (says("content filter", 502) if query == "poison" else finds("Lima"))(service, request)

    service = Service(poisoned)
    async with client_of(service, outage_s=3.0) as client:
        failing = asyncio.create_task(client.search("poison", 0, QUESTION, 0))
        number = 0
        while not failing.done():
            await client.search(f"q{number}", number, QUESTION, 0)
            number += 1
        assert isinstance(failing.exception(), SearchRefused)
    assert sum(body["queries"] == ["poison"] for body in service.bodies) <= 18


async def test_one_failure_that_takes_longer_than_the_outage_says_nothing_of_other_searches():
    async def slow(service, request):
        await asyncio.sleep(0.3)
        return await says("down", 500)(service, request)

    async with client_of(Service(slow), outage_s=0.2) as client:
        with pytest.raises(RetrievalUnavailable, match=r"has given no valid answer for 0.2 s \(it answers 500: down"):
            await client.search("q", 0, QUESTION, 0)
