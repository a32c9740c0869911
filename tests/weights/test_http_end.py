"""The end of a learner that serves weights: who needs the last version gets it, and who has gone is not waited for."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import aiohttp
import pytest
from aiohttp import web

from cusearch_async.errors import WeightsUnavailable, WriteFailed
from cusearch_async.weights import copies, http
from cusearch_async.weights import downloads as client
from cusearch_async.weights.downloads import Downloads
from tests.conftest import SLOW
from tests.weights.test_http import same, site, tensors, until

__all__ = ["site"]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[http.Server]:
    """Those that have been made."""
    made: list[http.Server] = []
    init = http.Server.__init__
    monkeypatch.setattr(http.Server, "__init__", lambda own, *args: made.append(own) or init(own, *args))
    return made


async def test_a_learner_at_its_end_waits_for_who_needs_the_last_version(site, servers, monkeypatch):
    """It can then be opened without the learner."""
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    async with site.host(needs_last=True) as downloads:
        async with site.learner.serving():
            first = site.publish(1)
            await until(lambda: servers[0].asking == 1)
            last = site.publish(2)
        assert site.downloaded() == {last}
        assert same(await downloads.open(last), tensors(2))
        with pytest.raises(WeightsUnavailable):
            await downloads.open(first)


async def test_the_last_version_is_opened_though_another_run_has_the_address(site, servers, monkeypatch):
    """Its learner refuses the token; the evaluator ended, and the run had no last score."""
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    async with site.host(needs_last=True) as downloads:
        async with site.learner.serving():
            await until(lambda: servers[0].asking == 1)
            last = site.publish(1)
        assert site.downloaded() == {last}
        token = os.environ["CUSEARCH_WEIGHTS_TOKEN"]
        monkeypatch.setenv("CUSEARCH_WEIGHTS_TOKEN", "another")
        async with site.learner.serving():
            monkeypatch.setenv("CUSEARCH_WEIGHTS_TOKEN", token)
            assert same(await downloads.open(last), tensors(1))


async def test_a_connection_that_is_lost_at_the_learners_end_is_taken_up_again(site, servers, monkeypatch):
    """Longer after the client was told than it may be silent: the learner ended while it waited to ask again."""
    monkeypatch.setattr(http, "SILENCE_S", 2)  # client.RETRY_S is 1.0
    prepare, lost = web.FileResponse.prepare, []

    async def lose_the_first(own, request):
        if not lost and request.path.endswith(".safetensors"):
            await asyncio.sleep(2.5)
            lost.append(request.path)
            request.transport.abort()
            raise ConnectionResetError("lost")
        return await prepare(own, request)

    monkeypatch.setattr(web.FileResponse, "prepare", lose_the_first)
    async with site.host(needs_last=True):
        async with site.learner.serving():
            await until(lambda: servers[0].asking == 1)
            last = site.publish(2)
        assert lost
        assert site.downloaded() == {last}


async def test_a_difference_that_is_refused_at_the_learners_end_gives_way_to_the_whole_file(site, servers, monkeypatch):
    monkeypatch.setattr(http, "SILENCE_S", 2)
    fetch, made = Downloads.fetch_difference, []

    def differs_too_much(*_, **__):
        time.sleep(2.5)
        made.append(1)
        raise ValueError("differs too much")

    async def slowly(own, *given):
        try:
            return await fetch(own, *given)
        finally:
            if made:
                await asyncio.sleep(0.5)

    monkeypatch.setattr(http, "write_difference", differs_too_much)
    monkeypatch.setattr(Downloads, "fetch_difference", slowly)
    async with site.host(needs_last=True) as downloads:
        async with site.learner.serving():
            first = site.publish(1)
            await downloads.open(first)
            await until(lambda: servers[0].asking == 1)
            last = site.publish(2)
        assert made
        assert last in site.downloaded()


async def test_an_evaluator_that_loads_its_engine_at_the_learners_end_gets_the_last_version(site, servers, monkeypatch):
    """It began when no learner answered; and then its event loop stands still, here for ever."""
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    loaded, holds = threading.Event(), threading.Event()

    async def evaluate() -> None:
        async with site.host(needs_last=True):
            holds.set()
            loaded.wait(60 * SLOW)

    evaluator = asyncio.create_task(asyncio.to_thread(asyncio.run, evaluate()))
    try:
        await asyncio.to_thread(holds.wait)
        async with site.learner.serving():
            await until(lambda: servers[0].asking == 1)
            last = site.publish(2)
        assert site.downloaded() == {last}
    finally:
        loaded.set()
        await evaluator


async def test_a_moment_without_room_does_not_lose_the_last_version(site, servers, monkeypatch):
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    opened, refused = Downloads.open, []

    async def without_room(own, name):
        if len(refused) < 3:
            refused.append(name)
            raise WriteFailed("no space left on device")
        return await opened(own, name)

    monkeypatch.setattr(Downloads, "open", without_room)
    async with site.host(needs_last=True), site.learner.serving():
        last = site.publish(1)
        await until(lambda: servers[0].asking == 1)
    assert refused == [last] * 3
    assert site.downloaded() == {last}


async def test_an_answer_that_a_proxy_ended_is_asked_for_again(site, servers, monkeypatch):
    """Blanks alone, of a learner that died: the evaluator stopped asking, without a word, and had no last version."""
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    answer, cut = http.Server._last, []

    async def cut_the_first(own, request):
        if not cut:
            cut.append(request)
            return web.Response(text="  ", content_type="application/json")
        return await answer(own, request)

    monkeypatch.setattr(http.Server, "_last", cut_the_first)
    async with site.host(needs_last=True):
        async with site.learner.serving():
            await until(lambda: servers[0].asking == 1)
            last = site.publish(1)
        assert site.downloaded() == {last}


async def test_a_learner_at_its_end_does_not_wait_for_who_has_gone(site, servers, monkeypatch):
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    async with site.learner.serving():
        site.publish(1)
        async with site.host(needs_last=True):
            await until(lambda: servers[0].asking == 1)
        await until(lambda: servers[0].asking == 0)


async def test_a_client_that_lost_its_first_connection_is_waited_for(site, servers, monkeypatch):
    """The learner hears of the loss after the client has come back."""
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    async with site.host() as lost, site.host() as downloads, site.learner.serving():
        first = asyncio.ensure_future(lost.last("c", ""))
        await until(lambda: servers[0].asking == 1)
        second = asyncio.ensure_future(downloads.last("c", ""))
        await until(lambda: servers[0].asking == 2)
        first.cancel()
        await until(lambda: servers[0].asking == 1)
        last = site.publish(1)
        ending = asyncio.ensure_future(servers[0].end())
        assert await second == [last]
        assert not ending.done(), "the client has not fetched it"
        await downloads.last("c", last)
        await ending


async def test_a_learner_at_its_end_gives_up_who_does_not_come_back(site, servers, monkeypatch):
    monkeypatch.setattr(http, "SILENCE_S", 1)
    site.publish(1)
    headers = {"Authorization": "Bearer of this test"}
    async with asyncio.timeout(10 * SLOW), aiohttp.ClientSession() as session:
        async with site.learner.serving():
            asking = asyncio.ensure_future(session.get(f"{site.url}/weights/last?client=c", headers=headers))
            await until(lambda: servers[0].asking == 1)
        assert await (await asking).json() == site.store.names()


async def test_a_learner_at_its_end_waits_for_downloads_that_are_under_way(site, servers, monkeypatch):
    name, keep = site.publish(1), client.keep
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def noting(piece, file, tensors):
        if tensors is not None:
            loop.call_soon_threadsafe(begun.set)
        keep(piece, file, tensors)

    monkeypatch.setattr(client, "keep", noting)
    async with site.host() as downloads:
        async with site.learner.serving():
            opening = asyncio.ensure_future(downloads.open(name))
            await begun.wait()
        assert same(await opening, tensors(1))


async def test_a_learner_at_its_end_gives_up_a_client_that_cannot_get_the_last_version(site, servers, monkeypatch):
    """It is damaged on the learner's disk, or the client's disk is full."""
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    monkeypatch.setattr(http, "MOST_ASKED", 3)
    name = site.publish(1)
    file = site.learner.store().directory(name) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    async with site.host(needs_last=True), asyncio.timeout(20 * SLOW), site.learner.serving():
        await until(lambda: servers[0].asking == 1)
    assert site.downloaded() == set()


async def test_the_last_version_is_asked_for_again_after_a_wrong_token(site, servers, monkeypatch, caplog):
    """One that was made elsewhere, until somebody copies that of the run."""
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    token = os.environ["CUSEARCH_WEIGHTS_TOKEN"]
    async with site.learner.serving():
        monkeypatch.setenv("CUSEARCH_WEIGHTS_TOKEN", "another")
        async with site.host(needs_last=True):
            await until(lambda: "the last version: " in caplog.text)
            monkeypatch.setenv("CUSEARCH_WEIGHTS_TOKEN", token)
            await until(lambda: servers[0].asking == 1)
            last = site.publish(1)
            await servers[0].end()
    assert site.downloaded() == {last}


@pytest.mark.parametrize("answer", [(500, b"\xa2 gone"), (200, b"\xa2"), (200, b"[7]"), (200, b"{")])
async def test_an_answer_that_came_damaged_is_an_error_of_the_connection(site, answer):
    """A worker ended with a traceback, UnicodeDecodeError."""
    status, body = answer

    async def answers(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, content_type="application/json")

    application = web.Application()
    application.router.add_get("/{path:.*}", answers)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", int(site.url.rpartition(":")[2])).start()
        async with site.host() as downloads:
            with pytest.raises(WeightsUnavailable, match="the learner at http"):
                await downloads.newest_of(1)
    finally:
        await runner.cleanup()


async def test_old_versions_are_removed_beside_the_event_loop(site, monkeypatch):
    """Of a model of 65 GB that takes seconds, in which no token was read and no lease renewed."""
    removed, remove_sealed = [], copies.remove_sealed
    monkeypatch.setattr(
        copies, "remove_sealed", lambda *path: removed.append(threading.current_thread()) or remove_sealed(*path)
    )
    async with site.learner.serving(), site.host() as downloads:
        for version in range(5):
            await downloads.open(site.publish(version))
    assert removed
    assert threading.main_thread() not in removed
