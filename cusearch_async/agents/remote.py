"""Agents that run elsewhere: they ask for an episode, and end it with what they have found.

POST /tasks                    an episode, with the token; 204 where none waits
POST /sessions/KEY/end         {"answer": …}, {"reward": …} or {"error": …}, with the key of its session
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from cusearch_async.agents.api import Refused, body_of
from cusearch_async.environments.task import Task
from cusearch_async.errors import EpisodeFailed
from cusearch_async.http_server import has_token

POLL_S = 20.0
"""A question for an episode is answered after this time at the latest."""

Result = str | float | None


@dataclass(slots=True, eq=False)
class _Offer:
    task: Task
    result: asyncio.Future[Result]


class Remote:
    def __init__(self, token: str) -> None:
        self._token = token
        self._waiting: deque[_Offer] = deque()
        self._offers: dict[str, _Offer] = {}
        """All that have not ended, by the key of their session."""
        self._news = asyncio.Event()

    async def agent(self, task: Task) -> Result:
        """Offer the episode, and wait for what the program that takes it ends it with. Raises: EpisodeFailed."""
        offer = _Offer(task, asyncio.get_running_loop().create_future())
        self._offers[task.api_key] = offer
        self._waiting.append(offer)
        self._news.set()
        try:
            return await offer.result
        finally:
            del self._offers[task.api_key]
            with suppress(ValueError):
                self._waiting.remove(offer)

    async def take(self, request: web.Request) -> web.Response:
        if not has_token(request, self._token):
            raise Refused("the API key is not CUSEARCH_AGENTS_TOKEN", code="invalid_api_key", status=401)
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                while not self._waiting:
                    self._news.clear()
                    await self._news.wait()
                task = self._waiting.popleft().task
                here = f"http://{request.host}/sessions/{task.api_key}"
                return web.json_response(
                    {
                        "question": task.question,
                        "question_id": task.question_id,
                        "base_url": f"{here}/v1",
                        "api_key": task.api_key,
                        "model": task.model,
                        "search_url": f"{here}/search",
                        "end_url": f"{here}/end",
                    }
                )
        return web.Response(status=204)

    async def end(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        name, value = next(iter(body.items())) if isinstance(body, dict) and len(body) == 1 else ("", None)
        kinds: dict[str, Any] = {"answer": str | None, "reward": int | float, "error": str}
        if name not in kinds or not isinstance(value, kinds[name]):
            raise Refused('the body must be {"answer": a text or null}, {"reward": a number} or {"error": a text}')
        offer = self._offers.get(request.match_info["key"])
        if offer is None or offer.result.done():
            raise Refused("this episode has ended", code="session_ended", status=409)
        if name == "error":
            offer.result.set_exception(EpisodeFailed(f"the program elsewhere said: {value[:500]}"))
        else:
            offer.result.set_result(value)
        return web.json_response({})
