"""What a web search keeps of its answers, and equal searches at the same time."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from cusearch_async.config import WebConfig
from cusearch_async.errors import ConfigError
from cusearch_async.retrieval.websearch import web_search
from tests.conftest import SLOW
from tests.http_service import hangs, says
from tests.retrieval.web_services import (
    CUSCO,
    CUSCO_PASSAGE,
    ENGINES,
    KEY,
    LIMA,
    LIMA_PASSAGE,
    asking,
    failure,
    finds,
    found,
    queries,
    search_of,
    served,
)


async def cached(folder: Path, engine: str, address: str, *texts: str, **settings: Any) -> tuple[Any, Any]:
    """Documents and figures of a new retriever that uses the folder."""
    async with search_of(engine, address, cache=folder, **settings) as search:
        return await found(search, *texts), search.figures()


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_cached_answer_costs_no_request_in_any_process(engine, tmp_path):
    folder = tmp_path / "to be" / "made"
    async with served(finds(LIMA), finds(CUSCO)) as (service, address):
        first, _ = await cached(folder, engine, address, "capital of Peru")
        second, figures = await cached(folder, engine, address, " capital of Peru\n", max_requests=1)
    assert first == second == [[LIMA_PASSAGE]]
    assert figures == {"requests": 0, "cache_hits": 1, "failures": 0, "retries": 0, "budget_left": 1}
    assert len(service.requests) == 1


async def test_finding_nothing_is_cached_too(tmp_path):
    async with served(finds(), finds(LIMA)) as (_, address):
        await cached(tmp_path, "serper", address, "capital of Atlantis")
        assert (await cached(tmp_path, "serper", address, "capital of Atlantis"))[0] == [[]]


async def test_without_a_cache_equal_queries_are_asked_each_time():
    async with asking("serper", finds(LIMA)) as (service, search):
        await found(search, "Peru", "Peru")
        await found(search, "Peru")
    assert queries(service) == ["Peru"] * 3


async def test_another_engine_query_or_topk_is_another_answer(tmp_path):
    async with served(finds(LIMA, CUSCO)) as (service, address):
        for engine in ENGINES:
            await cached(tmp_path, engine, address, "Peru", "peru")
        async with search_of("serper", address, cache=tmp_path) as search:
            assert await found(search, "Peru", topk=1) == [[LIMA_PASSAGE]]
    assert len(service.requests) == 5


async def test_another_address_is_another_answer(tmp_path):
    """Before, a new proxy's searches were answered from the old one's for a day."""
    async with served(finds(LIMA)) as (_, one), served(finds(CUSCO)) as (service, other):
        assert (await cached(tmp_path, "serper", one, "Peru"))[0] == [[LIMA_PASSAGE]]
        assert (await cached(tmp_path, "serper", other, "Peru"))[0] == [[CUSCO_PASSAGE]]
    assert len(service.requests) == 1


async def test_a_file_says_what_was_asked_and_when(tmp_path):
    async with served(finds(LIMA)) as (_, address):
        began = time.time()
        await cached(tmp_path, "serper", address, "capital of Łódź 🙂")
    (file,) = tmp_path.iterdir()
    entry = json.loads(file.read_text(encoding="utf-8"))
    assert began <= entry.pop("written") <= time.time()
    assert entry.pop("place").startswith(f"serper at {address}")
    assert entry == {"query": "capital of Łódź 🙂", "topk": 3, "documents": [LIMA_PASSAGE]}


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


async def test_old_answers_are_removed_and_nothing_else(tmp_path):
    """A policy rarely asks the same again, so that all of weeks stayed: millions of files."""
    foreign, unfinished = tmp_path / "notes.json", tmp_path / f".unfinished-{'a' * 64}.json.{'0' * 16}"
    async with served(finds(LIMA), finds(CUSCO), finds(LIMA)) as (_, address):
        await cached(tmp_path, "serper", address, "Peru")
        for file in (*tmp_path.iterdir(), foreign, unfinished):
            file.touch()
            os.utime(file, (time.time() - 61,) * 2)
        await cached(tmp_path, "serper", address, "Cusco", cache_ttl_s=60.0)
        assert foreign.exists()
        (left,) = set(tmp_path.iterdir()) - {foreign}
    assert json.loads(left.read_text())["query"] == "Cusco"


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
    with pytest.raises(ConfigError, match=f"retriever.web.cache {tmp_path / 'file'} cannot be created"):
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
    assert sorted(queries(service)) == ["Lima", "Peru"]


async def test_closing_ends_what_is_under_way(tmp_path):
    async with asking("serper", hangs, cache=tmp_path) as (service, search):
        waiting = asyncio.create_task(found(search, "Peru"))
        async with asyncio.timeout(5 * SLOW):
            while not service.requests:
                await asyncio.sleep(0.01)
            await search.close()
            await asyncio.wait([waiting])
    assert waiting.cancelled()
