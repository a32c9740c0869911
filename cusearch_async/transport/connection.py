"""The connection to Redis: plain, TLS or Sentinel; retries during outages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import redis.asyncio as aioredis
from redis import exceptions
from redis.asyncio.sentinel import Sentinel
from redis.credentials import CredentialProvider

from cusearch_async.config import RedisConfig
from cusearch_async.errors import BufferUnavailable, first_line
from cusearch_async.lifecycle.progress import LOG_EVERY_S
from cusearch_async.retry import doubling_pause_s

log = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECTIONS = 16
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0
_NO_MEMORY = (exceptions.OutOfMemoryError,)
_OUTAGE = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    OSError,
    exceptions.ReadOnlyError,
    exceptions.MasterDownError,
    *_NO_MEMORY,
)
_OUTAGE_WORDS = ("READONLY", "OOM command", "MASTERDOWN", "LOADING", "MISCONF", "BUSY", "NOREPLICAS")
"""Errors that may go away: no answer, not the master, out of memory, disk full, another script running. Redis 6 wraps
them in the error of a script, so the text is checked too."""
_CLOSED = "the handler is closed"
"""In uvloop's RuntimeError for a connection that was lost between two steps of the client; redis-py lets it through."""
_REFUSALS = (exceptions.AuthenticationError, exceptions.NoPermissionError, exceptions.AuthorizationError)
_REFUSAL_WORDS = ("NOAUTH", "WRONGPASS", "NOPERM", "user executing the script can't")


Password = Callable[[], str | None]
"""Called at every connection, because a Redis that is started after its clients makes its password only then."""


class _Credentials(CredentialProvider):
    def __init__(self, user: str, password: Password) -> None:
        self._user, self._password = user, password

    async def get_credentials_async(self) -> Any:
        """(user, password); empty without both. A Redis without a password accepts any."""
        password = self._password()
        return (self._user or "default", password or "") if self._user or password else ()


def connect(settings: RedisConfig, password: Password = lambda: None) -> Any:
    """A client for one process; no connection is made yet. When all its connections are in use, callers wait.

    redis:// and rediss:// (TLS; `?ssl_ca_certs=FILE` names the authority) connect to one server.
    redis+sentinel://HOST:PORT[,HOST:PORT...]/SERVICE[/DB] connects to the master that the sentinels name; the password
    of the sentinels comes from CUSEARCH_SENTINEL_PASSWORD."""
    parts = urlsplit(settings.url)
    *_, hosts = parts.netloc.rpartition("@")
    options: dict[str, Any] = {
        "max_connections": _CONNECTIONS,
        "socket_timeout": settings.timeout_s,
        "socket_connect_timeout": settings.timeout_s,
        "retry": None,  # `Connection.run` does it
        "credential_provider": _Credentials(unquote(parts.username or ""), password),
    }
    if parts.scheme == "redis+sentinel":
        places = [place.rsplit(":", 1) for place in hosts.split(",")]
        service, _, database = parts.path.strip("/").partition("/")
        sentinel = Sentinel(  # type: ignore[no-untyped-call]
            [(host, int(port)) for host, port in places],
            sentinel_kwargs={
                "socket_timeout": settings.timeout_s,
                "password": os.environ.get("CUSEARCH_SENTINEL_PASSWORD") or None,
            },
        )
        return sentinel.master_for(service, db=int(database or 0), **options)
    without_user = urlunsplit(parts._replace(netloc=hosts))
    pool = aioredis.BlockingConnectionPool.from_url(without_user, timeout=None, **options)
    return aioredis.Redis.from_pool(pool)


