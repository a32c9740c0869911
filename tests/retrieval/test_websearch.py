"""Web search against real servers that speak as serper.dev and as SerpApi do: requests and answers."""

from __future__ import annotations

import pytest

from cusearch_async.retrieval.backend import Query
from cusearch_async.retrieval.protocol import MAX_ANSWER_BYTES
from cusearch_async.retrieval.websearch import MAX_QUERY_BYTES, parse_answer
from tests.http_service import says
from tests.retrieval.web_services import (
    BOX,
    CUSCO,
    CUSCO_PASSAGE,
    ENGINES,
    KEY,
    LIMA,
    LIMA_PASSAGE,
    RESULTS,
    asking,
    failure,
    finds,
    found,
    queries,
    search_of,
    served,
    unless_asked_for,
)

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


async def test_a_proxy_of_the_machine_is_asked(monkeypatch):
    """Where the Internet is behind a proxy, no setting helped."""
    async with served(finds(LIMA)) as (service, proxy):
        monkeypatch.setenv("http_proxy", proxy)
        async with search_of("serper", "http://search.example") as search:
            assert await found(search, "capital of Peru") == [[LIMA_PASSAGE]]
    assert service.requests[0].headers["Host"] == "search.example"


async def test_no_proxy_is_asked_for_a_service_on_this_machine(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with asking("serper", finds(LIMA)) as (_, search):
        assert await found(search, "capital of Peru") == [[LIMA_PASSAGE]]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("query", ["Łódź 京都 🙂", 'a&b=c#d "e" +f%20g\\', "two\nlines\x00", "?"])
async def test_any_character_arrives_whole(engine, query):
    async with asking(engine, finds(LIMA)) as (service, search):
        assert await found(search, query) == [[LIMA_PASSAGE]]
    assert queries(service) == [query]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("letter", ["a", "ł", "京", "🙂"])
async def test_a_long_query_is_cut_between_characters(engine, letter):
    async with asking(engine, finds(LIMA)) as (service, search):
        assert await found(search, letter * 10_000) == [[LIMA_PASSAGE]]
    (query,) = queries(service)
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
    assert search.figures() == {"requests": 1, "cache_hits": 0, "failures": 0, "retries": 0}


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
    assert search.figures()["failures"] == 0


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
