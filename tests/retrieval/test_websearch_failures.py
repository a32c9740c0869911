"""Web search that fails: what is asked again, what is said, at what rate and cost, and never the key."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cusearch_async.config import EpisodeConfig, WebConfig, load_config
from cusearch_async.errors import ConfigError, SearchFailed
from cusearch_async.processes.retriever import make_backend
from cusearch_async.retrieval.client import SearchClient
from cusearch_async.retrieval.server import Retriever
from cusearch_async.retrieval.websearch import WebSearch, pause_s, web_search
from tests.conftest import SLOW, free_port
from tests.http_service import Service, hangs, hangs_up, says
from tests.retrieval.retrievers import QUESTION
from tests.retrieval.web_services import (
    ENGINES,
    KEY,
    LIMA,
    LIMA_PASSAGE,
    VARIABLE,
    asking,
    closes_early,
    failure,
    finds,
    found,
    says_nothing_http,
    search_of,
    served,
    unless_asked_for,
)

pytestmark = pytest.mark.system  # real time passes

SECRET = "s3cret"
"""Of the key, what no text may show."""


async def repeats_the_request(service: Service, request: web.Request) -> web.StreamResponse:
    """A careless service: what it was sent is in its complaint."""
    return web.Response(text=f"{KEY} {request.rel_url} {dict(request.headers)}", status=400)


async def repeats_the_key_late(service: Service, request: web.Request) -> web.StreamResponse:
    """So that a message which is cut has half of it."""
    return web.Response(text="x" * 190 + KEY, status=400)


def everything_of(error: BaseException | None) -> str:
    """All that a traceback or a debugger could show of an error and of those behind it."""
    if error is None:
        return ""
    return f"{error!s} {error!r} {error.args}" + everything_of(error.__cause__) + everything_of(error.__context__)


# Failures.

NOT_JSON = ["", "<html>busy</html>", '{"organic": [', "[" * 100_000]
NOT_AN_ANSWER = [None, [], "Lima", 3, {}, {"message": "?"}, {"organic": None, "organic_results": None}]
NOT_AN_ANSWER += [{"organic": {}, "organic_results": {}}, {"organic": ["a"], "organic_results": ["a"]}]
NOT_AN_ANSWER += [{"error": "We couldn't get valid results.", "organic_results": [], "organic": []}]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("body", NOT_JSON + [json.dumps(answer) for answer in NOT_AN_ANSWER])
async def test_an_answer_of_another_shape_is_a_failure_and_never_empty(engine, body):
    async with asking(engine, says(body)) as (_, search):
        assert (await failure(search)).status == 502
    assert search.figures()["failures"] == 1


@pytest.mark.parametrize(
    ("engine", "trouble"),
    [
        ("serper", says({"message": "slow down"}, 429)),
        ("serpapi", says({"error": "oh"}, 500)),
        ("serper", says("busy", 503)),
        ("serpapi", says("<html>")),
        ("serper", says({})),
        ("serper", hangs_up),
        ("serpapi", hangs_up),
        ("serpapi", closes_early),
        ("serper", says_nothing_http),
    ],
)
async def test_what_may_pass_is_asked_again(engine, trouble):
    async with asking(engine, trouble, finds(LIMA), attempts=2) as (service, search):
        assert await found(search, "capital of Peru") == [[LIMA_PASSAGE]]
    assert len(service.requests) == 2
    assert search.figures() == {"requests": 2, "cache_hits": 0, "failures": 0, "retries": 1}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("trouble", "status", "named"),
    [
        (says({"message": "slow down"}, 429), 429, "it answers 429: .*slow down"),
        (says("oh dear", 500), 502, "it answers 500: oh dear"),
        (says("<html>"), 502, "its answer is not JSON: <html>"),
        (says({"a": 1}), 502, "without a list of 'organic.*; there is a"),
        (hangs_up, 502, "Server disconnected"),
    ],
)
async def test_what_does_not_pass_is_raised_by_its_name_after_all_attempts(engine, trouble, status, named):
    async with served(trouble) as (service, address), search_of(engine, address, attempts=2) as search:
        with pytest.raises(
            SearchFailed, match=f"{engine} at {address}/{engine} .*'capital of Peru'.*{named}"
        ) as caught:
            await found(search, "capital of Peru")
    assert caught.value.status == status
    assert len(service.requests) == 2
    assert search.figures() == {"requests": 2, "cache_hits": 0, "failures": 1, "retries": 1}


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_service_that_takes_too_long_is_named_with_its_time(engine):
    async with asking(engine, hangs, timeout_s=0.1, attempts=2) as (service, search):
        error = await failure(search)
    assert error.status == 504
    assert "retriever.web.timeout_s (0.1 s)" in str(error)
    assert len(service.requests) == 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_key_is_final_and_its_variable_is_named(engine, status):
    async with asking(engine, says({"message": "Unauthorized."}, status), attempts=3) as (service, search):
        error = await failure(search)
    assert f"set {VARIABLE[engine]} to a valid key" in str(error)
    assert "Unauthorized." in str(error)
    assert len(service.requests) == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("status", "told"), [(400, 502), (402, 502), (404, 502), (414, 422)])
async def test_a_wrong_request_is_not_repeated(engine, status, told):
    """The client repeats it for 5 minutes, unless it is the query that is refused."""
    async with asking(engine, says({"message": "Not enough credits"}, status), attempts=3) as (service, search):
        error = await failure(search)
    assert error.status == told
    assert f"{status}: " in str(error)
    assert "Not enough credits" in str(error)
    assert len(service.requests) == 1


async def test_a_search_waits_as_long_as_the_service_asks():
    async with asking("serper", says("later", 429, Retry_After="1"), finds(LIMA), attempts=2) as (service, search):
        assert await found(search, "capital of Peru") == [[LIMA_PASSAGE]]
    first, second = service.requests
    assert second.at_s - first.at_s >= 1.0


@pytest.mark.parametrize("wanted", ["Wed, 21 Oct 2026 07:28:00 GMT", "-5", "inf"])
async def test_a_wish_to_wait_that_is_no_number_is_passed_over(wanted):
    async with asking("serper", says("later", 503, Retry_After=wanted), finds(LIMA), attempts=2) as (_, search):
        assert await found(search, "capital of Peru") == [[LIMA_PASSAGE]]


def test_pauses_grow_with_jitter_up_to_half_a_minute():
    for failed, longest in [(1, 0.5), (2, 1.0), (3, 2.0), (7, 30.0), (1000, 30.0)]:
        pauses = [pause_s(failed, 0.0) for _ in range(500)]
        assert all(0 <= pause <= longest for pause in pauses)
        assert max(pauses) - min(pauses) > longest / 2
    assert pause_s(1, 12.5) == 12.5
    assert pause_s(1, 3600.0) == 30.0


@pytest.mark.parametrize("engine", ENGINES)
async def test_one_failure_fails_the_batch_by_the_name_of_its_query(engine):
    answer = unless_asked_for("Atlantis", says("no such place", 400))
    async with asking(engine, answer) as (_, search):
        with pytest.raises(SearchFailed, match=r"'capital of Atlantis'.*no such place"):
            await found(search, "Peru", "capital of Atlantis", "Lima")
        assert await found(search, "Peru") == [[LIMA_PASSAGE]]


# The key.


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "trouble",
    [
        repeats_the_request,
        repeats_the_key_late,
        hangs,
        hangs_up,
        closes_early,
        says_nothing_http,
        says("no", 401),
        says(f'"{KEY}"'),
    ],
)
async def test_no_error_or_log_line_or_figure_shows_the_key(engine, trouble, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    async with asking(engine, trouble, timeout_s=0.1, cache=tmp_path) as (_, search):
        error = await failure(search)
    logs = [record for record in caplog.records if record.name not in ("aiohttp.access", "aiohttp.server")]
    assert logs
    told = "".join(record.getMessage() for record in logs)
    assert SECRET not in everything_of(error) + told + str(search.figures()) + repr(search)


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_refused_connection_is_named_without_the_key(engine, caplog):
    port = free_port()
    async with search_of(engine, f"http://127.0.0.1:{port}", attempts=2) as search:
        error = await failure(search)
    assert error.status == 502
    assert f"Cannot connect to host 127.0.0.1:{port}" in str(error)
    assert SECRET not in everything_of(error) + caplog.text
    assert search.figures()["retries"] == 1


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/serpapi", "http://", "nonsense"])
def test_an_address_that_is_none_is_refused_by_the_config(url):
    with pytest.raises(ValueError, match="must look like https://"):
        WebConfig(url=url)


async def test_the_key_is_in_no_file_of_the_cache(tmp_path):
    async with asking("serpapi", finds(LIMA), cache=tmp_path) as (_, search):
        await found(search, "capital of Peru")
    (file,) = tmp_path.iterdir()
    assert SECRET not in file.name + file.read_text()


@pytest.mark.parametrize("engine", ENGINES)
async def test_the_key_comes_from_the_environment(engine, monkeypatch):
    monkeypatch.setenv(VARIABLE[engine], f" {KEY}\n")
    async with served(finds(LIMA)) as (service, address):
        search = web_search(engine, WebConfig(url=f"{address}/{engine}"))
        assert await found(search, "capital of Peru") == [[LIMA_PASSAGE]]
        await search.close()
    (seen,) = service.requests
    assert KEY in (seen.headers.get("X-API-KEY"), seen.fields.get("api_key"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("value", [None, "", " \n"])
def test_a_missing_key_is_named_by_its_variable(engine, value, monkeypatch):
    monkeypatch.delenv(VARIABLE[engine], raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE[engine], value)
    with pytest.raises(ConfigError, match=f"'{engine}' needs a key.*{VARIABLE[engine]}"):
        web_search(engine, WebConfig())


@pytest.mark.parametrize("value", ["two words", "two\nlines", "clé"])
def test_a_text_that_cannot_be_a_key_is_refused_unseen(value, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", value)
    with pytest.raises(ConfigError, match="SERPER_API_KEY must be one word") as caught:
        web_search("serper", WebConfig())
    assert value not in str(caught.value)


# Rate and budget.


@pytest.mark.parametrize("engine", ENGINES)
async def test_requests_of_all_searches_together_keep_the_rate(engine):
    async with asking(engine, says("busy", 503), finds(LIMA), per_second=25.0, attempts=2) as (service, search):
        began = time.monotonic()
        await asyncio.gather(found(search, "a", "b", "c"), found(search, "d"), found(search, "e"))
    assert len(service.requests) == 6
    for number, seen in enumerate(service.requests):
        assert seen.at_s - began >= number / 25.0


async def test_the_queries_of_one_request_do_not_wait_for_each_other_in_vain():
    """Each was refused for the others, and the first was paid for."""
    async with served(finds(LIMA)) as (service, address):
        settings = WebConfig(url=f"{address}/serper", per_second=100.0)
        search = WebSearch("serper", settings, KEY, longest_wait_s=0.05)
        assert len(await found(search, *(f"query {n}" for n in range(20)))) == len(service.requests) == 20
        await search.close()


async def test_a_request_that_is_cached_but_for_a_query_waits_behind_no_more_than_others(tmp_path):
    async with served(finds(LIMA)) as (_, address):
        settings = WebConfig(url=f"{address}/serper", per_second=10.0, cache=tmp_path)
        search = WebSearch("serper", settings, KEY, longest_wait_s=0.5)
        known = [f"query {n}" for n in range(5)]
        await found(search, *known)
        others = [asyncio.ensure_future(found(search, f"other {n}")) for n in range(200)]
        while search._waiting <= search._most_waiting:
            await asyncio.sleep(0)
        with pytest.raises(SearchFailed, match="searches wait") as caught:
            await found(search, *known, "new")
        assert caught.value.status == 429
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await search.close()


async def test_a_service_that_asks_to_wait_longer_than_a_worker_does_is_told_to_the_worker():
    """It hung up after its own time, and never heard of the rate that it had to keep."""
    async with served(says("slow down", 429, Retry_After="30")) as (service, address):
        search = WebSearch("serper", WebConfig(url=f"{address}/serper"), KEY, longest_wait_s=5.0)
        error = await asyncio.wait_for(failure(search), 5 * SLOW)
        await search.close()
    assert (error.status, len(service.requests)) == (429, 1)


async def test_the_pause_that_a_service_asks_for_is_the_workers(atlas_config, monkeypatch):
    """Who asked again ten times in the time in which it was to be left alone, and each was paid for."""
    monkeypatch.setenv(VARIABLE["serper"], KEY)
    times: list[float] = []

    def at(answer):
        async def one(service, request):
            times.append(time.monotonic())
            return await answer(service, request)

        return one

    async with served(at(says("slow down", 429, Retry_After="2")), at(finds(LIMA))) as (_, address):
        backend = WebSearch("serper", WebConfig(url=f"{address}/serper"), KEY, longest_wait_s=0.2)
        async with TestServer(Retriever(backend).application()) as server:
            config = load_config(atlas_config, ["--retriever.url", str(server.make_url("/")).rstrip("/")])
            async with SearchClient.session(config.retriever) as session:
                client = SearchClient(session, config.retriever, EpisodeConfig(), 4)
                assert await client.search("Peru", 0, QUESTION, 0) == [LIMA_PASSAGE["contents"]]
        await backend.close()
    first, second = times
    assert second - first >= 2


async def test_more_searches_than_the_rate_allows_wait_at_their_clients(atlas_config, monkeypatch):
    """In the retriever's queue they timed out, and asked again behind all others."""
    monkeypatch.setenv(VARIABLE["serper"], KEY)
    options = {"backend": "serper", "timeout_s": SLOW, "outage_s": 3 * SLOW}
    options |= {"web.per_second": 25 / SLOW, "web.attempts": 1, "web.timeout_s": 0.5 * SLOW}
    async with served(finds(LIMA)) as (service, address):
        words = [word for name, value in options.items() for word in (f"--retriever.{name}", str(value))]
        config = load_config(atlas_config, [*words, "--retriever.web.url", f"{address}/serper"])
        backend = make_backend(config)
        async with TestServer(Retriever(backend).application()) as server:
            settings = config.retriever.model_copy(update={"url": str(server.make_url("/")).rstrip("/")})
            async with SearchClient.session(settings) as session:
                client = SearchClient(session, settings, EpisodeConfig(), 4)
                asked = (client.search(f"query {n}", n, QUESTION, 0) for n in range(80))
                found_by_all = await asyncio.gather(*asked)
        await backend.close()
    assert len(found_by_all) == len(service.requests) == 80
    assert not client.failures["timeout"]


