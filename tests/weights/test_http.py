"""Weights over HTTP, without an engine: the learner's server, and the downloads of other machines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import load_file

from cusearch_async.config import Config, load_config, shipped_configs
from cusearch_async.errors import ConfigError, WeightsUnavailable, WriteFailed
from cusearch_async.weights import downloads as client
from cusearch_async.weights import http
from cusearch_async.weights.downloads import Downloads
from cusearch_async.weights.folder import WeightStore
from cusearch_async.weights.http import HttpTransport
from cusearch_async.weights.interface import ADAPTER_CONFIG, ADAPTER_TENSORS, MANIFEST, TENSORS, Canary, OpenedVersion
from tests.conftest import SLOW, free_port, handles_sigterm, wait_until

CANARY = Canary([1, 2], [-0.5], 0.1)
ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
SECONDS = 60 * SLOW


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of several types and sizes, one of several pieces."""
    random = torch.Generator().manual_seed(seed)
    return {
        "norm.weight": torch.randn(3, generator=random).to(torch.bfloat16),
        "layers.1.weight": torch.randn(1500, 2000, generator=random),
        "layers.0.weight": torch.randn(7, 5, generator=random).to(torch.bfloat16),
        "scale": torch.randn((), generator=random),
    }


class Site:
    """A learner's machine, and others, each with its own folder and the same token."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{free_port()}"
        self.learner = HttpTransport(self.config("learner"))
        self.store = self.learner.store()

    def config(self, host: str, wait_s: float = SECONDS) -> Config:
        options = ["--run.folder", str(self.folder / host), "--weights.transport", "http", "--weights.url", self.url]
        return load_config(shipped_configs()["atlas"], [*options, "--run.wait_s", str(wait_s)])

    def publish(self, version: int, epoch: int = 1) -> str:
        return self.store.publish(version, epoch, tensors(version), CANARY)

    @asynccontextmanager
    async def host(self, name: str = "worker", needs_last: bool = False) -> AsyncIterator[Downloads]:
        async with HttpTransport(self.config(name)).source(needs_last) as downloads:
            yield downloads

    def downloaded(self, name: str = "worker") -> set[str]:
        return {path.name for path in (self.folder / name / "downloaded").iterdir()} - {".lock"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("CUSEARCH_WEIGHTS_TOKEN", "of this test")
    return Site(tmp_path)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


def same(opened: OpenedVersion, published: dict[str, torch.Tensor]) -> bool:
    received = load_file(opened.directory / opened.manifest.file)
    return received.keys() == published.keys() and all(
        torch.equal(received[name], published[name]) for name in received
    )


async def test_every_version_comes_bit_for_bit_with_its_manifest(site):
    async with site.learner.serving(), site.host() as downloads:
        for version in range(3):
            name = site.publish(version)
            opened = await downloads.open(name)
            assert (opened.name, opened.manifest) == (name, site.store.verify(name))
            assert same(opened, tensors(version))
            assert opened.directory.is_relative_to(site.folder / "worker")


async def test_an_adapter_comes_with_the_config_that_vllm_reads(site):
    name = site.store.publish(1, 1, tensors(), CANARY, adapter=ADAPTER)

    async with site.learner.serving(), site.host() as downloads:
        opened = await downloads.open(name)
        assert same(opened, tensors())
        assert {path.name for path in opened.directory.iterdir()} == {ADAPTER_TENSORS, ADAPTER_CONFIG, MANIFEST}
        theirs = (site.store.directory(name) / ADAPTER_CONFIG).read_bytes()
        assert (opened.directory / ADAPTER_CONFIG).read_bytes() == theirs
        assert WeightStore(opened.directory.parent).verify(name) == opened.manifest


async def test_machines_download_at_once_each_another_version(site):
    names = [site.publish(version) for version in range(2)]

    async with site.learner.serving(), site.host("a") as one, site.host("b") as other:
        opened = await asyncio.gather(one.open(names[0]), other.open(names[1]))
        assert same(opened[0], tensors(0))
        assert same(opened[1], tensors(1))


async def test_processes_of_one_machine_download_a_version_once(site, monkeypatch):
    name, sent = site.publish(1), []
    prepare = http._Counted.prepare
    monkeypatch.setattr(
        http._Counted, "prepare", lambda own, request: sent.append(request.path) or prepare(own, request)
    )

    async with site.learner.serving(), site.host() as one, site.host() as other:
        opened = await asyncio.gather(one.open(name), other.open(name))
        assert opened[0] == opened[1]
    assert sorted(sent) == [f"/weights/{name}/{MANIFEST}"] * 2 + [f"/weights/{name}/{TENSORS}"]


async def test_the_versions_that_were_opened_last_stay(site):
    names = [site.publish(version) for version in range(3)]

    async with site.learner.serving(), site.host() as downloads:
        for name in [*names, names[0]]:
            await downloads.open(name)
        fourth = site.publish(3)
        await downloads.open(fourth)
        assert site.downloaded() == {names[0], names[2], fourth}


async def test_the_newest_name_of_a_version_is_the_latest_learners(site):
    names = [site.publish(1), site.publish(1, epoch=2)]

    async with site.learner.serving(), site.host() as downloads:
        assert await downloads.newest_of(1) == names[1]
        assert await downloads.newest_of(7) is None


@pytest.mark.parametrize("name", ["v000009-e1", "../../etc"])
async def test_a_version_that_is_not_there_is_refused_and_the_next_comes(name, site):
    there = site.publish(1)

    async with site.learner.serving(), site.host() as downloads:
        with pytest.raises(WeightsUnavailable, match=rf"{name}"):
            await downloads.open(name)
        assert same(await downloads.open(there), tensors(1))


@pytest.mark.parametrize("path", ["{name}/secret", "{name}/..%2Fsecret", "..%2F..%2Flearner/weights-token", "{name}"])
async def test_nothing_but_the_files_of_versions_can_be_downloaded(path, site):
    name = site.publish(1)
    (site.store.directory(name) / "secret").write_text("x")
    (site.store.folder / "secret").write_text("x")

    async with site.learner.serving(), aiohttp.ClientSession() as session:
        headers = {"Authorization": "Bearer of this test"}
        async with session.get(f"{site.url}/weights/{path.format(name=name)}", headers=headers) as response:
            assert response.status == 404


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer other"}, {"Authorization": "Bearer "}])
@pytest.mark.parametrize("path", ["", "/last?client=c", "/{name}/model.safetensors"])
async def test_without_the_token_nothing_is_said(headers, path, site):
    name = site.publish(1)

    url = f"{site.url}/weights{path.format(name=name)}"
    async with site.learner.serving(), aiohttp.request("GET", url, headers=headers) as response:
        assert response.status == 401
        assert await response.json() == {"error": "the bearer token is not that of this run"}


async def test_a_process_with_another_token_ends_with_what_to_do(site, monkeypatch):
    name = site.publish(1)

    async with site.learner.serving(), site.host() as downloads:
        monkeypatch.setenv("CUSEARCH_WEIGHTS_TOKEN", "another")
        with pytest.raises(ConfigError, match=r"refuses the token .*CUSEARCH_WEIGHTS_TOKEN .*weights-token"):
            await downloads.open(name)


async def test_without_a_token_in_the_environment_the_learner_makes_a_private_file(site, monkeypatch):
    monkeypatch.delenv("CUSEARCH_WEIGHTS_TOKEN")
    name, file = site.publish(1), site.folder / "learner" / "weights-token"

    tokens = set()
    for _ in range(2):
        async with site.learner.serving(), site.host() as downloads:
            tokens.add(file.read_text())
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            with pytest.raises(ConfigError, match="weights-token"):
                await downloads.open(name)
    assert len(tokens) == 1, "a learner that is started again has the same"
    shutil.copy(file, site.folder / "worker" / "weights-token")
    async with site.learner.serving(), site.host() as downloads:
        assert same(await downloads.open(name), tensors(1))


async def test_a_damaged_version_is_not_opened_and_leaves_nothing(site):
    name = site.publish(1)
    file = site.store.directory(name) / TENSORS
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)

    async with site.learner.serving(), site.host() as downloads:
        with pytest.raises(WeightsUnavailable, match=r"tensor norm.weight does not match its checksum"):
            await downloads.open(name)
        assert site.downloaded() == set()


async def test_a_full_disk_keeps_its_name_and_leaves_nothing(site):
    name = site.publish(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    async with site.learner.serving(), site.host() as downloads:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            with pytest.raises(WriteFailed, match=rf"cannot write .*{TENSORS}: File too large"):
                await downloads.open(name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert site.downloaded() == set()
        assert same(await downloads.open(name), tensors(1))


async def test_of_a_disk_that_can_no_longer_be_written_the_copy_that_is_there_serves(site, monkeypatch):
    """A worker that began again ended with a traceback, then it waited: the manifest was written to be compared."""
    name, later = site.publish(1), site.store.publish(2, 1, tensors(2), CANARY)
    async with site.learner.serving(), site.host() as downloads:
        await downloads.open(name)
    opened = Path.open

    def read_only(path, mode="r", *more, **others):
        if ("w" in mode and path.name == MANIFEST) or ("a" in mode and path.name == ".lock"):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, mode, *more, **others)

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "open", read_only)
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)  # NFS locks no file that was opened to be read
    async with site.learner.serving(), site.host() as again:
        assert same(await again.open(name), tensors(1))
        with pytest.raises(WriteFailed, match=r"^cannot write .*manifest.json: Read-only file system$"):
            await again.open(later)


async def test_what_a_killed_process_left_is_removed_by_the_next_download(site):
    name = site.publish(1)
    left = site.folder / "worker" / "downloaded" / ".unfinished-v000000-e1"
    left.mkdir(parents=True)

    async with site.learner.serving(), site.host() as downloads:
        await downloads.open(name)
        assert site.downloaded() == {name}


@asynccontextmanager
async def cutting(port_of: str, after: list[int]) -> AsyncIterator[tuple[str, list[int]]]:
    """A relay to the address `port_of`, whose connections break after so many bytes of answers each, later ones not at
    all; its address, and what each connection has passed on."""
    host, port = port_of.removeprefix("http://").split(":")
    passed: list[int] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                writer.write(piece)
                await writer.drain()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, limit = len(passed), after[len(passed)] if len(passed) < len(after) else None
        passed.append(0)
        theirs, ours = await asyncio.open_connection(host, int(port))
        asking = asyncio.ensure_future(copy(reader, ours))
        with contextlib.suppress(ConnectionError):
            while (limit is None or passed[number] < limit) and (piece := await theirs.read(1 << 16)):
                passed[number] += len(piece)
                writer.write(piece)
                await writer.drain()
        asking.cancel()
        writer.transport.abort()
        ours.close()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", passed


async def test_a_lost_connection_is_taken_up_at_the_byte_that_was_next(site, monkeypatch):
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    name = site.publish(1)
    size = (site.store.directory(name) / TENSORS).stat().st_size
    assert size > 2 * client.PIECE_BYTES

    async with site.learner.serving(), cutting(site.url, [5 << 20, 3 << 20]) as (url, passed):
        config = site.config("worker")
        behind = config.model_copy(update={"weights": config.weights.model_copy(update={"url": url})})
        async with HttpTransport(behind).source() as downloads:
            assert same(await downloads.open(name), tensors(1))
        assert len(passed) == 3
        assert sum(passed) < size + (8 << 20), "what came was kept, but for what was lost on the way"


async def test_a_connection_that_never_gets_further_is_given_up(site, monkeypatch):
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    name = site.publish(1)

    async with site.learner.serving(), cutting(site.url, [5 << 20, *[0] * 50]) as (url, _):
        config = site.config("worker")
        behind = config.model_copy(update={"weights": config.weights.model_copy(update={"url": url})})
        async with HttpTransport(behind).source() as downloads:
            with pytest.raises(WeightsUnavailable, match=r"the learner does not answer at weights.url"):
                await downloads.open(name)
        assert site.downloaded() == set()


async def test_what_is_being_downloaded_comes_whole_also_when_it_is_deleted(site, monkeypatch):
    name, keep = site.publish(1), client.keep

    def deleting(*args):
        shutil.rmtree(site.store.directory(name), ignore_errors=True)
        keep(*args)

    async with site.learner.serving(), site.host() as downloads:
        fetch = downloads.fetch

        async def fetch_and_delete(name, file, target, *args):
            monkeypatch.setattr(client, "keep", deleting if target.name == TENSORS else keep)
            await fetch(name, file, target, *args)

        monkeypatch.setattr(downloads, "fetch", fetch_and_delete)
        assert same(await downloads.open(name), tensors(1))
        assert not site.store.directory(name).exists()


async def test_a_learner_that_is_gone_is_named_and_the_next_is_found(site):
    name = site.publish(1)

    async with site.host() as downloads:
        for _ in range(2):
            with pytest.raises(WeightsUnavailable, match=f"the learner does not answer at weights.url {site.url}"):
                await downloads.newest_of(1)
            async with site.learner.serving():
                assert await downloads.newest_of(1) == name


async def test_a_learner_waits_for_the_port_of_the_one_before(site, monkeypatch):
    monkeypatch.setattr(client, "RETRY_S", 0.01)

    with socket.create_server(("127.0.0.1", int(site.url.rpartition(":")[2]))) as taken:
        with pytest.raises(ConfigError, match=r"weights.url: this process cannot listen at 127.0.0.1, port \d+ \("):
            async with HttpTransport(site.config("learner", wait_s=0.1)).serving():
                pass
        asyncio.get_running_loop().call_later(0.2, taken.close)
        async with HttpTransport(site.config("learner")).serving():
            pass


async def test_an_address_of_another_machine_is_refused_at_once(site):
    site.url = "http://192.0.2.1:29400"

    with pytest.raises(ConfigError, match=r"weights.url: this process cannot listen at 192.0.2.1, port 29400 \("):
        async with HttpTransport(site.config("learner")).serving():
            pass


async def test_a_download_that_is_cancelled_lets_another_begin(site):
    name = site.publish(1)

    async with site.learner.serving(), site.host() as downloads:
        cancelled = asyncio.ensure_future(downloads.open(name))
        await until(lambda: any((site.folder / "worker").rglob(MANIFEST)))
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert same(await downloads.open(name), tensors(1))
    assert site.downloaded() == {name}


async def test_a_copy_that_a_crash_of_the_machine_has_emptied_is_no_base(site):
    """The next version comes whole. Before: a traceback, at every attempt, and from a relay 500."""
    async with site.learner.serving(), site.host() as downloads:
        before = await downloads.open(site.publish(1))
        (before.directory / before.manifest.file).write_bytes(b"")
        assert same(await downloads.open(site.publish(2)), tensors(2))


async def test_only_others_reach_the_learner_by_https(site):
    site.url = "https://127.0.0.1:29400"
    with pytest.raises(ConfigError, match="only others may reach it by https, through a proxy"):
        async with HttpTransport(site.config("learner")).serving():
            pass


WAITS = """
import asyncio, os, signal, sys
from cusearch_async.lifecycle.signals import stop_on_signals
from cusearch_async.weights.http import Server, listening
async def wait():
    stop_on_signals()
    if sys.argv[2] == "before":
        os.kill(os.getpid(), signal.SIGTERM)
    async with listening(Server(None, ""), sys.argv[1], 1000):
        pass
print("begins", flush=True)
asyncio.run(wait())
"""


@pytest.mark.parametrize("told", ["before", "while it waits"])
def test_who_waits_for_a_port_ends_when_told_to(told):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with subprocess.Popen([sys.executable, "-c", WAITS, url, told], stdout=subprocess.PIPE) as waiting:
            try:
                assert waiting.stdout.readline() == b"begins\n"
                if told != "before":
                    wait_until(lambda: handles_sigterm(waiting.pid), 20)
                    waiting.terminate()
                assert waiting.wait(20 * SLOW) == 128 + signal.SIGTERM
            finally:
                waiting.kill()