class Connection:
    """Runs commands on a client, and retries them for up to `patience_s` during an outage, but not once `stop` is
    set."""

    def __init__(
        self,
        settings: RedisConfig,
        patience_s: float,
        stop: asyncio.Event | None = None,
        password: Password = lambda: None,
    ) -> None:
        self.client = connect(settings, password)
        self._settings = settings
        self._patience_s = patience_s
        self._stop = stop or asyncio.Event()
        self._logged_at = float("-inf")

    @property
    def timeout_s(self) -> float:
        """Seconds until a command without an answer is sent again."""
        return self._settings.timeout_s

    async def run(self, command: Callable[[], Awaitable[T]]) -> T:
        """The answer to `command`. The command must be idempotent, because it is sent again without an answer.

        Raises: BufferUnavailable without an answer within patience_s, or at once when Redis refuses the connection or
        the server is not a Redis."""
        began, failed = time.monotonic(), 0
        while True:
            try:
                return await command()
            except exceptions.InvalidResponse as error:
                raise BufferUnavailable(
                    f"the server at {self._address} is not a Redis ({first_line(error)}); fix redis.url"
                ) from error
            except (*_OUTAGE, exceptions.ResponseError, RuntimeError) as error:
                if _is_refusal(error):
                    raise self._refused(error) from error
                if _is_cluster(error) or _has_no_database(error):
                    raise self._unsuitable(error) from error
                if not _is_outage(error):
                    raise
                failed += 1
                wait_s = doubling_pause_s(failed, _FIRST_RETRY_S, _LAST_RETRY_S)
                if self._stop.is_set() or time.monotonic() - began + wait_s > self._patience_s:
                    raise self._unavailable(error) from error
                self._say(error, began)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), wait_s)

    def _say(self, error: Exception, began: float) -> None:
        """Log the outage every few seconds, once for all waiting commands."""
        now = time.monotonic()
        if now - self._logged_at < LOG_EVERY_S:
            return
        self._logged_at = now
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + began + self._patience_s - now))
        log.warning(
            "Redis at %s down for %.0f s (%s); waiting until %s", self._address, now - began, first_line(error), until
        )

    async def close(self) -> None:
        await self.client.aclose()

    def _refused(self, error: Exception) -> BufferUnavailable:
        return BufferUnavailable(
            f"Redis at {self._address} refuses the connection ({first_line(error)}); set CUSEARCH_REDIS_PASSWORD, and "
            "a user name in redis.url if it has users; for a Redis that was started for another run, the password is "
            "in that run's folder, redis/password"
        )

    def _unsuitable(self, error: Exception) -> BufferUnavailable:
        if _is_cluster(error):
            return BufferUnavailable(
                f"Redis Cluster is not supported; {self._address} is one of its nodes, and not the one with the run's "
                f"keys ({first_line(error)}); give redis.url a single server, or one with Sentinel"
            )
        return BufferUnavailable(
            f"Redis at {self._address} has no such database ({first_line(error)}); fix the number at the end of "
            f"redis.url {self._settings.url}, like /0"
        )

    def _unavailable(self, error: Exception) -> BufferUnavailable:
        if isinstance(error, _NO_MEMORY) or "OOM" in str(error):
            return BufferUnavailable(
                f"Redis at {self._address} has no memory left ({first_line(error)}); raise its maxmemory above "
                f"redis.max_mib ({self._settings.max_mib}), or lower that"
            )
        return BufferUnavailable(
            f"Redis at {self._address} cannot be reached ({first_line(error)}); start one (`cusearch redis CONFIG`), "
            "or fix redis.url"
        )

    @property
    def _address(self) -> str:
        return urlsplit(self._settings.url).netloc.rpartition("@")[2]


def _is_outage(error: Exception) -> bool:
    if isinstance(error, RuntimeError):
        return _CLOSED in str(error)
    return isinstance(error, _OUTAGE) or any(word in str(error) for word in _OUTAGE_WORDS)


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, _REFUSALS) or any(word in str(error) for word in _REFUSAL_WORDS)


def _is_cluster(error: Exception) -> bool:
    return isinstance(error, exceptions.AskError | exceptions.ClusterError) or "cluster mode" in str(error)


def _has_no_database(error: Exception) -> bool:
    return "DB index is out of range" in str(error) or "invalid DB index" in str(error)
