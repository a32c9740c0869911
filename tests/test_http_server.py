"""A server of ours answers programs, and nothing that a web page makes a browser send."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from cusearch_async.http_server import serve
from cusearch_async.transport.server import is_listening
from tests.conftest import free_port, wait_until_async


@pytest.fixture
async def served() -> AsyncIterator[str]:
    """The address of a server that answers every POST /x with what it was sent, and GET /x."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(await request.json() if request.method == "POST" else "here")

    application = web.Application()
    application.router.add_post("/x", answer)
    application.router.add_get("/x", answer)
    url = f"http://retriever.test:{free_port()}"
    address = url.replace("retriever.test", "127.0.0.1")
    serving = asyncio.create_task(serve(application, url, "retriever.url"))
    await wait_until_async(lambda: asyncio.to_thread(is_listening, address), 20)
    yield address
    os.kill(os.getpid(), signal.SIGTERM)
    await serving


async def test_a_server_whose_address_is_ipv6s_loopback_listens_there():
    """It listened at 127.0.0.1, so that nobody found it."""
    url = f"http://[::1]:{free_port()}"
    serving = asyncio.create_task(serve(web.Application(), url, "retriever.url"))
    await wait_until_async(lambda: asyncio.to_thread(is_listening, url), 20)
    os.kill(os.getpid(), signal.SIGTERM)
    await serving


async def test_a_server_that_listens_elsewhere_than_its_address_says_where(caplog):
    port = free_port()
    serving = asyncio.create_task(serve(web.Application(), f"http://retriever.test:{port}", "retriever.url"))
    await wait_until_async(lambda: asyncio.to_thread(is_listening, f"http://127.0.0.1:{port}"), 20)
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    assert f"loopback alone, at http://127.0.0.1:{port}: http://retriever.test:{port} must lead there" in caplog.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json"}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "application/json", "Host": "localhost:1"}, 200),
        ({"Content-Type": "application/json", "Host": "[::1]:8000"}, 200),
        ({"Content-Type": "application/json", "Host": "retriever.test"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "application/json", "Host": "evil.example"}, 421),
        ({"Content-Type": "application/json", "Host": "127.0.0.1.evil.example:8000"}, 421),
        ({"Content-Type": "application/json", "Host": "[::1"}, 421),
        ({"Content-Type": "application/json", "Host": ""}, 421),
    ],
)
async def test_a_server_answers_nothing_that_a_web_page_can_make_a_browser_send(served, headers, status):
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{served}/x", data=b'{"queries": []}', headers=headers) as response:
            assert response.status == status
            answer = await response.json()
        assert answer == ({"queries": []} if status == 200 else {"error": answer["error"]})
        foreign = {"Host": headers["Host"]} if "Host" in headers else {}
        async with session.get(f"{served}/x", headers=foreign) as response:
            assert response.status == (421 if status == 421 else 200)


@pytest.fixture
async def guarded() -> AsyncIterator[str]:
    """A server on all addresses, that asks for a token."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(str(request.rel_url))

    application = web.Application()
    application.router.add_get("/x", answer)
    port = free_port()
    serving = asyncio.create_task(serve(application, f"http://0.0.0.0:{port}", "--port", "two"))
    await wait_until_async(lambda: asyncio.to_thread(is_listening, f"http://127.0.0.1:{port}"), 20)
    yield f"http://127.0.0.1:{port}"
    os.kill(os.getpid(), signal.SIGTERM)
    await serving


async def test_from_other_machines_a_token_is_needed_once(guarded):
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
        for path in ("/x", "/x?token=", "/x?token=on", "/x?token=onee"):
            async with browser.get(guarded + path) as refused:
                assert refused.status == 401
        async with browser.get(f"{guarded}/x?token=two&step=3") as answer:
            assert (answer.status, await answer.json()) == (200, "/x?step=3"), "and it is in no address after that"
            assert "HttpOnly; Path=/; SameSite=Lax" in answer.history[0].headers["Set-Cookie"]
        async with browser.get(f"{guarded}/x") as answer:
            assert answer.status == 200
    async with aiohttp.ClientSession() as program:
        for token, status in (("Bearer two", 200), ("Bearer \udcff", 401), ("two", 200), ("Bearer ", 401)):
            async with program.get(f"{guarded}/x", headers={"Authorization": token}) as answer:
                assert answer.status == status
