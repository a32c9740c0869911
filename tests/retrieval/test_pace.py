"""A retriever that has a limit: how many searches it is sent, and that none is lost."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web

from tests.conftest import SLOW
from tests.http_service import Service
from tests.retrieval.retrievers import QUESTION, client_of, finds


class Busy:
    """Answers after `answer_s`; more than `most` requests in `window_s` are refused with 429."""

    def __init__(self, answer_s: float = 0.0, most: int = 10**6, window_s: float = 1.0, **headers: str) -> None:
        self.answer_s, self.most, self.window_s, self.headers = answer_s, most, window_s, headers
        self.answered_at: list[float] = []
        self.refused = self.at_once = self.most_at_once = 0

    async def __call__(self, service: Service, request: web.Request) -> web.StreamResponse:
        now = time.monotonic()
        if sum(now - at < self.window_s for at in self.answered_at[-self.most :]) >= self.most:
            self.refused += 1
            named = {name.replace("_", "-"): value for name, value in self.headers.items()}
            return web.Response(status=429, headers=named)
        self.answered_at.append(now)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.answer_s)
        self.at_once -= 1
        return await finds("Lima")(service, request)


async def searches(busy: Busy, count: int, **settings) -> list[object]:
    async with client_of(Service(busy), **settings) as client:
        asked = (client.search(f"capital of country {n}", n, QUESTION, 0) for n in range(count))
        return await asyncio.gather(*asked, return_exceptions=True)


async def test_a_search_that_waits_for_others_does_not_time_out():
    """The wait for one of max_connections counted as the retriever's time."""
    busy = Busy(answer_s=0.1 * SLOW)
    found = await searches(busy, 40, max_connections=2, timeout_s=1.0 * SLOW, outage_s=1.5 * SLOW)
    assert found == [["Lima"]] * 40
    assert len(busy.answered_at) == 40
    assert busy.most_at_once == 2


@pytest.mark.parametrize("headers", [{}, {"Retry_After": "0.3"}])
async def test_a_retriever_with_a_limit_is_asked_no_faster_and_answers_all(headers):
    """After each answer all searches asked again, and some were given up."""
    busy = Busy(most=10, window_s=0.4, **headers)
    found = await searches(busy, 60, outage_s=1.5)
    assert found == [["Lima"]] * 60
    assert busy.refused < 4 * 60
