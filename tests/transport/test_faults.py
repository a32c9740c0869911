"""What happens to a buffer when its Redis is restarted, slow, full, behind TLS, or replaced by its replica."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import uvloop
from redis import exceptions

from cusearch_async.config import RedisConfig
from cusearch_async.errors import BufferLost, BufferUnavailable
from cusearch_async.lifecycle.children import start_child
from cusearch_async.transport import connection as connections
from cusearch_async.transport.buffer import RedisBuffer
from cusearch_async.transport.connection import Connection
from cusearch_async.transport.server import find_redis_server, is_listening, server_command
from tests.conftest import SLOW, free_port, serving, wait_until
from tests.strategies import make_trajectory
from tests.transport.conftest import make_limits
from tests.transport.filling import G, N, fill, start

pytestmark = pytest.mark.system  # servers die, and real time passes


class Server:
    """A Redis that can be killed, started again on the same files, and asked directly."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [*server_command(self.url, folder, None), *options]
        self._log = folder / "redis.log"
        self.start()

    def start(self) -> None:
        self.process = start_child(self._command, log_file=self._log)
        wait_until(lambda: is_listening(self.url), 20)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def client(self) -> Any:
        return redis.Redis(port=self.port, decode_responses=True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.kill()


@asynccontextmanager
async def buffer_on(
    url: str, patience_s: float = 30, timeout_s: float = 2, **limits: Any
) -> AsyncIterator[RedisBuffer]:
    connection = Connection(RedisConfig(url=url, timeout_s=timeout_s), patience_s)
    try:
        yield RedisBuffer(connection, "faults", make_limits(**limits))
    finally:
        await connection.close()


async def test_an_acknowledged_put_survives_kill_9_of_a_server_that_always_syncs(server):
    async with buffer_on(server.url, max_staleness=0) as buffer:
        await start(buffer)
        await fill(buffer, await buffer.admit("w", 0, N * G))
        before = await buffer.ledger()
        server.kill()
        server.start()
        assert await buffer.ledger() == before
        assert len(await buffer.claim(0)) == N * G


async def test_an_outage_is_ridden_out_and_every_write_happens_once(server):
    async with buffer_on(server.url, max_staleness=0) as buffer:
        await start(buffer)
        slots = await buffer.admit("w", 0, N * G)
        server.kill()
        puts = asyncio.gather(*(buffer.put(make_trajectory(p.ticket, p.rollout)) for p in slots))
        await asyncio.sleep(0)
        assert not puts.done()
        server.start()
        assert await puts == ["stored"] * N * G
        ledger = await buffer.ledger()
        assert (ledger.finished, ledger.duplicates_refused) == (N * G, 0)


async def test_who_waits_for_news_of_a_master_that_becomes_a_replica_waits_on(server):
    """A planned failover ended all workers with a traceback."""
    async with buffer_on(server.url) as buffer:
        await start(buffer)
        await buffer.wait_for_news(0.1)
        waiting = asyncio.create_task(buffer.wait_for_news(20 * SLOW))
        is_blocked = lambda: server.client.info("clients")["blocked_clients"] == 1  # noqa: E731
        await asyncio.to_thread(wait_until, is_blocked, 20)
        server.client.replicaof("127.0.0.1", free_port())
        server.client.replicaof("no", "one")
        await buffer.admit("w", 0, N * G)
        await fill(buffer, [])
        await asyncio.sleep(0)
        assert not (waiting.done() and waiting.exception())
        waiting.cancel()


async def test_an_outage_that_lasts_ends_by_name(server):
    async with buffer_on(server.url, patience_s=0.5) as buffer:
        await start(buffer)
        server.kill()
        with pytest.raises(BufferUnavailable, match=rf"127.0.0.1:{server.port} cannot be reached"):
            await buffer.put(make_trajectory(0, 0))


async def test_an_outage_is_told_again_and_again_with_its_length_and_its_end(monkeypatch, caplog):
    """By one of the commands that wait, not by each."""
    monkeypatch.setattr(connections, "LOG_EVERY_S", 0.6)
    monkeypatch.setattr(connections, "_LAST_RETRY_S", 0.2)
    port = free_port()
    async with buffer_on(f"redis://127.0.0.1:{port}/0", patience_s=2) as buffer:
        until = time.localtime(time.time() + 2)
        await asyncio.gather(*(buffer.state() for _ in range(5)), return_exceptions=True)
    message = [record.message for record in caplog.records]
    assert 3 <= len(message) <= 4  # at 0, 0.6, 1.2 and 1.8 s
    assert all(line.startswith(f"Redis at 127.0.0.1:{port} down for ") for line in message)
    assert "down for 0 s (" in message[0]
    assert any("down for 1 s (" in line for line in message)
    ends = [time.strptime(line.rpartition("waiting until ")[2], "%H:%M:%S") for line in message]
    assert all(abs(end.tm_min * 60 + end.tm_sec - until.tm_min * 60 - until.tm_sec) <= 1 for end in ends)


async def test_a_process_that_is_told_to_stop_waits_for_no_server(server):
    stop = asyncio.Event()
    connection = Connection(RedisConfig(url=server.url), 1000, stop)
    buffer = RedisBuffer(connection, "faults", make_limits())
    await start(buffer)
    server.kill()
    waiting = asyncio.create_task(buffer.state())
    await asyncio.sleep(0.3)
    assert not waiting.done()
    stop.set()
    async with asyncio.timeout(5 * SLOW):
        with pytest.raises(BufferUnavailable):
            await waiting
    await connection.close()


async def test_a_slow_server_is_asked_again_and_nothing_is_stored_twice(server):
    """CLIENT PAUSE holds every answer back for longer than the client waits for one."""
    async with buffer_on(server.url, timeout_s=0.3, max_staleness=0) as buffer:
        await start(buffer)
        slots = await buffer.admit("w", 0, N * G)
        server.client.client_pause(1500)
        outcomes = await asyncio.gather(*(buffer.put(make_trajectory(p.ticket, p.rollout)) for p in slots))
        assert outcomes == ["stored"] * N * G
        assert (await buffer.ledger()).finished == N * G


async def test_an_admission_whose_answer_was_lost_is_granted_once(server):
    async with buffer_on(server.url, timeout_s=0.3) as buffer:
        await start(buffer)
        server.client.client_pause(1000)
        granted = await buffer.admit("w", 0, 2 * G)
        assert len(granted) == 2 * G
        assert (await buffer.state()).next_ticket == 2


async def test_a_server_without_memory_is_waited_for_and_then_named(server):
    async with buffer_on(server.url, patience_s=1.0, max_staleness=0) as buffer:
        await start(buffer)
        slots = await buffer.admit("w", 0, N * G)
        server.client.config_set("maxmemory", "100kb")
        with pytest.raises(BufferUnavailable, match=r"has no memory left .* raise its maxmemory: .*keep_checkpoints"):
            await buffer.put(make_trajectory(slots[0].ticket, slots[0].rollout))
        put = asyncio.create_task(buffer.put(make_trajectory(slots[0].ticket, slots[0].rollout)))
        await asyncio.sleep(0)
        server.client.config_set("maxmemory", "0")
        assert await put == "stored"


async def test_a_server_that_has_lost_acknowledged_writes_is_named(server):
    """As a machine crash can with appendfsync everysec: here the learner's step is taken back by hand."""
    async with buffer_on(server.url, max_staleness=1) as buffer:
        await start(buffer)
        await fill(buffer, await buffer.admit("w", 0, 2 * N * G))
        pool = await buffer.claim(0)
        server.client.delete(buffer.keys.pool(0))
        with pytest.raises(BufferLost, match="Redis has lost data of run 'faults': part of pool 0 is gone"):
            await buffer.commit(pool, pool.trajectories)


def sentinel(settings: Path, port: int) -> AbstractContextManager[None]:
    command = [str(find_redis_server()), str(settings), "--sentinel"]
    return serving(command, f"redis://127.0.0.1:{port}", settings.with_suffix(".log"))


async def test_a_replica_that_is_promoted_by_sentinel_is_found(server, tmp_path, request):
    """Master and replica with one sentinel; the master is killed, the buffer continues with the replica."""
    (tmp_path / "replica").mkdir()
    master, port, settings = server, free_port(), tmp_path / "sentinel.conf"
    replica = Server(tmp_path / "replica", "--replicaof", "127.0.0.1", str(master.port))
    request.addfinalizer(replica.kill)
    settings.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor runs 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds runs 500\nsentinel failover-timeout runs 2000\n"
    )
    with sentinel(settings, port):
        known = redis.Redis(port=port, decode_responses=True)
        wait_until(lambda: len(known.execute_command("SENTINEL", "replicas", "runs")) == 1, 30)
        async with buffer_on(f"redis+sentinel://127.0.0.1:{port}/runs/0", patience_s=60 * SLOW) as buffer:
            await start(buffer)
            slots = await buffer.admit("w", 0, N * G)
            await fill(buffer, slots[:-1])
            master.client.wait(1, 5000)
            master.kill()
            await fill(buffer, slots[-1:])
            assert (await buffer.ledger()).finished == N * G
            assert len(await buffer.claim(0)) == N * G
        assert replica.client.info("replication")["role"] == "master"


