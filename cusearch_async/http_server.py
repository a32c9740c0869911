"""HTTP on loopback, for programs only: requests of browsers are refused."""

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
    """Serve on loopback at the port of `url`, the setting `key`, until a signal arrives.

    Raises: ConfigError when the port is taken."""
    stop = stop_on_signals()
    application.middlewares.append(_refuse_browsers(url))
    # Work for disconnected clients is cancelled, and waiting clients do not delay the shutdown.
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
    """Refuses requests that a web page makes a browser send: a foreign Host header (DNS rebinding), and a POST that
    needs no preflight across origins. Programs send our address and JSON."""
    ours = {*LOOPBACK, urlsplit(url).hostname}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            host = urlsplit(f"//{request.host}").hostname  # without the port
        except ValueError:
            host = None
        if host not in ours:
            why = f"this server is not {request.host!r}; use {url}, or a loopback address"
            return web.json_response({"error": why}, status=421)
        if request.method == "POST" and request.content_type != "application/json":
            why = f"Content-Type must be application/json, got {request.content_type}"
            return web.json_response({"error": why}, status=415)
        return await handler(request)

    return check
