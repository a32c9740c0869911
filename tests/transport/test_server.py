"""Our own Redis server: found, started with the promised settings, guarded by a password."""

from __future__ import annotations

import pytest

from cusearch_async import host
from cusearch_async.config import RedisConfig
from cusearch_async.errors import BufferUnavailable
from cusearch_async.transport.buffer import RedisBuffer
from cusearch_async.transport.connection import Connection, connect
from cusearch_async.transport.server import is_listening, server_command
from tests.conftest import wait_until
from tests.transport.conftest import make_shape


async def test_the_server_writes_every_change_to_disk_and_evicts_nothing(redis_url):
    client = connect(RedisConfig(url=redis_url))
    for name, value in (("appendonly", "yes"), ("appendfsync", "always"), ("maxmemory-policy", "noeviction")):
        assert (await client.config_get(name)) == {name: value}
    await client.aclose()


async def test_a_wrong_password_is_one_clear_error_at_once(tmp_path, monkeypatch):
    url = f"redis://127.0.0.1:{host.free_port()}/0"
    server = host.start_child(server_command(url, tmp_path, "right"), log_file=tmp_path / "log")
    try:
        wait_until(lambda: is_listening(url), timeout_s=20)
        for password in ("wrong", ""):
            monkeypatch.setenv("CUSEARCH_REDIS_PASSWORD", password)
            connection = Connection(RedisConfig(url=url), patience_s=1000)
            with pytest.raises(BufferUnavailable, match="CUSEARCH_REDIS_PASSWORD"):
                await RedisBuffer(connection, "x", make_shape()).state()
        monkeypatch.setenv("CUSEARCH_REDIS_PASSWORD", "right")
        await RedisBuffer(Connection(RedisConfig(url=url), patience_s=1), "x", make_shape()).state()
    finally:
        server.kill()
        server.wait()


def test_the_password_is_not_on_the_command_line(tmp_path):
    assert not any("secret" in part for part in server_command("redis://127.0.0.1:7000/0", tmp_path, "secret"))


@pytest.mark.parametrize("url", ["redis://10.0.0.1:6379/0", "rediss://127.0.0.1:6379/0"])
def test_only_a_plain_loopback_server_can_be_started(url, tmp_path):
    with pytest.raises(BufferUnavailable, match="loopback"):
        server_command(url, tmp_path, None)