async def test_sentinels_with_a_password_of_their_own_are_asked_with_it(server, tmp_path, monkeypatch):
    port, settings = free_port(), tmp_path / "sentinel.conf"
    settings.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nrequirepass watch\n"
        f"sentinel monitor runs 127.0.0.1 {server.port} 1\n"
    )
    with sentinel(settings, port):
        monkeypatch.setenv("CUSEARCH_SENTINEL_PASSWORD", "watch\n")  # as out of a file
        async with buffer_on(f"redis+sentinel://127.0.0.1:{port}/runs/0") as buffer:
            await start(buffer)
            assert (await buffer.state()).epoch == 1
        monkeypatch.setenv("CUSEARCH_SENTINEL_PASSWORD", "wrong")
        async with (
            asyncio.timeout(10 * SLOW),
            buffer_on(f"redis+sentinel://127.0.0.1:{port}/runs/0", patience_s=1000) as buffer,
        ):
            with pytest.raises(BufferUnavailable, match=r"refuse the connection; set CUSEARCH_SENTINEL_PASSWORD$"):
                await buffer.state()


async def test_a_sentinel_that_hangs_holds_nobody_up_while_another_answers(server, tmp_path):
    """It was asked eleven times before the other one, and nothing was logged meanwhile."""
    port, settings, over, asked = free_port(), tmp_path / "sentinel.conf", asyncio.Event(), list[None]()
    settings.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor runs 127.0.0.1 {server.port} 1\n"
    )

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(None)
        await over.wait()
        writer.close()

    hanging = await asyncio.start_server(hang, "127.0.0.1", 0)
    url = f"redis+sentinel://127.0.0.1:{hanging.sockets[0].getsockname()[1]},127.0.0.1:{port}/runs/0"
    async with hanging:
        with sentinel(settings, port):
            async with buffer_on(url, patience_s=0, timeout_s=0.3) as buffer:
                await buffer.state()
        over.set()
    assert len(asked) == 1


