"""A stand-in for a service over HTTP that answers as it is told, well or badly."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

Answer = Callable[["Service", web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """A request as the service got it."""

    at_s: float
    path: str
    headers: dict[str, str]
    fields: dict[str, Any]
    """Of the JSON body of a POST, else of the URL."""


class Service:
    """Answers each request by the next of its answers, and by the last one for ever."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = answers
        self.requests: list[Seen] = []
        self.over = asyncio.Event()
        """Set when the test is over; what hangs until then ends."""

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [seen.fields for seen in self.requests]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        fields = await request.json() if request.method == "POST" else dict(request.query)
        self.requests.append(Seen(time.monotonic(), request.path, dict(request.headers), fields))
        return await self._answers[min(len(self.requests), len(self._answers)) - 1](self, request)


def says(body: Any, status: int = 200, **headers: str) -> Answer:
    """A JSON answer, or text as it is."""
    text = body if isinstance(body, str) else json.dumps(body)
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, status=status, headers=named, content_type="application/json")

    return answer


async def hangs(service: Service, request: web.Request) -> web.StreamResponse:
    await service.over.wait()
    return web.Response()


async def hangs_up(service: Service, request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def closes_after(text: bytes) -> Answer:
    """Half of an answer, then nothing."""

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(text)
        assert request.transport is not None
        request.transport.close()
        return response

    return answer
