"""A relay between the learner and other machines: it downloads each version once, and serves it to all of them.

It answers as the learner's server does (weights/http.py). What it does not have it downloads first. A version never
changes, but the next run's versions have the names of the last one's: every few seconds a client's question makes it
compare what it has. Relays may stand behind relays.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from aiohttp import web

from cusearch_async.concurrency import InFlight
from cusearch_async.config import Config, weights_token
from cusearch_async.errors import ConfigError, CusearchError, LearnerUnreachable, WeightsUnavailable
from cusearch_async.weights.downloads import SILENCE_S, Downloads, downloading
from cusearch_async.weights.folder import WeightStore
from cusearch_async.weights.http import Server, listening
from cusearch_async.weights.interface import OpenedVersion

log = logging.getLogger(__name__)

COMPARING_S = 5.0
COMPARED_S = 10.0
"""For so long a version that is here needs no question."""


@asynccontextmanager
async def relaying(config: Config) -> AsyncIterator[None]:
    """Serves at weights.url what is at weights.upstream. Versions are kept in the run folder's `relayed`.

    Raises: ConfigError without an upstream or a token, or when nothing can listen at weights.url."""
    upstream, token = config.weights.upstream, weights_token(config.folder)
    if upstream is None or config.weights.url is None:
        raise ConfigError(
            "a relay needs weights.upstream, the learner's address, and weights.url, its own, with weights.transport = "
            "'http'"
        )
    if token is None:
        raise ConfigError(
            "a relay needs the learner's token: set CUSEARCH_WEIGHTS_TOKEN, or copy weights-token from the learner's "
            f"run folder to {config.folder}"
        )
    store = WeightStore(config.folder / "relayed")
    async with downloading(upstream, config.folder, store.folder) as downloads:
        relay = Relay(downloads, store, token)
        async with listening(relay, config.weights.url, config.run.wait_s):
            yield
        await relay.close()


class Relay(Server):
    def __init__(self, downloads: Downloads, store: WeightStore, token: str) -> None:
        super().__init__(store, token)
        self._downloads = downloads
        self._downloading: InFlight[str, OpenedVersion] = InFlight()
        """Continues when the client that asked first is gone."""
        self._compared: dict[str, float] = {}
        """Version that is here -> when it was compared with the one there."""

    async def close(self) -> None:
        await self._downloading.close()

    async def _names(self, request: web.Request) -> web.Response:
        try:
            return web.json_response(await self._downloads.names())
        except CusearchError as error:
            return _answer_of(error)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        return await self._fetch_first(request) or await super()._file(request)

    async def _difference(self, request: web.Request) -> web.StreamResponse:
        return await self._fetch_first(request) or await super()._difference(request)

    async def _fetch_first(self, request: web.Request) -> web.Response | None:
        """The answer when the version is not here."""
        try:
            await asyncio.wait_for(self._have(request.match_info["name"]), SILENCE_S / 3)
        except TimeoutError:
            return web.json_response({}, status=HTTPStatus.ACCEPTED)
        except CusearchError as error:
            return _answer_of(error)
        return None

    async def _have(self, name: str) -> None:
        """Raises: WeightsUnavailable; ConfigError; WriteFailed."""
        began = time.monotonic()
        is_here = name in self._compared and self._store.directory(name).exists()
        if is_here and began - self._compared[name] < COMPARED_S:
            return
        if not (is_here and await self._is_current(name)):
            await self._downloading.share(name, lambda: self._downloads.open(name))
        self._compared[name] = began

    async def _is_current(self, name: str) -> bool:
        """A learner that is silent cannot be asked, as one that is gone."""
        try:
            return await asyncio.wait_for(self._downloads.is_current(name), COMPARING_S)
        except TimeoutError:
            return True

    async def _last(self, request: web.Request) -> web.StreamResponse:
        """The learner's answer to this client, once its version is here."""
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        asking = asyncio.ensure_future(self._ask_for_last(request))
        try:
            while not asking.done():
                await response.write(b" ")
                await asyncio.wait([asking], timeout=SILENCE_S / 3)
            await response.write(json.dumps(asking.result()).encode())
        except CusearchError as error:
            log.info("%s", error)
            if request.transport is not None:  # an end without an answer would be one; the client asks again
                request.transport.abort()
        finally:
            asking.cancel()
        return response

    async def _ask_for_last(self, request: web.Request) -> list[str]:
        last = await self._downloads.last(request.query.get("client", ""), request.query.get("have", ""))
        for name in last:
            await self._have(name)
        return last


def _answer_of(error: CusearchError) -> web.Response:
    """Clients wait for a learner that is gone as long as it takes, and not for a relay that cannot write."""
    other = HTTPStatus.NOT_FOUND if isinstance(error, WeightsUnavailable) else HTTPStatus.INTERNAL_SERVER_ERROR
    status = HTTPStatus.BAD_GATEWAY if isinstance(error, LearnerUnreachable) else other
    return web.json_response({"error": str(error)}, status=status)