async def test_what_is_no_redis_is_said_in_one_line_at_once():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    web = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = web.sockets[0].getsockname()[1]
    try:
        async with buffer_on(f"redis://127.0.0.1:{port}/0", patience_s=1000) as buffer:
            with pytest.raises(BufferUnavailable, match=rf"^the server at .*:{port} is not a Redis .*fix redis.url$"):
                await buffer.state()
    finally:
        web.close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate for 127.0.0.1 and its key, in one file."""
    path, key = tmp_path / "server.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + key.read_bytes())
    return path


async def test_tls_is_spoken_and_an_unknown_authority_is_refused(server, certificate):
    """A proxy speaks TLS for the server, which may be built without it."""

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer), return_exceptions=True)

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    proxy = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = proxy.sockets[0].getsockname()[1]
    try:
        async with buffer_on(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}") as buffer:
            await start(buffer)
            assert (await buffer.state()).epoch == 1
        async with buffer_on(f"rediss://127.0.0.1:{port}/0", patience_s=0.2) as buffer:
            with pytest.raises(BufferUnavailable, match=r"(?i)certificate"):
                await buffer.state()
    finally:
        proxy.close()


async def test_a_user_whose_name_is_encoded_in_the_url_is_let_in(server):
    server.client.acl_setuser("team@lab", enabled=True, passwords=["+word"], keys=["*"], commands=["+@all"])
    connection = Connection(
        RedisConfig(url=f"redis://team%40lab@127.0.0.1:{server.port}/0"), 0, password=lambda: "word"
    )
    assert await connection.run(lambda: connection.client.execute_command("ACL WHOAMI")) == "team@lab"
    await connection.close()


async def test_a_database_that_is_not_there_is_one_line(server):
    connection = Connection(RedisConfig(url=f"redis://127.0.0.1:{server.port}/99"), patience_s=1000)
    with pytest.raises(BufferUnavailable, match=r"has no such database .*redis\.url redis://.*/99"):
        await connection.run(connection.client.ping)
    await connection.close()


async def test_a_cluster_is_refused_in_one_line(tmp_path):
    server = Server(tmp_path, "--cluster-enabled", "yes", "--appendonly", "no")
    try:
        for database in (0, 1):
            url = f"redis://127.0.0.1:{server.port}/{database}"
            connection = Connection(RedisConfig(url=url), patience_s=1000)
            buffer = RedisBuffer(connection, "r", make_limits())
            for command in (buffer.exists(), buffer.pause(True), buffer.recover(0)):
                with pytest.raises(BufferUnavailable, match="Redis Cluster is not supported"):
                    await command
            await connection.close()
    finally:
        server.kill()


class FailingClient:
    """Answers every command with the same error."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.asked = 0

    async def command(self) -> None:
        self.asked += 1
        raise self._error


