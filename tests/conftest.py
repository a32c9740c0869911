"""Fixtures: a real Redis on a private port and folder, and a fresh buffer on it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from cusearch_async import host
from cusearch_async.transport.buffer import Buffer, Shape, connect
from cusearch_async.transport.server import is_listening, server_command

settings.register_profile("cusearch", deadline=None)  # a busy machine is no bug
settings.load_profile("cusearch")

_runs = itertools.count()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis server of our own; stopped when the tests end, however they end."""
    url = f"redis://127.0.0.1:{host.free_port()}/0"
    folder = tmp_path_factory.mktemp("redis")
    server = host.start_child(server_command(url, folder, None), log_file=folder / "redis.log")
    try:
        wait_until(lambda: is_listening(url), timeout_s=20)
        yield url
    finally:
        server.kill()
        server.wait()


@pytest.fixture
async def make_buffer(redis_url: str) -> AsyncIterator[Callable[..., Buffer]]:
    """Buffers of one fresh run: each call is another process's view of it."""
    run = f"test-{next(_runs)}"
    clients = []

    def make(**shape: object) -> Buffer:
        values = {"questions": 4, "rollouts": 2, "max_staleness": 1, "order": "ticket", "s_max": 5}
        values |= {"lease_s": 60.0, "limit": 1000}
        clients.append(connect(redis_url, None))
        return Buffer(clients[-1], run, Shape(**(values | shape)))

    yield make
    for client in clients:
        await client.aclose()


def wait_until(is_true: Callable[[], bool], timeout_s: float) -> None:
    """Poll a condition until a deadline."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


async def wait_until_async(is_true: Callable[[], object], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not await is_true():  # type: ignore[misc]
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.02)


@pytest.fixture
def atlas_config() -> Path:
    return Path(__file__).parent.parent / "configs" / "atlas.toml"
