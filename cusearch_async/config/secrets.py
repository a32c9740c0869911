"""Secrets, which are not settings: the Redis password."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from cusearch_async.config.whole import Config
from cusearch_async.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def redis_password(config: Config) -> str | None:
    """CUSEARCH_REDIS_PASSWORD; else the content of `redis_password_file`; None without both.

    Raises: ConfigError when the file exists, but this user may not read it."""
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
            f"{path}, the password of this run's Redis, cannot be read ({error.strerror}); run as the user who started "
            "that Redis, or set CUSEARCH_REDIS_PASSWORD"
        ) from error


def redis_password_file(config: Config) -> Path | None:
    """The password file of the Redis that was started for this run. None when redis.url cannot be that Redis, because
    it is on another machine or has a user name."""
    parts = urlsplit(config.redis.url)
    if parts.scheme != "redis" or parts.hostname not in LOOPBACK or parts.username:
        return None
    return config.folder / "redis" / "password"
