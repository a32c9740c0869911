"""Users for worker, learner and operator on a real Redis: what each may do, and what it may not."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from cusearch_async.cli import main
from cusearch_async.config import Config, RedisConfig, load_config
from cusearch_async.errors import BufferUnavailable
from cusearch_async.lifecycle.children import start_child
from cusearch_async.transport.buffer import RedisBuffer
from cusearch_async.transport.connection import Connection
from cusearch_async.transport.interface import Filter, WorkerStatus
from cusearch_async.transport.keys import Keys
from cusearch_async.transport.roles import ROLES, SCRIPTS_OF_WORKERS, WRITTEN_BY_WORKERS, acl_file, rules
from cusearch_async.transport.scripts import script
from cusearch_async.transport.server import find_redis_server, is_listening, redis_version
from tests.conftest import SLOW, free_port, wait_until
from tests.strategies import make_trajectory
from tests.transport.conftest import make_limits

PASSWORDS = {role: f"{role}-word" for role in ROLES}
HAS_ROLES = redis_version(find_redis_server()) >= (7,)
needs_roles = pytest.mark.skipif(not HAS_ROLES, reason="Redis 7 is not installed: apt-get install redis-server")
G = 2


@dataclass
class Server:
    """A Redis with the users of run `r`."""

    folder: Path

    def __post_init__(self) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        users = self.folder / "users.acl"
        users.write_text(acl_file("r", PASSWORDS))
        command = [str(find_redis_server()), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self.process = start_child([*command, "--aclfile", str(users)], log_file=self.folder / "log")
        wait_until(lambda: is_listening(self.url) or self.process.poll() is not None, 20)

    def client(self, role: str) -> Any:
        return redis.Redis(port=self.port, username=f"r-{role}", password=PASSWORDS[role])

    @asynccontextmanager
    async def buffer(self, role: str, run: str = "r") -> AsyncIterator[RedisBuffer]:
        settings = RedisConfig(url=f"redis://r-{role}@127.0.0.1:{self.port}/0")
        connection = Connection(settings, 0, password=lambda: PASSWORDS[role])
        try:
            yield RedisBuffer(connection, run, make_limits(questions=2, rollouts=G))
        finally:
            await connection.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.process.kill()
    server.process.wait()


def test_a_key_that_the_scripts_of_workers_use_is_theirs_to_write_or_known_as_another_s():
    """Also where Redis is too old to try it."""
    used = {name for part in SCRIPTS_OF_WORKERS for name in re.findall(r"key\('([\w-]+)", script(part))}
    others = {"limits", "contract", "sizes", "memory", "reserved"}
    assert used - {name.partition(":")[0] for name in WRITTEN_BY_WORKERS} == others


def test_a_worker_is_granted_no_more_than_what_its_code_needs():
    """Also where Redis is too old to try it."""
    words = rules("worker", "r").replace("(", " ").replace(")", " ").split()
    prefix = Keys("r").prefix
    patterns = {word.removeprefix(f"~{prefix}") for word in words if word.startswith("~")}
    assert patterns == {*WRITTEN_BY_WORKERS, Keys("r").state.removeprefix(prefix)}
    assert [word for word in words if word.startswith("%")] == [f"%R~{prefix}*"]
    own = {sha1(script(name).encode()).hexdigest() for name in SCRIPTS_OF_WORKERS}
    assert {word.partition("|")[2] for word in words if word.startswith("+evalsha|")} == own
    assert "+zmscore" in words, "who reads the queues of a step whose tickets are kept"
    assert not {"+@all", "+evalsha", "+eval", "+@write", "+@scripting", "allkeys", "allcommands"} & {*words}


@pytest.mark.skipif(HAS_ROLES, reason="of Redis 6")
def test_redis_6_refuses_the_rules_instead_of_granting_something_else(server):
    assert server.process.wait(20 * SLOW) != 0  # it may listen for a moment before
    assert "ACL" in (server.folder / "log").read_text()


@needs_roles
async def test_a_run_goes_from_start_to_checkpoint_with_a_user_for_each_role(server):
    async with server.buffer("worker") as worker, server.buffer("learner") as learner:
        await learner.recover(0)
        await learner.announce(0, "v000000-e1")
        for step in range(3):
            slots = await worker.admit("w", step, 2 * G)
            assert len(slots) == 2 * G
            await worker.heartbeat("w", [slot.ticket for slot in slots], WorkerStatus(version=step))
            await worker.release("w", [slots[0].ticket], failed=True)
            await worker.release("w", [slots[-1].ticket], failed=False)
            for slot in await worker.admit("w", step, 2 * G):
                made = make_trajectory(slot.ticket, slot.rollout, sampled=3, versions=np.full(3, step, np.int32))
                assert await worker.put(made) == "stored"
            pool = await learner.claim(step)
            assert pool is not None
            await learner.commit(pool, pool.trajectories[:1])
            await learner.announce(step + 1, f"v{step + 1:06d}-e1")
        await worker.identity()
        await worker.queues(3)
        server.client("learner").hset(learner.keys.reserved, "3", "6,7")
        await worker.queues(3)
        assert await worker.learner() is None
        assert list(await worker.workers()) == ["w"]
        assert await worker.wait_for_news(0.01)
        await learner.checkpoint(2)
        await worker.leave("w", [])
        async with server.buffer("learner") as next_life:
            await next_life.recover(2)
        assert (await worker.ledger()).closes
        assert (await worker.state()).step == 2


@needs_roles
async def test_an_operator_looks_in_pauses_quarantines_reopens_and_resets(server):
    async with server.buffer("worker") as worker, server.buffer("learner") as learner, server.buffer("operator") as me:
        await learner.recover(0)
        await learner.announce(0, "v000000-e1")
        slots = await worker.admit("w", 0, 2 * G)
        await worker.put(make_trajectory(slots[0].ticket, slots[0].rollout))
        assert sum(await me.capacities()) == 1
        assert (await me.audit()).closes
        assert [row.id async for row in me.rows(Filter())] == [f"{slots[0].ticket}:{slots[0].rollout}"]
        assert await me.fetch(f"{slots[0].ticket}:{slots[0].rollout}") is not None
        assert await me.runs() == ["r"]
        assert await me.quarantine(f"{slots[0].ticket}:{slots[0].rollout}", "odd")
        assert await me.reopen(slots[-1].ticket)
        await me.pause(True)
        assert (await worker.state()).paused
        assert await worker.admit("w", 0, 2 * G) == []
        await me.pause(False)
        assert len(server.client("operator").client_list()) >= 3
        assert await me.reset() > 0
        assert (await worker.state()).epoch == 0


ATTACKS: dict[str, Callable[[RedisBuffer], Any]] = {
    "take over": lambda b: b.recover(10**6),
    "announce": lambda b: b.announce(7, "../../anything"),
    "checkpoint": lambda b: b.checkpoint(1),
    "claim": lambda b: b.claim(0),
    "quarantine": lambda b: b.quarantine("0:0", "spite"),
    "pause": lambda b: b.pause(True),
    "reset": lambda b: b.reset(),
}


@needs_roles
@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_worker_is_refused_what_is_not_a_workers(server, attack):
    async with server.buffer("worker") as worker, server.buffer("learner") as learner:
        await learner.recover(0)
        await learner.announce(0, "v000000-e1")
        for slot in await worker.admit("w", 0, 2 * G):
            await worker.put(make_trajectory(slot.ticket, slot.rollout))
        before = await learner.state(), await learner.ledger(), await learner.capacities()
        worker.epoch = learner.epoch  # it can read that much
        with pytest.raises(BufferUnavailable, match="refuses the connection"):
            await ATTACKS[attack](worker)
        assert (await learner.state(), await learner.ledger(), await learner.capacities()) == before
        assert await learner.claim(0) is not None


@needs_roles
@pytest.mark.parametrize(
    "command",
    [
        "HSET cusearch:{r}:state epoch 99",
        "DEL cusearch:{r}:state",
        "RENAME cusearch:{r}:state cusearch:{r}:depth_by_version",
        "RENAME cusearch:{r}:pool:0 cusearch:{r}:depth_by_version",
        "COPY cusearch:{r}:depth_by_version cusearch:{r}:state",
        "RPUSH cusearch:{r}:pool:0 9:9",
        "HSET cusearch:{r}:sizes 0 9",
        "UNLINK cusearch:{r}:traj:0:0",
        "GETDEL cusearch:{r}:payload:0:0",
        "EVAL redis.call('HSET',KEYS[1],'epoch',99) 1 cusearch:{r}:state",
        "FUNCTION FLUSH",
        "FLUSHALL",
        "CONFIG SET dir /",
        "ACL SETUSER r-worker +@all",
        "HGETALL cusearch:{other}:state",
        "SCAN 0",
        "RANDOMKEY",
        "DBSIZE",
        "LCS cusearch:{r}:payload:0:0 cusearch:{r}:payload:0:1",
        "SETRANGE cusearch:{r}:payload:0:0 500000000 x",
        "INFO",
        "PUBLISH channel x",
    ],
)
def test_a_worker_is_refused_raw_commands_too(server, command):
    with pytest.raises(redis.exceptions.ResponseError, match=r"no permissions|can't"):
        server.client("worker").execute_command(*command.split(" "))


OF_THE_SERVER = (
    "CONFIG GET masterauth",
    "CONFIG SET dir /",
    "CONFIG REWRITE",
    "EVAL return 0",
    "EVAL_RO return 0",
    "EVALSHA_RO 0000000000000000000000000000000000000000 0",
    "FCALL f 0",
    "FCALL_RO f 0",
    "FUNCTION LOAD x",
    "FUNCTION FLUSH",
    "FUNCTION KILL",
    "FUNCTION RESTORE x",
    "SCRIPT FLUSH",
    "SCRIPT KILL",
    "SCRIPT DEBUG YES",
    "ACL LIST",
    "CLIENT KILL TYPE normal",
    "CLIENT PAUSE 1000",
    "FLUSHDB",
    "KEYS *",
    "MODULE LIST",
    "MONITOR",
    "PSYNC ? -1",
    "REPLICAOF NO ONE",
    "SHUTDOWN",
)


@needs_roles
@pytest.mark.parametrize("role", ROLES)
def test_nobody_reaches_the_server_or_runs_scripts_that_are_not_ours(server, role):
    client = server.client(role)
    for command in OF_THE_SERVER:
        with pytest.raises(redis.exceptions.ResponseError, match="no permissions"):
            client.execute_command(*command.split(" "))


@needs_roles
@pytest.mark.parametrize("role", ROLES)
def test_nobody_runs_a_script_that_he_has_loaded_himself(server, role):
    client = server.client(role)
    script = client.script_load("return redis.call('HGET', KEYS[1], 'epoch')")
    with pytest.raises(redis.exceptions.NoPermissionError, match="evalsha"):
        client.evalsha(script, 1, "cusearch:{r}:state")


@needs_roles
@pytest.mark.parametrize("role", ROLES)
async def test_nobody_reaches_another_run_and_strangers_reach_none(server, role):
    async with server.buffer(role, run="other") as buffer:
        with pytest.raises(BufferUnavailable, match="refuses the connection"):
            await buffer.state()
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=server.port).ping()


def test_the_users_are_printed_with_a_new_password_each(atlas_config, monkeypatch, capsys):
    def printed() -> list[str]:
        monkeypatch.setattr(sys, "argv", ["cusearch", "redis", str(atlas_config), "--acl"])
        main.main()
        return capsys.readouterr().out.splitlines()

    config: Config = load_config(atlas_config)
    first, second = printed(), printed()
    assert first[0] == "user default off"
    assert [line.split()[1] for line in first[1:]] == [f"{config.run.name}-{role}" for role in ROLES]
    words = {line.split()[3] for line in first[1:] + second[1:]}
    assert len(words) == 2 * len(ROLES)
    assert all(len(word) > 20 for word in words)
