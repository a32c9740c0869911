"""The address at which agents ask the policy, in three APIs, for every episode that runs; on loopback.

An episode has a session, whose name is its key, too.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from cusearch_async.agents import chat, messages, responses
from cusearch_async.agents.api import MAX_BODY_BYTES, MODEL, Refused, TurnReply, TurnRequest, body_of
from cusearch_async.agents.remote import TASKS, Remote
from cusearch_async.config import LOOPBACK, EpisodeConfig
from cusearch_async.errors import ConfigError, CusearchError, RetrievalError
from cusearch_async.http_server import has_token

PORTS = 64
"""Workers of one machine listen at ports that follow each other."""
ATTEMPTS = "x-stainless-retry-count"
"""The header in which OpenAI's and Anthropic's clients number the attempts of a request."""
_REACHED_AT = {"0.0.0.0": LOOPBACK[0], "::": LOOPBACK[2]}  # noqa: S104
"""Where a machine finds what listens at all of its addresses."""

log = logging.getLogger(__name__)

Answer = Callable[[TurnRequest], Awaitable[TurnReply]]
"""The policy's turn. Raises: Refused; EpisodeFailed and its like."""
Search = Callable[[str], Awaitable[list[str]]]


@dataclass(slots=True)
class Session:
    answer: Answer
    search: Search
    ignores: Sequence[str] = ()
    """Fields of requests."""
    refusal: str = ""
    """The last one."""
    heard_at: float = field(default_factory=time.monotonic)
    """When the last request ended."""
    requests: int = 0
    """In progress."""

    @property
    def silent_s(self) -> float:
        return 0.0 if self.requests else time.monotonic() - self.heard_at

    @contextmanager
    def heard(self) -> Iterator[None]:
        """While a request is in progress."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1
            self.heard_at = time.monotonic()

    @property
    def refused(self) -> str:
        """The same, to end a message with."""
        return f"; it was refused: {self.refusal}" if self.refusal else ""


_SESSION = web.RequestKey("session", Session)
_APIS: Mapping[str, Any] = {"chat/completions": chat, "messages": messages, "responses": responses}
"""Path -> how requests are read, and answers and errors written."""


_LOG = logging.getLogger(f"{__name__}.http")
_LOG.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
"""What is no HTTP is answered, and not worth a traceback."""


class Gateway:
    """Listens on loopback while a session is open, or at an address where programs elsewhere ask for episodes, from the
    first one to the end of the process."""

    def __init__(
        self, settings: EpisodeConfig, address: str = "", remote: Remote | None = None, port_shift: int = 0
    ) -> None:
        self._settings = settings
        self._address = urlsplit(address)
        self._first_port = (self._address.port or 0) + (port_shift if remote else 0)
        self._remote = remote
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._url = ""
        self._opening = asyncio.Lock()

    @asynccontextmanager
    async def session(
        self, answer: Answer, search: Search, ignores: Sequence[str] = ()
    ) -> AsyncIterator[tuple[Session, str, str]]:
        """A session, its address and its key."""
        key, session = secrets.token_urlsafe(24), Session(answer, search, ignores)
        async with self._opening:
            if self._runner is None:
                await self._listen()
            self._sessions[key] = session
        try:
            yield session, f"{self._url}/sessions/{key}", key
        finally:
            del self._sessions[key]
            if not self._sessions and self._remote is None:
                await self.close()

    async def close(self) -> None:
        """Listen no more. Programs elsewhere would take a moment without sessions for the end."""
        async with self._opening:
            if not self._sessions and self._runner is not None:
                runner, self._runner = self._runner, None
                await runner.cleanup()

    async def _listen(self) -> None:
        application = web.Application(middlewares=[self._in_session], client_max_size=MAX_BODY_BYTES)
        for path in _APIS:
            application.router.add_post(f"/sessions/{{key}}/v1/{path}", self._answer)
        application.router.add_get("/sessions/{key}/v1/models", self._models)
        application.router.add_post("/sessions/{key}/search", self._search)
        if self._remote is not None:
            application.router.add_post(TASKS, self._remote.take)
            application.router.add_post("/sessions/{key}/end", self._remote.end)
        # a program that goes while it waits for an episode gets none; turns are sampled to their end
        runner = web.AppRunner(application, access_log=None, logger=_LOG, shutdown_timeout=1, handler_cancellation=True)
        await runner.setup()
        try:
            port = await self._listen_at(runner)
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        host = self._address.hostname or LOOPBACK[0]
        host = _REACHED_AT.get(host, host)
        _reach_without_proxy(host)
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def _listen_at(self, runner: web.AppRunner) -> int:
        """The port: the first free one from that of the address on. Raises: ConfigError."""
        host, first = self._address.hostname or LOOPBACK[0], self._first_port
        for port in range(first, first + (PORTS if first else 1)):
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(
                        f"environment.LABEL.remote: cannot listen at {host} ({error.strerror})"
                    ) from error
                continue
            if first:
                log.info("programs can ask for episodes at http://%s:%d", host, port)
            return int(runner.addresses[0][1])
        raise ConfigError(f"environment.LABEL.remote: ports {first} to {first + PORTS - 1} of {host} are in use")

    @web.middleware
    async def _in_session(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Failures become errors in the API's form."""
        session = None
        try:
            if self._remote is None or request.path != TASKS:
                session = request[_SESSION] = self._session_of(request)
            with session.heard() if session else nullcontext():
                return await handler(request)
        except Refused as error:
            refusal = error
        except web.HTTPException as error:
            path = request.path.removeprefix("/sessions/").partition("/")[2]
            served = ", ".join(f"/v1/{api}" for api in _APIS)
            refusal = Refused(f"{request.method} /{path}: {error}; asked is at {served}", status=error.status)
        except CusearchError as error:  # an outage fails its episode, whatever the program makes of it
            status = HTTPStatus.BAD_GATEWAY if isinstance(error, RetrievalError) else HTTPStatus.BAD_REQUEST
            refusal = Refused(str(error), code=type(error).__name__, status=status)
        if session is not None:
            session.refusal = str(refusal)
        return web.json_response(_api_of(request).error(refusal), status=refusal.status)

    def _session_of(self, request: web.Request) -> Session:
        key = request.match_info.get("key") or request.path.removeprefix("/sessions/").partition("/")[0]
        session = self._sessions.get(key)
        if session is None:
            raise Refused("there is no such session, or it has ended", code="session_ended", status=404)
        if not has_token(request, key) and request.headers.get("x-api-key") != key:
            raise Refused("the API key is not that of this session", code="invalid_api_key", status=401)
        return session

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "cusearch"}
        return web.json_response({"object": "list", "data": [model]})

    async def _search(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        query = body.get("query") if isinstance(body, dict) else None
        if not isinstance(query, str):
            raise Refused("query must be a text", "query")
        return web.json_response({"documents": await request[_SESSION].search(query)})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        api, session = _api_of(request), request[_SESSION]
        asked = api.read(await body_of(request), self._settings, session.ignores)
        asked = replace(asked, is_first=request.headers.get(ATTEMPTS) == "0")
        reply = await session.answer(asked)
        if not asked.streams:
            return web.json_response(api.answer(reply))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in api.events(reply, asked):
            await response.write(event)
        return response


def _api_of(request: web.Request) -> Any:
    return _APIS.get(request.path.partition("/v1/")[2], chat)


def _reach_without_proxy(host: str) -> None:
    """For clients in this process and in programs that it starts: many send all requests to a proxy that the
    environment names, this machine's own, too."""
    for variable in ("NO_PROXY", "no_proxy"):
        known = [name for name in os.environ.get(variable, "").split(",") if name]
        os.environ[variable] = ",".join(dict.fromkeys([*known, *LOOPBACK, host]))
