"""HTTP on loopback, for programs alone: what a browser sends is refused."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from cusearch_async.config import LOOPBACK
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.signals import stop_on_signals

log = logging.getLogger(__name__)


async def serve(application: web.Application, url: str, key: str) -> None:
    """Serve on loopback at the port of `url`, which the config calls `key`, until a signal comes.

    Raises: ConfigError when the port is taken."""
    stop = stop_on_signals()
    application.middlewares.append(_refuse_browsers(url))
    # who has gone away is not worked for, and none of those who wait may hold up the end
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=5)
    await runner.setup()
    port = urlsplit(url).port or 80
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
    except OSError as error:
        raise ConfigError(f"{key}: cannot listen on port {port} ({error.strerror}); choose another") from error
    log.info("listening at %s", url)
    await stop.wait()
    await runner.cleanup()


def _refuse_browsers(url: str) -> Middleware:
    """Refuses what a browser sends because some web page told it to: a name of that page's for our address, and a POST
    of a type that browsers send anywhere without asking. Programs name the address and say that they send JSON."""
    ours = {*LOOPBACK, urlsplit(url).hostname}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _name_of(request.host) not in ours:
            said = f"this is not {request.host!r}; ask at {url}, or at a loopback address"
            return web.json_response({"error": said}, status=421)
        if request.method == "POST" and request.content_type != "application/json":
            said = f"Content-Type must be application/json, got {request.content_type}"
            return web.json_response({"error": said}, status=415)
        return await handler(request)

    return check


def _name_of(host: str) -> str | None:
    """Of a Host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
