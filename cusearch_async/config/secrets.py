"""Secrets, which are not settings: the password of Redis, the tokens for weights, for agents and for the page.

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


def is_loopback(url: str) -> bool:
    """Whether the host of `url` is this machine, by an address that no proxy and no other machine reaches."""
    return urlsplit(url).hostname in LOOPBACK


def secret(variable: str) -> str | None:
    """The value of an environment variable, without the new line with which secrets out of files end; None for none."""
    return os.environ.get(variable, "").strip() or None


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
    """CUSEARCH_WEIGHTS_TOKEN; else the content of the file weights-token; None without both. `folder` is the run's.

    Raises: ConfigError when the file exists, but this user may not read it."""
    return _secret("CUSEARCH_WEIGHTS_TOKEN", folder / "weights-token", "the token for downloads of weights")


def make_weights_token(folder: Path) -> str:
    """`weights_token`; without one, a new token in its file, for this user only."""
    return weights_token(folder) or _new_token(folder / "weights-token")


def make_page_token(folder: Path) -> str:
    """CUSEARCH_PAGE_TOKEN; else the content of the file page-token, which is made, for this user only.

    Raises: ConfigError when the file exists, but this user may not read it; OSError when it cannot be made."""
    file = folder / "page-token"
    return _secret("CUSEARCH_PAGE_TOKEN", file, "the token for changes by the page") or _new_token(file)


def given_page_token() -> str | None:
    """CUSEARCH_PAGE_TOKEN."""
    return secret("CUSEARCH_PAGE_TOKEN")


def agents_token() -> str:
    """CUSEARCH_AGENTS_TOKEN. Raises: ConfigError without one."""
    token = secret("CUSEARCH_AGENTS_TOKEN")
    if not token:
        raise ConfigError(
            "environment.LABEL.remote needs a token: set CUSEARCH_AGENTS_TOKEN to the same secret for this process and "
            "for the programs that ask it for episodes"
        )
    return token


def _new_token(file: Path) -> str:
    made = secrets.token_urlsafe(32)
    write_file(file, made.encode(), mode=0o600)
    return made


def _secret(variable: str, path: Path | None, what: str) -> str | None:
    if (given := secret(variable)) or path is None:
        return given
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        remedy = f"run as the user who made it, or set {variable}"
        raise ConfigError(f"{path}, {what}, cannot be read ({error.strerror}); {remedy}") from error
