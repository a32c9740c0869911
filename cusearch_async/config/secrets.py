"""Secrets, which are not settings: the password of Redis, and the token for downloads of weights.

They come from the environment, or from a file in the run's folder that only its user can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from cusearch_async.config.redis import RedisConfig
from cusearch_async.errors import ConfigError
from cusearch_async.files import write_file

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def redis_password(settings: RedisConfig, folder: Path) -> str | None:
    """CUSEARCH_REDIS_PASSWORD; else the content of `redis_password_file`; None without both. `folder` is the run's.

    Raises: ConfigError when the file exists, but this user may not read it."""
    path = redis_password_file(settings, folder)
    return _secret("CUSEARCH_REDIS_PASSWORD", path, "the password of this run's Redis")


def redis_password_file(settings: RedisConfig, folder: Path) -> Path | None:
    """The password file of the Redis that was started for this run. None when redis.url cannot be that Redis, because
    it is on another machine or has a user name."""
    parts = urlsplit(settings.url)
    if parts.scheme != "redis" or parts.hostname not in LOOPBACK or parts.username:
        return None
    return folder / "redis" / "password"


def weights_token(folder: Path) -> str | None:
    """CUSEARCH_WEIGHTS_TOKEN; else the content of `weights_token_file`; None without both. `folder` is the run's.

    Raises: ConfigError when the file exists, but this user may not read it."""
    return _secret("CUSEARCH_WEIGHTS_TOKEN", weights_token_file(folder), "the token for downloads of weights")


def weights_token_file(folder: Path) -> Path:
    return folder / "weights-token"


def make_weights_token(folder: Path) -> str:
    """`weights_token`; without one, a new token in its file, for this user only."""
    given = weights_token(folder)
    if given is None:
        given = secrets.token_urlsafe(32)
        write_file(weights_token_file(folder), given.encode(), mode=0o600)
    return given


def _secret(variable: str, path: Path | None, what: str) -> str | None:
    given = os.environ.get(variable)
    if given or path is None:
        return given or None
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        remedy = f"run as the user who made it, or set {variable}"
        raise ConfigError(f"{path}, {what}, cannot be read ({error.strerror}); {remedy}") from error
