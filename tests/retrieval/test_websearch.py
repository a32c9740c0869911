"""Web search against a real server that speaks as serper.dev and as SerpApi do."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cusearch_async.config import WebConfig
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.ports import free_port
from cusearch_async.retrieval import websearch
from cusearch_async.retrieval.answers import MAX_ANSWER_BYTES
from cusearch_async.retrieval.backend import Query, SearchFailed
from cusearch_async.retrieval.websearch import MAX_QUERY_BYTES, WebSearch, parse_answer, pause_s, web_search
from tests.conftest import SLOW

ENGINES = ("serper", "serpapi")
RESULTS = {"serper": "organic", "serpapi": "organic_results"}
BOX = {"serper": "answerBox", "serpapi": "answer_box"}
VARIABLE = {"serper": "SERPER_API_KEY", "serpapi": "SERPAPI_API_KEY"}
KEY = "s3cret+key/of=mine"
"""Characters that a URL writes differently are in it."""
SECRET = "s3cret"
"""Of the key, what no text may show."""

LIMA = {"title": "Lima", "link": "https://example.org/lima", "snippet": "Lima is the capital of Peru."}
CUSCO = {"title": "Cusco", "link": "https://example.org/cusco", "snippet": "Cusco was the capital of the Incas."}
LIMA_PASSAGE = {"id": "https://example.org/lima", "contents": '"Lima"\nLima is the capital of Peru.'}
CUSCO_PASSAGE = {"id": "https://example.org/cusco", "contents": '"Cusco"\nCusco was the capital of the Incas.'}

Answer = Callable[["Service", web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """A request as the service got it."""

    at_s: float
    engine: str
    headers: dict[str, str]
    fields: dict[str, Any]


@dataclass
class Service:
    """Answers each request by the next of its answers, and by the last one for ever."""

    answers: tuple[Answer, ...]
    requests: list[Seen] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def queries(self) -> list[str]:
        return [seen.fields["q"] for seen in self.requests]

    async def serper(self, request: web.Request) -> web.StreamResponse:
        return await self._handle(request, "serper", await request.json())

    async def serpapi(self, request: web.Request) -> web.StreamResponse:
        return await self._handle(request, "serpapi", dict(request.query))

    async def _handle(self, request: web.Request, engine: str, fields: dict[str, Any]) -> web.StreamResponse:
        self.requests.append(Seen(time.monotonic(), engine, dict(request.headers), fields))
        return await self.answers[min(len(self.requests), len(self.answers)) - 1](self, request)


def says(body: Any, status: int = 200, **headers: str) -> Answer:
    """A JSON answer, or text as it is."""
    text = body if isinstance(body, str) else json.dumps(body)
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, status=status, headers=named, content_type="application/json")

    return answer


def finds(*rows: dict[str, Any]) -> Answer:
    """Results under the names of both services."""
    return says({"organic": list(rows), "organic_results": list(rows)})


def unless_asked_for(word: str, otherwise: Answer) -> Answer:
    """Finds Lima, but not for queries with `word`."""

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        is_it = any(word in query for query in service.queries[-1:])
        return await (otherwise if is_it else finds(LIMA))(service, request)

    return answer


async def hangs(service: Service, request: web.Request) -> web.StreamResponse:
    await service.over.wait()
    return web.Response()


async def hangs_up(service: Service, request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def closes_early(service: Service, request: web.Request) -> web.StreamResponse:
    """Half of an answer, then nothing."""
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"organic": [], "organic_results": []}')
    assert request.transport is not None
    request.transport.close()
    return response


async def repeats_the_request(service: Service, request: web.Request) -> web.StreamResponse:
    """A careless service: what it was sent is in its complaint."""
    return web.Response(text=f"{KEY} {request.rel_url} {dict(request.headers)}", status=400)


async def repeats_the_key_late(service: Service, request: web.Request) -> web.StreamResponse:
    """So that a message which is cut has half of it."""
    return web.Response(text="x" * 190 + KEY, status=400)


async def says_nothing_http(service: Service, request: web.Request) -> web.StreamResponse:
    """Bytes that are no HTTP."""
    assert request.transport is not None
    request.transport.write(b"GARBAGE nothing\r\n\r\n")
    request.transport.close()
    return web.Response()


@asynccontextmanager
async def served(*answers: Answer) -> AsyncIterator[tuple[Service, str]]:
    """A service and its address, without the path."""
    service = Service(answers)
    app = web.Application()
    app.router.add_post("/serper", service.serper)
    app.router.add_get("/serpapi", service.serpapi)
    async with TestServer(app) as server:
        try:
            yield service, f"http://127.0.0.1:{server.port}"
        finally:
            service.over.set()


@asynccontextmanager
async def search_of(engine: str, address: str, **settings: Any) -> AsyncIterator[WebSearch]:
    values = {"per_second": 1000.0, "attempts": 1, "timeout_s": 5.0} | settings
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


def everything_of(error: BaseException | None) -> str:
    """All that a traceback or a debugger could show of an error and of those behind it."""
    if error is None:
        return ""
    return f"{error!s} {error!r} {error.args}" + everything_of(error.__cause__) + everything_of(error.__context__)


# The request.


async def test_serper_gets_a_post_with_the_key_in_a_header():
    async with asking("serper", finds(LIMA)) as (service, search):
        await found(search, "capital of Peru", topk=4)
    (seen,) = service.requests
    assert seen.fields == {"q": "capital of Peru", "num": 4}
    assert seen.headers["X-API-KEY"] == KEY
    assert seen.headers["Content-Type"] == "application/json"


async def test_serpapi_gets_its_parameters_in_the_url():
    async with asking("serpapi", finds(LIMA)) as (service, search):
        await found(search, "capital of Peru", topk=4)
    (seen,) = service.requests
    assert seen.fields == {"engine": "google", "q": "capital of Peru", "num": "4", "api_key": KEY}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("query", ["Łódź 京都 🙂", 'a&b=c#d "e" +f%20g\\', "two\nlines\x00", "?"])
async def test_any_character_arrives_whole(engine, query):
    async with asking(engine, finds(LIMA)) as (service, search):
        assert await found(search, query) == [[LIMA_PASSAGE]]
    assert service.queries == [query]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("letter", ["a", "ł", "京", "🙂"])
async def test_a_long_query_is_cut_between_characters(engine, letter):
    async with asking(engine, finds(LIMA)) as (service, search):
        assert await found(search, letter * 10_000) == [[LIMA_PASSAGE]]
    (query,) = service.queries
    assert set(query) == {letter}
    assert MAX_QUERY_BYTES - 3 <= len(query.encode()) <= MAX_QUERY_BYTES


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("query", ["", " \t\n", "\ud800", "\u3000"])
async def test_a_blank_query_asks_nobody_and_finds_nothing(engine, query):
    async with asking(engine, finds(LIMA)) as (service, search):
        assert await found(search, query) == [[]]
    assert service.requests == []


@pytest.mark.parametrize("engine", ENGINES)
async def test_no_queries_have_no_results(engine):
    async with asking(engine, finds(LIMA)) as (service, search):
        assert await found(search) == []
    assert service.requests == []


async def test_a_redirection_is_not_followed_with_the_key():
    async with asking("serper", says("", 302, Location="/serpapi")) as (service, search):
        assert "302" in str(await failure(search))
    assert len(service.requests) == 1


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_answer_that_never_ends_is_read_no_further_than_its_bound(engine):
    async with asking(engine, says(" " * (MAX_ANSWER_BYTES + 1))) as (_, search):
        assert f"the answer is longer than {MAX_ANSWER_BYTES} bytes" in str(await failure(search))


# The answer.


@pytest.mark.parametrize("engine", ENGINES)
async def test_results_are_documents_with_falling_scores(engine):
    async with asking(engine, finds(LIMA, CUSCO)) as (_, search):
        (answer,) = await search.search([Query("capital of Peru", 0)], 3)
    assert answer == [(LIMA_PASSAGE, 1.0), (CUSCO_PASSAGE, 0.5)]
    assert search.facts() == {"requests": 1, "cache_hits": 0, "failures": 0, "retries": 0}


@pytest.mark.parametrize("engine", ENGINES)
async def test_each_query_has_its_result_in_order(engine):
    answer = unless_asked_for("Atlantis", finds())
    async with asking(engine, answer) as (_, search):
        assert await found(search, "Peru", "Atlantis", " ", "Lima") == [[LIMA_PASSAGE], [], [], [LIMA_PASSAGE]]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_answer_box_comes_first_and_counts(engine):
    box = {"title": "Peru / Capital", "answer": "Lima", "snippet": "since 1535"}
    answer = {BOX[engine]: box, RESULTS[engine]: [LIMA, CUSCO]}
    first = {"id": "", "contents": '"Peru / Capital"\nLima'}
    assert parse_answer(engine, answer, 2) == [first, LIMA_PASSAGE]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("box", "contents"),
    [
        ({"title": "Lima", "snippet": "The capital."}, ['"Lima"\nThe capital.']),
        ({"type": "calculator_result", "result": "3.14"}, ["3.14"]),
        ({"title": "Lima", "answer": " ", "snippet": "The capital."}, ['"Lima"\nThe capital.']),
        ({"title": "Weather in Lima", "answer": None}, []),
        ({}, []),
        (None, []),
        ("Lima", []),
    ],
)
def test_an_answer_box_counts_only_when_it_says_something(engine, box, contents):
    passages = parse_answer(engine, {BOX[engine]: box, RESULTS[engine]: []}, 3)
    assert [passage["contents"] for passage in passages] == contents


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("row", "contents"),
    [
        ({"title": "A  title\nof two lines", "snippet": "a\n\ttext"}, ['"A title of two lines"\na text']),
        ({"title": 'The "Old" Town', "snippet": "text"}, ['"The "Old" Town"\ntext']),
        ({"title": "Lima"}, ['"Lima"']),
        ({"snippet": "text"}, ["text"]),
        ({"title": "Half \ud83d", "snippet": "a character \ude00"}, ['"Half "\na character ']),
        ({"title": " ", "snippet": ""}, []),
        ({"title": 7, "snippet": None}, []),
        ({"position": 1}, []),
    ],
)
def test_a_result_is_a_quoted_title_over_a_line_of_text(engine, row, contents):
    passages = parse_answer(engine, {RESULTS[engine]: [row]}, 3)
    assert [passage["contents"] for passage in passages] == contents


@pytest.mark.parametrize("engine", ENGINES)
def test_results_that_say_nothing_take_no_place(engine):
    assert parse_answer(engine, {RESULTS[engine]: [{}, {"title": ""}, LIMA, CUSCO]}, 1) == [LIMA_PASSAGE]


@pytest.mark.parametrize("engine", ENGINES)
async def test_finding_nothing_is_an_answer(engine):
    async with asking(engine, finds()) as (_, search):
        assert await found(search, "capital of Atlantis") == [[]]
    assert search.facts()["failures"] == 0


@pytest.mark.parametrize(
    "answer",
    [
        {"error": "Google hasn't returned any results for this query."},
        {"error": "Google hasn't returned any results for this query.", "organic_results": []},
        {"search_metadata": {"status": "Success"}, "knowledge_graph": {"title": "Lima"}},
    ],
)
async def test_serpapi_has_its_own_ways_to_find_nothing(answer):
    async with asking("serpapi", says(answer)) as (_, search):
        assert await found(search, "capital of Atlantis") == [[]]


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
    assert search.facts()["failures"] == 1


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
    assert search.facts() == {"requests": 2, "cache_hits": 0, "failures": 0, "retries": 1}


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
    assert search.facts() == {"requests": 2, "cache_hits": 0, "failures": 1, "retries": 1}


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
    assert f"set {VARIABLE[engine]} to one that it takes" in str(error)
    assert "Unauthorized." in str(error)
    assert len(service.requests) == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("status", [400, 402, 404, 414])
async def test_a_wrong_request_is_not_repeated(engine, status):
    async with asking(engine, says({"message": "Not enough credits"}, status), attempts=3) as (service, search):
        error = await failure(search)
    assert error.status == 502
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
    assert SECRET not in everything_of(error) + told + str(search.facts()) + repr(search)


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_refused_connection_is_named_without_the_key(engine, caplog):
    port = free_port()
    async with search_of(engine, f"http://127.0.0.1:{port}", attempts=2) as search:
        error = await failure(search)
    assert error.status == 502
    assert f"Cannot connect to host 127.0.0.1:{port}" in str(error)
    assert SECRET not in everything_of(error) + caplog.text
    assert search.facts()["retries"] == 1


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


@pytest.mark.parametrize("engine", ENGINES)
async def test_the_budget_counts_every_request_and_names_its_setting(engine):
    async with asking(engine, says("busy", 503), finds(LIMA), attempts=2, max_requests=3) as (service, search):
        assert search.facts()["budget_left"] == 3
        await found(search, "a")
        assert search.facts()["budget_left"] == 1
        await found(search, "b")
        error = await failure(search)
        assert search.facts()["budget_left"] == 0
    assert error.status == 429
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
    assert len(service.requests) == search.facts()["requests"] == 2


# The cache.


async def cached(folder: Path, engine: str, address: str, *texts: str, **settings: Any) -> tuple[Any, Any]:
    """Documents and facts of a new retriever that uses the folder."""
    async with search_of(engine, address, cache=folder, **settings) as search:
        return await found(search, *texts), search.facts()


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_cached_answer_costs_no_request_in_any_process(engine, tmp_path):
    folder = tmp_path / "to be" / "made"
    async with served(finds(LIMA), finds(CUSCO)) as (service, address):
        first, _ = await cached(folder, engine, address, "capital of Peru")
        second, facts = await cached(folder, engine, address, " capital of Peru\n", max_requests=1)
    assert first == second == [[LIMA_PASSAGE]]
    assert facts == {"requests": 0, "cache_hits": 1, "failures": 0, "retries": 0, "budget_left": 1}
    assert len(service.requests) == 1


async def test_finding_nothing_is_cached_too(tmp_path):
    async with served(finds(), finds(LIMA)) as (_, address):
        await cached(tmp_path, "serper", address, "capital of Atlantis")
        assert (await cached(tmp_path, "serper", address, "capital of Atlantis"))[0] == [[]]


async def test_without_a_cache_equal_queries_are_asked_each_time():
    async with asking("serper", finds(LIMA)) as (service, search):
        await found(search, "Peru", "Peru")
        await found(search, "Peru")
    assert service.queries == ["Peru"] * 3


async def test_another_engine_query_or_topk_is_another_answer(tmp_path):
    async with served(finds(LIMA, CUSCO)) as (service, address):
        for engine in ENGINES:
            await cached(tmp_path, engine, address, "Peru", "peru")
        async with search_of("serper", address, cache=tmp_path) as search:
            assert await found(search, "Peru", topk=1) == [[LIMA_PASSAGE]]
    assert len(service.requests) == 5


async def test_a_file_says_what_was_asked_and_when(tmp_path):
    async with served(finds(LIMA)) as (_, address):
        began = time.time()
        await cached(tmp_path, "serper", address, "capital of Łódź 🙂")
    (file,) = tmp_path.iterdir()
    entry = json.loads(file.read_text(encoding="utf-8"))
    assert began <= entry.pop("written") <= time.time()
    assert entry == {"engine": "serper", "query": "capital of Łódź 🙂", "topk": 3, "documents": [LIMA_PASSAGE]}


@pytest.mark.parametrize(("age_s", "expected"), [(0, LIMA_PASSAGE), (61, CUSCO_PASSAGE), (-3600, CUSCO_PASSAGE)])
async def test_an_old_answer_is_asked_for_again(tmp_path, age_s, expected):
    async with served(finds(LIMA), finds(CUSCO)) as (_, address):
        await cached(tmp_path, "serper", address, "Peru")
        (file,) = tmp_path.iterdir()
        entry = json.loads(file.read_text())
        file.write_text(json.dumps(entry | {"written": time.time() - age_s}))
        for _ in range(2):
            assert (await cached(tmp_path, "serper", address, "Peru", cache_ttl_s=60.0))[0] == [[expected]]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"\x00\xff\xfe",
        b'{"engine": "serper", "que',
        b'{"engine":"serper","query":"Peru","topk":3,"written":"today","documents":[]}',
        b'{"engine":"serper","query":"\xff","topk":3,"written":1e12,"documents":[]}',
        b'{"engine":"serper","query":"Peru","topk":3,"written":1e12,"documents":[{"id":"a"}]}',
    ],
)
async def test_a_damaged_file_is_told_of_and_replaced(tmp_path, caplog, content):
    async with served(finds(LIMA), finds(CUSCO)) as (_, address):
        await cached(tmp_path, "serper", address, "Peru")
        (file,) = tmp_path.iterdir()
        file.write_bytes(content)
        assert (await cached(tmp_path, "serper", address, "Peru"))[0] == [[CUSCO_PASSAGE]]
        assert f"{file} cannot be read" in caplog.text
        assert (await cached(tmp_path, "serper", address, "Peru"))[1]["cache_hits"] == 1


async def test_a_cache_that_cannot_be_written_costs_a_warning_only(tmp_path, caplog):
    async with asking("serper", finds(LIMA), cache=tmp_path / "gone") as (_, search):
        (tmp_path / "gone").rmdir()
        assert await found(search, "Peru") == [[LIMA_PASSAGE]]
    assert "the answer for 'Peru' is not cached" in caplog.text


def test_a_cache_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"retriever.web.cache {tmp_path / 'file'} cannot be made"):
        web_search("serper", WebConfig(cache=tmp_path / "file"))


async def test_a_failure_is_not_cached(tmp_path):
    async with asking("serper", says("busy", 503), finds(LIMA), cache=tmp_path) as (_, search):
        await failure(search)
        assert list(tmp_path.iterdir()) == []
        assert await found(search, "capital of Peru") == [[LIMA_PASSAGE]]


async def test_with_a_cache_equal_searches_at_the_same_time_ask_once(tmp_path):
    async with asking("serper", finds(LIMA), cache=tmp_path) as (service, search):
        answers = await asyncio.gather(found(search, "Peru", "Peru", "Lima"), found(search, "Peru"))
    assert answers == [[[LIMA_PASSAGE]] * 3, [[LIMA_PASSAGE]]]
    assert sorted(service.queries) == ["Lima", "Peru"]


async def test_searches_that_share_a_failure_all_hear_of_it(tmp_path):
    async with asking("serper", says("busy", 503), cache=tmp_path) as (service, search):
        outcomes = await asyncio.gather(*(found(search, "Peru") for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [SearchFailed] * 3
    assert len(service.requests) == 1
    assert search.facts()["failures"] == 1


async def test_a_search_that_is_cancelled_takes_no_other_with_it(tmp_path):
    async def finds_when_told(service: Service, request: web.Request) -> web.StreamResponse:
        await service.over.wait()
        return await finds(LIMA)(service, request)

    async with asking("serper", finds_when_told, cache=tmp_path) as (service, search):
        impatient, patient = (asyncio.create_task(found(search, "Peru")) for _ in range(2))
        async with asyncio.timeout(5 * SLOW):
            while not service.requests:
                await asyncio.sleep(0.01)
        impatient.cancel()
        await asyncio.wait([impatient])
        service.over.set()
        assert await patient == [[LIMA_PASSAGE]]
    assert impatient.cancelled()
    assert len(service.requests) == 1


async def test_closing_ends_what_is_under_way(tmp_path):
    async with asking("serper", hangs, cache=tmp_path) as (service, search):
        waiting = asyncio.create_task(found(search, "Peru"))
        async with asyncio.timeout(5 * SLOW):
            while not service.requests:
                await asyncio.sleep(0.01)
            await search.close()
            await asyncio.wait([waiting])
    assert waiting.cancelled()