@pytest.mark.parametrize(
    ("error", "is_retried", "named"),
    [
        (exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), True, "no memory left"),
        (exceptions.ReadOnlyError("You can't write against a read only replica."), True, "answers, and takes nothing"),
        (
            exceptions.ResponseError("MISCONF Errors writing to the AOF file: No space left on device"),
            True,
            "takes nothing.*No space",
        ),
        (exceptions.ResponseError("BUSY Redis is busy running a script"), True, "BUSY"),
        (exceptions.ResponseError("UNBLOCKED force unblock from blocking operation"), True, "UNBLOCKED"),
        (exceptions.ResponseError("DENIED Redis is running in protected mode"), False, "refuses the connection"),
        (exceptions.MovedError("1180 10.0.0.7:6379"), False, "Redis Cluster is not supported.*1180 10.0.0.7:6379"),
        (exceptions.AuthenticationError("WRONGPASS invalid username-password pair"), False, "refuses the connection"),
        (
            exceptions.NoPermissionError("this user has no permissions to run the 'evalsha' command"),
            False,
            "refuses the connection",
        ),
    ],
)
async def test_what_may_pass_is_waited_for_and_what_will_not_is_named_at_once(error, is_retried, named):
    """The messages of Redis 7; the tests above meet those of Redis 6."""
    connection, client = Connection(RedisConfig(), patience_s=0.35), FailingClient(error)
    with pytest.raises(BufferUnavailable, match=named):
        await connection.run(client.command)
    assert (client.asked > 1) == is_retried


@pytest.mark.parametrize(("failures", "is_answered"), [(2, True), (3, False)])
async def test_a_process_that_ends_asks_again_but_not_for_long(failures, is_answered):
    """One late answer cost a learner the checkpoint of the step that it had finished after SIGTERM."""
    stop, asked = asyncio.Event(), []
    stop.set()

    async def command() -> str:
        asked.append(None)
        if len(asked) <= failures:
            raise exceptions.TimeoutError("no answer")
        return "saved"

    connection = Connection(RedisConfig(), 1000, stop)
    if is_answered:
        assert await connection.run(command) == "saved"
    else:
        with pytest.raises(BufferUnavailable):
            await connection.run(command)
    assert len(asked) == 3


@pytest.mark.parametrize(
    "error", [exceptions.ResponseError("ERR wrong number of arguments"), RuntimeError("there is no running event loop")]
)
async def test_a_mistake_of_ours_is_not_taken_for_an_outage(error):
    client = FailingClient(error)
    with pytest.raises(type(error), match=str(error)):
        await Connection(RedisConfig(), patience_s=1000).run(client.command)
    assert client.asked == 1


def test_a_connection_that_uvloop_has_lost_before_it_was_used_is_an_outage():
    async def write_to_a_lost_one() -> None:
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1")
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.transport.abort()
        await asyncio.sleep(0)
        server.close()
        writer.writelines([b"PING"])

    with pytest.raises(BufferUnavailable, match=r"cannot be reached .*the handler is closed"):
        uvloop.run(Connection(RedisConfig(), patience_s=0.35).run(write_to_a_lost_one))