@pytest.mark.parametrize("engine", ENGINES)
async def test_the_budget_counts_every_request_and_names_its_setting(engine):
    async with asking(engine, says("busy", 503), finds(LIMA), attempts=2, max_requests=3) as (service, search):
        assert search.figures()["budget_left"] == 3
        await found(search, "a")
        assert search.figures()["budget_left"] == 1
        await found(search, "b")
        error = await failure(search)
        assert search.figures()["budget_left"] == 0
    assert error.status == 403
    assert "the 3 requests" in str(error)
    assert "raise retriever.web.max_requests" in str(error)
    assert len(service.requests) == 3


async def test_the_budget_holds_for_searches_at_the_same_time():
    async with asking("serper", finds(LIMA), max_requests=4) as (service, search):
        searches = [found(search, f"query {number}") for number in range(10)]
        outcomes = await asyncio.gather(*searches, return_exceptions=True)
    assert sum(isinstance(outcome, SearchFailed) for outcome in outcomes) == 6
    assert len(service.requests) == 4


@pytest.mark.parametrize("trouble", [hangs_up, says_nothing_http])
async def test_a_broken_connection_is_not_used_behind_the_budget(trouble):
    async with asking("serpapi", finds(LIMA), trouble) as (service, search):
        await found(search, "a")
        await failure(search)  # on the connection that is kept alive, which aiohttp would try again by itself
    assert len(service.requests) == search.figures()["requests"] == 2
