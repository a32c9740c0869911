"""The Redis that holds the buffer."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, urlsplit, urlunsplit

from pydantic import Field, model_validator

from cusearch_async.config.section import Free, Section, check_address, refuse_secrets

_TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
"""Options of a rediss:// URL."""
_SENTINEL = re.compile(r"redis\+sentinel://([^:/,@]+@)?[^:/,@]+:\d+(,[^:/,@]+:\d+)*/[\w.-]+(/\d+)?")


class RedisConfig(Section):
    transport: Free[str] = "redis"
    """What keeps the buffer: `redis`, or your own, as package.module:function."""
    url: Free[str] = "redis://127.0.0.1:6379/0"
    """redis://, rediss:// (TLS) or redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, with a user name if needed, never with
    a password."""
    timeout_s: Free[float] = Field(10.0, gt=0)
    """Longest wait for an answer; then the command is sent again."""
    outage_s: Free[float] = Field(120.0, ge=0)
    """How long a process waits for Redis before it exits with BufferUnavailable."""
    lease_s: Free[float] = Field(60.0, gt=1)
    """Tickets of a worker without a heartbeat for this long are requeued."""
    max_trajectories: Free[int | None] = Field(None, ge=1)
    """Maximum number of buffered trajectories; None: (max_staleness + 2)·N·G."""
    max_mib: Free[int] = Field(4096, ge=1)
    """Maximum size of the buffered payloads; pools kept for recovery, and the newest 1,000 quarantined ones, are
    not counted."""

    @model_validator(mode="after")
    def _plain_url(self) -> RedisConfig:
        refuse_secrets(self.url, "set CUSEARCH_REDIS_PASSWORD instead", takes_user=True)
        if self.transport != "redis":
            return self
        options = parse_qs(self.url.partition("?")[2], keep_blank_values=True)
        if "username" in options:
            raise ValueError("url must give the user before the host, like redis://USER@HOST:PORT/0")
        if self.url.startswith("redis+sentinel://"):
            if not _SENTINEL.fullmatch(self.url):
                raise ValueError(f"url {self.url!r} must look like redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/0")
        else:
            check_address(self.url, ("redis", "rediss"), "redis://127.0.0.1:6379/0")
            for name in options.keys() - (_TLS if self.url.startswith("rediss://") else ()):
                raise ValueError(f"url takes no option {name!r}; rediss:// takes {', '.join(_TLS)}")
            parts = urlsplit(self.url)
            database = parts.path.removeprefix("/")
            if not re.fullmatch(r"[0-9]*", database):
                raise ValueError(f"url must end in the number of a database, like redis://HOST/0, got {database!r}")
            netloc = parts.netloc if parts.port else f"{parts.netloc.removesuffix(':')}:6379"
            whole = urlunsplit(parts._replace(netloc=netloc, path=f"/{int(database or 0)}"))
            object.__setattr__(self, "url", whole)  # two spellings of one place are equal
        return self

    @property
    def place(self) -> str:
        """Where the buffer is, in words: the address without a user's name, or the name of another transport."""
        if self.transport != "redis":
            return self.transport
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
