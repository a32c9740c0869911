"""The address at which agents ask the policy: Chat Completions for every episode that runs, on loopback.

An episode has a session, whose name is its key, too. A session answers one request after the other; a request that is
sent again, as clients do when a connection was lost, gets the turn that was sampled for it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from cusearch_async.agents.chat import ChatReply, ChatRequest, Refused, completion, events, read_request
from cusearch_async.config import LOOPBACK, EpisodeConfig
from cusearch_async.errors import CusearchError, EpisodeFailed
from cusearch_async.http_server import has_token

MODEL = "policy"
MAX_BODY_BYTES = 16 << 20

Answer = Callable[[ChatRequest], Awaitable[ChatReply]]
"""Samples the policy's turn. Raises: Refused; EpisodeFailed and its like."""
Search = Callable[[str], Awaitable[list[str]]]


@dataclass(slots=True)
class Session:
    answer: Answer
    search: Search
    last: tuple[ChatRequest, asyncio.Future[ChatReply]] | None = None
    """The newest request, and its turn, which may still be sampled."""
    refusals: list[str] = field(default_factory=list)

    @property
    def refused(self) -> str:
        """The last refusal, to end a message with."""
        return f"; it was refused: {self.refusals[-1]}" if self.refusals else ""

    async def ask(self, request: ChatRequest) -> ChatReply:
        """Raises: Refused; what `answer` raises."""
        if self.last is None or not _same(self.last[0], request):
            if self.last is not None and not self.last[1].done():
                raise Refused("this session is still answering another request; ask one after the other", status=409)
            self.last = (request, asyncio.ensure_future(self.answer(request)))
        return await asyncio.shield(self.last[1])

    def outage(self) -> BaseException | None:
        """Why the newest turn failed, if neither the program nor the policy is the reason."""
        if self.last is None or not self.last[1].done() or self.last[1].cancelled():
            return None
        error = self.last[1].exception()
        return None if isinstance(error, Refused | EpisodeFailed) else error

    async def end(self) -> None:
        """No turn is sampled any more."""
        if self.last is not None:
            self.last[1].cancel()
            await asyncio.wait([self.last[1]])
            if not self.last[1].cancelled():
                self.last[1].exception()  # it has been told to whoever asked


class Gateway:
    """Listens while a session is open."""

    def __init__(self, settings: EpisodeConfig) -> None:
        self._settings = settings
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._url = ""
        self._opening = asyncio.Lock()

    @asynccontextmanager
    async def session(self, answer: Answer, search: Search) -> AsyncIterator[tuple[Session, str, str]]:
        """A session, its address and its key."""
        key, session = secrets.token_urlsafe(24), Session(answer, search)
        async with self._opening:
            self._sessions[key] = session
            if self._runner is None:
                await self._listen()
        try:
            yield session, f"{self._url}/sessions/{key}", key
        finally:
            del self._sessions[key]
            await session.end()
            async with self._opening:
                if not self._sessions and self._runner is not None:
                    runner, self._runner = self._runner, None
                    await runner.cleanup()

    async def _listen(self) -> None:
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_post("/sessions/{key}/v1/chat/completions", self._complete)
        application.router.add_get("/sessions/{key}/v1/models", self._models)
        application.router.add_post("/sessions/{key}/search", self._search)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, LOOPBACK[0], 0)
        await site.start()
        self._url = f"http://{LOOPBACK[0]}:{self._runner.addresses[0][1]}"

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session_of(request)
        except Refused as error:
            return web.json_response(error.body, status=error.status)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "cusearch"}
        return web.json_response({"object": "list", "data": [model]})

    async def _search(self, request: web.Request) -> web.Response:
        session = None
        try:
            session, body = self._session_of(request), await _json(request)
            query = body.get("query") if isinstance(body, dict) else None
            if not isinstance(query, str):
                raise Refused("query must be a text", "query")
            return web.json_response({"documents": await session.search(query)})
        except Refused as error:
            return _refusal(session, error)
        except CusearchError as error:
            return _refusal(session, Refused(str(error), code=type(error).__name__, status=502))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = None
        try:
            session = self._session_of(request)
            asked = read_request(await _json(request), self._settings)
            reply = await session.ask(asked)
        except Refused as error:
            return _refusal(session, error)
        except asyncio.CancelledError:
            if session is None or session.last is None or not session.last[1].cancelled():
                raise
            return _refusal(session, Refused("this session has ended", code="session_ended", status=409))
        except CusearchError as error:
            return _refusal(session, Refused(str(error), code=type(error).__name__, status=400))
        if not asked.streams:
            return web.json_response(completion(reply, MODEL))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in events(reply, MODEL):
            await response.write(event)
        return response

    def _session_of(self, request: web.Request) -> Session:
        key = request.match_info["key"]
        session = self._sessions.get(key)
        if session is None:
            raise Refused("there is no such session, or it has ended", code="session_ended", status=404)
        if not has_token(request, key):
            raise Refused("the API key is not that of this session", code="invalid_api_key", status=401)
        return session


def _refusal(session: Session | None, error: Refused) -> web.Response:
    if session is not None:
        session.refusals.append(str(error))
    return web.json_response(error.body, status=error.status)


async def _json(request: web.Request) -> Any:
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise Refused("the body is not JSON") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise Refused(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413) from error


def _same(one: ChatRequest, other: ChatRequest) -> bool:
    """Whether the second is the first, sent again."""
    return (one.messages, list(one.tools)) == (other.messages, list(other.tools))
