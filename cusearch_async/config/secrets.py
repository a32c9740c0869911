"""Secrets are no settings: the Redis password."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from cusearch_async.config.whole import Config
from cusearch_async.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def redis_password(config: Config) -> str | None:
    """CUSEARCH_REDIS_PASSWORD; else what `redis_password_file` holds; None where there is neither.

    Raises: ConfigError when there is such a file, and only other users may read it."""
    given = os.environ.get("CUSEARCH_REDIS_PASSWORD")
    path = redis_password_file(config)
    if given or path is None:
        return given or None
    try:
        return path.read_text(encoding="utf-8") or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(
            f"{path}, the password of this run's Redis, cannot be read ({error.strerror}); be the user who started "
            "that Redis, or set CUSEARCH_REDIS_PASSWORD"
        ) from error


def redis_password_file(config: Config) -> Path | None:
    """Where the Redis that was started for this run has its password. None where redis.url cannot be that Redis: one
    on another machine, or with a user of its own."""
    parts = urlsplit(config.redis.url)
    if parts.scheme != "redis" or parts.hostname not in LOOPBACK or parts.username:
        return None
    return config.folder / "redis" / "password"
