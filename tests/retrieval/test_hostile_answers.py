"""What a retriever may answer, and what the client says and leaves behind: real servers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import resource
import time
import zlib

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cusearch_async.config import EpisodeConfig, load_config
from cusearch_async.errors import RetrievalUnavailable, SearchRefused
from cusearch_async.retrieval import client as client_module
from cusearch_async.retrieval.client import SearchClient
from tests.conftest import SLOW, free_port
from tests.http_service import Service, says
from tests.retrieval.retrievers import QUESTION, client_of, finds
from tests.rollout.test_broken_retriever import roll_out

# What an answer may hold.


async def test_half_a_surrogate_pair_in_a_passage_or_a_query_becomes_a_question_mark():
    body = '{"result": [[{"document": {"contents": "\\"Peru\\"\\nLima \\ud83d \\ud83d\\ude00"}}]]}'
    service = Service(says(body))
    async with client_of(service) as client:
        assert await client.search("capital \ud83d", 0, QUESTION, 0) == ['"Peru"\nLima ? 😀']
        assert (await roll_out(client)).depth == 1
    assert service.bodies[0]["queries"] == ["capital ?"]


async def test_an_answer_that_is_nested_too_deeply_is_a_failure():
    async with client_of(Service(says("[" * 100_000))) as client:
        with pytest.raises(RetrievalUnavailable, match="RecursionError"):
            await client.search("capital of Peru", 0, QUESTION, 0)
        assert client.failures == {"garbage": 1}


async def test_a_redirect_is_named_and_not_followed():
    elsewhere = Service(finds("stolen"))
    async with client_of(elsewhere) as other:
        target = f"{other._settings.url}/retrieve"

        async def redirects(service: Service, request: web.Request) -> web.StreamResponse:
            raise web.HTTPTemporaryRedirect(target)

        async with client_of(Service(redirects)) as client:
            with pytest.raises(
                RetrievalUnavailable, match=f"it answers 307: it redirects to '{target}', and redirects"
            ):
                await client.search("capital of Peru", 0, QUESTION, 0)
    assert elsewhere.bodies == []


async def endless(service: Service, request: web.Request) -> web.StreamResponse:
    """An answer that goes on until nobody reads it any more."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"result": [[{"document": {"contents": "')
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b"x" * (1 << 16))
    return response


async def test_an_answer_beyond_the_limit_is_not_read_to_its_end_and_fails_its_search():
    async with client_of(Service(endless, finds("Lima")), max_answer_mib=2, outage_s=60) as client:
        with pytest.raises(SearchRefused, match=r"'capital of Peru' with more than retriever.max_answer_mib \(2\)"):
            await client.search("capital of Peru", 0, QUESTION, 0)
        assert await client.search("capital of Peru", 0, QUESTION, 0) == ["Lima"]


async def test_a_compressed_answer_is_not_unpacked():
    bomb = zlib.compress(b" " * (200 << 20), level=1, wbits=31)

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"})

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with client_of(Service(answer)) as client:
        with pytest.raises(RetrievalUnavailable, match=r"the answer is compressed \(gzip\), unasked"):
            await client.search("capital of Peru", 0, QUESTION, 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "KiB"


async def test_passages_of_ten_megabytes_cost_neither_the_loop_nor_memory():
    """A dozen at once: the loop must go on beating, and only what can be shown is kept."""
    huge = json.dumps({"result": [[{"document": {"contents": "t\n" + "many words " * 1_000_000}}]]})
    gaps = []

    async def beat() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with client_of(Service(says(huge)), timeout_s=60) as client:
        beating = asyncio.create_task(beat())
        played = await asyncio.gather(*(roll_out(client) for _ in range(12)))
        found = await client.search("capital of Peru", 0, QUESTION, 0)
        beating.cancel()
    assert [trajectory.depth for trajectory in played] == [1] * 12
    assert [len(text) for text in found] == [EpisodeConfig().max_observation_characters]
    assert max(gaps) < 5, "seconds without a beat: tokenised whole, each passage takes ten"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 800 << 10, "KiB, the server's share included"


# What is said while the retriever is down, and what is left at the end.


async def test_a_retriever_that_is_down_is_named_in_the_log_until_it_answers(atlas_config, monkeypatch, caplog):
    monkeypatch.setattr(client_module, "LOG_EVERY_S", 0.05)
    url = f"http://127.0.0.1:{free_port()}"
    config = load_config(atlas_config, ["--retriever.url", url])
    async with (
        SearchClient.open(config.retriever, config.episode, config.questions_per_step) as client,
        asyncio.timeout(20 * SLOW),
    ):
        waiting = asyncio.create_task(client.wait_until_answering(60))
        while len(caplog.messages) < 3:
            await asyncio.sleep(0.01)
        assert re.fullmatch(
            rf"retriever at {url} down for \d+ s: Connection refused; waiting up to 60 s", caplog.messages[-1]
        )
        app = web.Application()
        app.router.add_post("/retrieve", Service(finds("Lima")).handle)
        async with TestServer(app, port=int(url.rsplit(":", 1)[1])):
            await waiting
            assert client.status()["retriever_down_s"] == 0.0
            assert client._last_failure == ""


async def test_a_client_that_ends_while_its_retriever_is_down_leaves_nothing_behind(atlas_config, caplog):
    config = load_config(atlas_config, ["--retriever.url", f"http://127.0.0.1:{free_port()}"])
    unseen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    async with SearchClient.open(config.retriever, config.episode, config.questions_per_step) as client:
        episodes = [asyncio.create_task(client.search(f"q{i}", i, QUESTION, 0)) for i in range(20)]
        while client.failures.total() < 20:
            await asyncio.sleep(0.01)
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
    del episodes, client
    gc.collect()
    await asyncio.sleep(0)
    assert unseen == []
    assert asyncio.all_tasks() == {asyncio.current_task()}
