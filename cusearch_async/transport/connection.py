"""The connection to Redis: plain, TLS or Sentinel; retries during outages; a check that the server loses no data."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import redis.asyncio as aioredis
from redis import exceptions
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.credentials import CredentialProvider

from cusearch_async.concurrency import doubling_pause_s
from cusearch_async.config import RedisConfig, secret
from cusearch_async.errors import BufferUnavailable, ConfigError, first_line
from cusearch_async.lifecycle.progress import LOG_EVERY_S

log = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECTIONS = 16
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0
_TRIES = 3
"""Of a command once the process is to end: one answer that comes late must not cost what it still has to write."""
_OUTAGE = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    OSError,
    exceptions.ReadOnlyError,
    exceptions.MasterDownError,
    exceptions.OutOfMemoryError,
)
_OUTAGE_WORDS = ("READONLY", "OOM command", "MASTERDOWN", "LOADING", "MISCONF", "BUSY", "NOREPLICAS", "UNBLOCKED")
"""Errors that may pass: no answer, not the master (any more), out of memory, disk full, another script running. Redis 6
wraps them in the error of a script, so the text is checked too."""
_DEMOTED = ("READONLY", "read only replica", "MASTERDOWN", "master is down")
"""In the errors of a server that is not the master any more."""
_CLOSED = "the handler is closed"
"""In uvloop's RuntimeError for a connection that was lost between two steps of the client; redis-py lets it through."""
_REFUSALS = (exceptions.AuthenticationError, exceptions.NoPermissionError, exceptions.AuthorizationError)
_REFUSAL_WORDS = ("DENIED", "NOAUTH", "WRONGPASS", "NOPERM", "user executing the script can't")
_NO_DATABASE = ("DB index is out of range", "invalid DB index")


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
    """A client for one process; no connection is made yet. When all connections to one server are in use,
    callers wait; with sentinels the next is refused.

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
                "socket_connect_timeout": settings.timeout_s,
                "retry": None,  # the next sentinel is asked
                "password": secret("CUSEARCH_SENTINEL_PASSWORD"),
            },
        )
        return sentinel.master_for(service, db=int(database or 0), **options)
    without_user = urlunsplit(parts._replace(netloc=hosts))
    pool = aioredis.BlockingConnectionPool.from_url(without_user, timeout=None, **options)
    return aioredis.Redis.from_pool(pool)


class Connection:
    """Runs commands on a client, and retries them for up to `patience_s` during an outage; once `stop` is set, a few
    times at most."""

    def __init__(
        self,
        settings: RedisConfig,
        patience_s: float,
        stop: asyncio.Event | None = None,
        password: Password = lambda: None,
    ) -> None:
        self.client = connect(settings, password)
        self.timeout_s = settings.timeout_s
        """Seconds until a command without an answer is sent again."""
        self._settings = settings
        self._patience_s = patience_s
        self._stop = stop or asyncio.Event()
        self._logged_at = float("-inf")
        self._address = urlsplit(settings.url).netloc.rpartition("@")[2]

    async def run(self, command: Callable[[], Awaitable[T]]) -> T:
        """The answer to `command`. The command must be idempotent, because it is sent again without an answer.

        Raises: BufferUnavailable without an answer within patience_s, or at once when Redis refuses the connection or
        the server is not a Redis."""
        began, failed = time.monotonic(), 0
        while True:
            try:
                return await command()
            except (*_OUTAGE, exceptions.InvalidResponse, exceptions.ResponseError, RuntimeError) as error:
                lasting = self._lasting(error)
                if lasting:
                    raise BufferUnavailable(lasting) from error
                if not _is_outage(error):
                    raise
                failed += 1
                wait_s = doubling_pause_s(failed, _FIRST_RETRY_S, _LAST_RETRY_S)
                is_stopping = self._stop.is_set()
                if (is_stopping and failed >= _TRIES) or time.monotonic() - began + wait_s > self._patience_s:
                    raise self._unavailable(error) from error
                self._log_outage(error, began)
                if any(word in str(error) for word in _DEMOTED):
                    await self._reconnect()
            if is_stopping:
                await asyncio.sleep(wait_s)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), wait_s)

    async def _reconnect(self) -> None:
        """The address may lead to another server now, as after a failover, and an error leaves connections open."""
        with contextlib.suppress(*_OUTAGE):
            await self.client.connection_pool.disconnect(inuse_connections=False)

    def _log_outage(self, error: Exception, began: float) -> None:
        """Every few seconds, once for all waiting commands."""
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

    def _lasting(self, error: Exception) -> str | None:
        """The message for an error that will not pass; None for any other."""
        text, line = str(error), first_line(error)
        if isinstance(error, exceptions.InvalidResponse):
            return f"the server at {self._address} is not a Redis ({line}); fix redis.url"
        if isinstance(error, MasterNotFoundError) and "AuthenticationError" in text:
            return f"the sentinels at {self._address} refuse the connection; set CUSEARCH_SENTINEL_PASSWORD"
        if isinstance(error, _REFUSALS) or any(word in text for word in _REFUSAL_WORDS):
            return (
                f"Redis at {self._address} refuses the connection ({line}); set CUSEARCH_REDIS_PASSWORD, and a user "
                "name in redis.url if it has users; for a Redis that was started for another run, the password is in "
                "that run's folder, redis/password"
            )
        if isinstance(error, exceptions.AskError | exceptions.ClusterError) or "cluster mode" in text:
            return (
                f"Redis Cluster is not supported; {self._address} is one of its nodes, and not the one with the run's "
                f"keys ({line}); give redis.url a single server, or one with Sentinel"
            )
        if any(word in text for word in _NO_DATABASE):
            return (
                f"Redis at {self._address} has no such database ({line}); fix the number at the end of redis.url "
                f"{self._settings.url}, like /0"
            )
        return None

    def _unavailable(self, error: Exception) -> BufferUnavailable:
        if isinstance(error, exceptions.OutOfMemoryError) or "OOM" in str(error):
            return BufferUnavailable(
                f"Redis at {self._address} has no memory left ({first_line(error)}); raise its maxmemory: it holds up "
                f"to redis.max_mib ({self._settings.max_mib}), and the pools of learner.checkpoint_every × "
                "learner.keep_checkpoints steps"
            )
        if isinstance(error, exceptions.ResponseError):
            return BufferUnavailable(
                f"Redis at {self._address} answers, and takes nothing ({first_line(error)}); put that right at its "
                "server, or give redis.url the one that takes writes"
            )
        return BufferUnavailable(
            f"Redis at {self._address} cannot be reached ({first_line(error)}); start it, with `cusearch redis CONFIG` "
            "where it is not your own, or fix redis.url"
        )


def _is_outage(error: Exception) -> bool:
    if isinstance(error, RuntimeError):
        return _CLOSED in str(error)
    # the client loads a script that is missing; it may be forgotten again before it is run
    if isinstance(error, exceptions.NoScriptError):
        return True
    return isinstance(error, _OUTAGE) or any(word in str(error) for word in _OUTAGE_WORDS)


async def check_server(connection: Connection) -> None:
    """Warn when the server writes nothing to disk. Raises: ConfigError when it evicts keys when it is full."""

    async def ask() -> Any:
        try:
            return await connection.client.info("memory") | await connection.client.info("persistence")
        except exceptions.NoPermissionError:
            return None

    info = await connection.run(ask)
    if info is None:
        log.warning("this Redis user may not run INFO: make sure that maxmemory-policy is noeviction")
        return
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ConfigError(
            f"Redis has maxmemory-policy {policy}: when it is full, it would delete trajectories before they are "
            "trained on; run `redis-cli CONFIG SET maxmemory-policy noeviction`, or change the server's configuration"
        )
    if not int(info.get("aof_enabled", 0)):
        log.warning(
            "Redis has appendonly off: buffered trajectories are lost when the server ends; "
            "run `redis-cli CONFIG SET appendonly yes`, or change the server's configuration"
        )
