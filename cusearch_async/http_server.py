"""HTTP on loopback; from other machines only for who has a token. What a foreign web page makes a browser send is
refused."""

from __future__ import annotations

import hmac
import logging
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from cusearch_async.config import LOOPBACK
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.signals import stop_on_signals

log = logging.getLogger(__name__)


async def serve(application: web.Application, url: str, key: str, token: str = "", what: str = "") -> None:
    """Serve on loopback at the port of `url`, the setting `key`, until a signal arrives. With a `token`, at the host of
    `url`, which may be any: each request needs it. `what` is served is logged.

    Raises: ConfigError when the port is taken."""
    stop = stop_on_signals()
    port, asked = urlsplit(url).port or 80, urlsplit(url).hostname
    host = asked if asked and (token or asked == LOOPBACK[2]) else LOOPBACK[0]
    application.middlewares.append(_ask_for_token(token, port) if token else _refuse_browsers(url))
    # Work for disconnected clients is cancelled, and waiting clients do not delay the shutdown.
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=5)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        at = f"port {port}" if host == LOOPBACK[0] else f"{host}, port {port}"
        raise ConfigError(f"{key}: cannot listen on {at} ({error.strerror or error}); choose another") from error
    if host == LOOPBACK[0] and asked not in LOOPBACK:
        log.warning("listening on loopback alone, at http://%s:%d: %s must lead there, by a proxy", host, port, url)
    else:
        log.info("listening at %s%s", url, f", serving {what}" if what else "")
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


def has_token(request: web.Request, token: str) -> bool:
    """Whether a request has the token as its bearer."""
    return _is_token(_bearer_of(request), token)


def _bearer_of(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def _is_token(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())


def _ask_for_token(token: str, port: int) -> Middleware:
    """A browser gives it once, as `?token=`, and then has it as a cookie that other sites cannot post with. It is
    sent, too, where the address is opened out of another site's page, such as a terminal in the browser."""
    cookie = f"cusearch-{port}"  # a browser has one set of cookies for all ports of a host

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        in_address = request.query.get("token", "")
        if _is_token(in_address, token):
            found = web.HTTPFound(request.url.without_query_params("token").relative())
            found.set_cookie(cookie, in_address, httponly=True, samesite="Lax")
            raise found
        if not _is_token(request.cookies.get(cookie) or _bearer_of(request), token):
            why = "this server needs its token: open the address that it has printed"
            return web.json_response({"error": why}, status=401)
        return await handler(request)

    return check
