"""Fixtures: a real Redis on a private port and folder."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from cusearch_async.lifecycle.children import start_child
from cusearch_async.transport.server import is_listening, server_command

SLOW = float(os.environ.get("CUSEARCH_SLOW", "3"))
"""Deadlines that wait for other processes are multiplied by this: they are meant for an idle machine, and hold on one
that is three times slower. CUSEARCH_SLOW=10 for one that is busier still."""

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
"""Before torch is loaded: where several test processes share the cores, threads that wait by spinning take 15 times as
long for small models as threads that sleep."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
"""What every worker and many tests start is compiled once, also where the environment says otherwise."""

_ports = itertools.count(97 * os.getpid())

SYSTEM_TESTS = "\npytestmark = pytest.mark.system"
MARKED = re.compile(r"mark\.(system|gpu)\b")

# A busy machine is no bug.
settings.register_profile("cusearch", deadline=None)
settings.register_profile("fast", deadline=None, max_examples=20)  # of `make test-fast`; `make test` takes all 100
settings.load_profile("cusearch")


def pytest_configure() -> None:
    gc.disable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that has no test of those asked for is not even imported."""
    asked = config.option.markexpr
    if not asked or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    if asked.startswith("not system"):
        return True if SYSTEM_TESTS in text else None
    is_test = collection_path.name.startswith("test_")
    wants_system = asked.startswith(("system or gpu", "(system or gpu)"))
    return True if is_test and wants_system and not MARKED.search(text) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first: at the end there are short ones for every core."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """What the tests have imported stays: the garbage collector need not look at it again and again, nor as often as it
    would by default at what they import later."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Libraries that a test loads into this process set variables, DeepSpeed WORLD_SIZE for one: they are not for the
    processes that the next test starts."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@contextlib.contextmanager
def serving(command: list[str], url: str, log_file: Path, inherited: Collection[int] = ()) -> Iterator[None]:
    """A server of our own at `url`; stopped at the end, however it comes."""
    server = start_child(command, log_file=log_file, inherited=inherited)
    try:
        wait_until(lambda: is_listening(url) or server.poll() is not None, timeout_s=20)
        assert server.poll() is None, log_file.read_text()
        yield
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    url = f"redis://127.0.0.1:{free_port()}/0"
    folder = tmp_path_factory.mktemp("redis")
    with serving(server_command(url, folder, None), url, folder / "redis.log"):
        yield url


def free_port() -> int:
    """A TCP port on loopback that stays free until the process that it is for takes it: below those that the system
    gives to whoever asks for any, and out of the part of this one of the processes that run tests side by side. In it
    each process begins elsewhere, for tests of another checkout."""
    first = 10_000 + 2_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = first + next(_ports) % 2_000
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def own_services() -> list[str]:
    """Settings of a run whose Redis and retriever no other run uses."""
    redis, retriever = f"redis://127.0.0.1:{free_port()}/0", f"http://127.0.0.1:{free_port()}"
    return ["--redis.url", redis, "--retriever.url", retriever]


def handles_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1)


def wait_until(is_true: Callable[[], bool], timeout_s: float) -> None:
    """Poll a condition until a deadline, times SLOW."""
    deadline = time.monotonic() + SLOW * timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


async def wait_until_async(is_true: Callable[[], object], timeout_s: float) -> None:
    deadline = time.monotonic() + SLOW * timeout_s
    while not await is_true():  # type: ignore[misc]
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.02)


@pytest.fixture
def atlas_config() -> Path:
    return Path(__file__).parent.parent / "configs" / "atlas.toml"
