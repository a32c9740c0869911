"""Agents that run elsewhere: they ask for an episode, and end it with what they have found.

POST /tasks                    an episode, with the token; 204 where none waits; {"environment": …}: of that one
POST /sessions/KEY/end         {"answer": …}, {"reward": …} or {"error": …}, with the key of its session
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from cusearch_async.agents.api import Refused, body_of
from cusearch_async.environments.task import Task
from cusearch_async.errors import EpisodeFailed
from cusearch_async.http_server import has_token

TASKS = "/tasks"
LOOK_S, TELL_S = 1.0, 60.0
POLL_S = 20.0
"""A question for an episode is answered after this time at the latest."""

log = logging.getLogger(__name__)

Result = str | float | None


@dataclass(slots=True, eq=False)
class _Offer:
    task: Task
    result: asyncio.Future[Result]
    taken: Callable[[], None]
    offered_at: float = field(default_factory=time.monotonic)


class Remote:
    def __init__(self, token: str) -> None:
        self._token = token
        self._waiting: deque[_Offer] = deque()
        self._offers: dict[str, _Offer] = {}
        """All that have not ended, by the key of their session."""
        self._news = asyncio.Event()
        self._told_at = -TELL_S

    async def agent(self, task: Task, taken: Callable[[], None], silence: Callable[[], str]) -> Result:
        """Offer the episode, and wait for what the program that takes it ends it with; `taken` is called when one does,
        and `silence` says from then on that it has been silent for too long. Raises: EpisodeFailed."""
        offer = _Offer(task, asyncio.get_running_loop().create_future(), taken)
        self._offers[task.api_key] = offer
        self._waiting.append(offer)
        self._news.set()
        try:
            while not offer.result.done():
                await asyncio.wait([offer.result], timeout=LOOK_S)
                if offer in self._waiting:
                    self._tell_of(offer)
                elif why := silence():
                    raise EpisodeFailed(why)
            return offer.result.result()
        finally:
            del self._offers[task.api_key]
            with suppress(ValueError):
                self._waiting.remove(offer)

    def _tell_of(self, offer: _Offer) -> None:
        now = time.monotonic()
        if now - max(self._told_at, offer.offered_at) >= TELL_S:
            self._told_at = now
            log.warning("%d episodes wait for a program to ask for one (POST %s)", len(self._waiting), TASKS)

    async def take(self, request: web.Request) -> web.Response:
        if not has_token(request, self._token):
            raise Refused("the API key is not CUSEARCH_AGENTS_TOKEN", code="invalid_api_key", status=401)
        body = await body_of(request) if request.can_read_body else {}
        wanted = body.get("environment") if isinstance(body, dict) else None
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                while (offer := self._next(wanted)) is None:
                    self._news.clear()
                    await self._news.wait()
                self._waiting.remove(offer)
                offer.taken()
                task = offer.task
                is_encrypted = request.headers.get("X-Forwarded-Proto") == "https"  # as a proxy with TLS says
                here = f"{'https' if is_encrypted else 'http'}://{request.host}/sessions/{task.api_key}"
                return web.json_response(
                    {
                        "question": task.question,
                        "question_id": task.question_id,
                        "metadata": dict(task.metadata),
                        "environment": task.environment,
                        "base_url": f"{here}/v1",
                        "api_key": task.api_key,
                        "model": task.model,
                        "search_url": f"{here}/search",
                        "end_url": f"{here}/end",
                    },
                    dumps=functools.partial(json.dumps, default=str),  # parquet has dates, too
                )
        return web.Response(status=204)

    def _next(self, environment: str | None) -> _Offer | None:
        of_it = (offer for offer in self._waiting if environment in (None, offer.task.environment))
        return next(of_it, None)

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
            offer.result.set_exception(EpisodeFailed(f"the program elsewhere said: {' '.join(value.split())[:500]}"))
        else:
            offer.result.set_result(value)
        return web.json_response({})
