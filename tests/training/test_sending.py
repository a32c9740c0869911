"""Weights from the learner to an engine's ranks, without an engine: the sender, the connection and the gloo group."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import torch

from cusearch_async.errors import ConfigError, WeightsUnavailable
from cusearch_async.training import sending as sending_module
from cusearch_async.training.sending import sending
from cusearch_async.transport.gloo import GlooGroup
from cusearch_async.transport.tensor_file import dtype_of
from cusearch_async.transport.weight_link import PATH, SentVersion, WeightLink
from cusearch_async.transport.weights import Canary, WeightStore
from tests.conftest import SLOW, free_port

CANARY = Canary([1, 2], [-0.5], 0.1)


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of several types and sizes, some larger than a socket's buffers."""
    random = torch.Generator().manual_seed(seed)
    return {
        "norm.weight": torch.randn(3, generator=random).to(torch.bfloat16),
        "layers.1.weight": torch.randn(1500, 800, generator=random),
        "layers.0.weight": torch.randn(7, 5, generator=random).to(torch.bfloat16),
        "scale": torch.randn((), generator=random),
    }


class Ranks:
    """An engine's ranks, as far as the group is concerned: each receives in a thread."""

    def __init__(self, link: WeightLink, count: int) -> None:
        self.link, self.count = link, count
        self.groups: list[GlooGroup] = []

    async def join(self) -> None:
        port = await self.link.join("gloo", self.count)
        joining = [asyncio.to_thread(GlooGroup, "127.0.0.1", port, 1 + r, 1 + self.count) for r in range(self.count)]
        self.groups = await asyncio.gather(*joining)

    async def receive(self, version: SentVersion) -> list[dict[str, torch.Tensor]]:
        """What each rank got."""
        sending = asyncio.ensure_future(version.link.send())
        received = await asyncio.gather(*[asyncio.to_thread(self._receive, group, version) for group in self.groups])
        await sending
        return received

    def _receive(self, group: GlooGroup, version: SentVersion) -> dict[str, torch.Tensor]:
        records = version.manifest.tensors
        into = {name: torch.empty(record.shape, dtype=dtype_of(record)) for name, record in records.items()}
        for tensor in into.values():
            group.broadcast(tensor)
        return into

    def destroy(self) -> None:
        for group in self.groups:
            group.destroy()
        self.groups.clear()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of these tests leave with what they have not asked for."""
    monkeypatch.setattr(sending_module, "OWED_S", 5.0)


@asynccontextmanager
async def linked(store: WeightStore, ranks: int = 1) -> AsyncIterator[tuple[WeightLink, Ranks]]:
    url = f"http://127.0.0.1:{free_port()}"
    async with sending(store, url, 5 * SLOW):
        link = WeightLink(url)
        worker = Ranks(link, ranks)
        try:
            yield link, worker
        finally:
            await link.close()
            worker.destroy()


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60 * SLOW):
            await body()

    asyncio.run(within())


def same(received: dict[str, torch.Tensor], published: dict[str, torch.Tensor]) -> bool:
    return received.keys() == published.keys() and all(
        torch.equal(received[name], published[name]) for name in received
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_of_an_engine_get_every_version_bit_for_bit(ranks, tmp_path):
    store = WeightStore(tmp_path)

    async def body() -> None:
        async with linked(store, ranks) as (link, worker):
            for version in range(3):
                name = store.publish(version, 1, tensors(version), CANARY)
                opened = await link.open(name)
                assert (opened.name, opened.manifest) == (name, store.verify(name))
                if not version:
                    await worker.join()
                got = await worker.receive(opened)
                assert len(got) == ranks
                assert all(same(one, tensors(version)) for one in got)

    run(body)


def test_two_workers_receive_at_once_each_another_version(tmp_path):
    store = WeightStore(tmp_path)
    names = [store.publish(version, 1, tensors(version), CANARY) for version in range(2)]

    async def body() -> None:
        async with linked(store) as (link, worker):
            other_link = WeightLink(link.url)
            other = Ranks(other_link, 1)
            opened = [await link.open(names[0]), await other_link.open(names[1])]
            await asyncio.gather(worker.join(), other.join())
            got = await asyncio.gather(worker.receive(opened[0]), other.receive(opened[1]))
            assert same(got[0][0], tensors(0))
            assert same(got[1][0], tensors(1))
            await other_link.close()

    run(body)


@pytest.mark.parametrize("name", ["v000009-e1", "../../etc"])
def test_a_version_that_is_not_there_is_refused_and_the_next_is_sent(name, tmp_path):
    store = WeightStore(tmp_path)
    there = store.publish(1, 1, tensors(), CANARY)

    async def body() -> None:
        async with linked(store) as (link, worker):
            with pytest.raises(WeightsUnavailable, match=rf"the learner at {link.url} says: .*{name}"):
                await link.open(name)
            opened = await link.open(there)
            await worker.join()
            assert same((await worker.receive(opened))[0], tensors())

    run(body)


def test_a_damaged_version_is_not_sent(tmp_path):
    store = WeightStore(tmp_path)
    name = store.publish(1, 1, tensors(), CANARY)
    file = store.directory(name) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)

    async def body() -> None:
        async with linked(store) as (link, _):
            with pytest.raises(WeightsUnavailable, match="does not match its checksum"):
                await link.open(name)

    run(body)


def test_a_version_is_verified_once_for_all_workers(tmp_path, monkeypatch):
    store = WeightStore(tmp_path)
    names = [store.publish(version, 1, tensors(version), CANARY) for version in range(2)]
    verify, verified = WeightStore.verify, []
    monkeypatch.setattr(WeightStore, "verify", lambda own, name: verified.append(name) or verify(own, name))

    async def body() -> None:
        async with linked(store) as (link, _):
            links = [link, *(WeightLink(link.url) for _ in range(3))]
            for name in names:
                await asyncio.gather(*(one.open(name) for one in links))
            with pytest.raises(WeightsUnavailable):
                await link.open("v000009-e1")
            store.publish(9, 1, tensors(), CANARY)
            assert (await link.open("v000009-e1")).manifest.version == 9, "what failed is tried again"
            await asyncio.gather(*(one.close() for one in links))

    run(body)
    assert verified == [*names, "v000009-e1", "v000009-e1"]


def test_what_is_open_is_sent_whole_also_when_it_is_deleted(tmp_path):
    store = WeightStore(tmp_path)
    name = store.publish(1, 1, tensors(), CANARY)

    async def body() -> None:
        async with linked(store) as (link, worker):
            opened = await link.open(name)
            shutil.rmtree(store.directory(name))
            await worker.join()
            assert same((await worker.receive(opened))[0], tensors())

    run(body)


def test_a_worker_that_dies_while_it_receives_holds_up_nobody(tmp_path, monkeypatch):
    """Its group and its thread end; another worker gets the version at the same time."""
    store = WeightStore(tmp_path)
    name = store.publish(1, 1, tensors(), CANARY)
    broadcast, blocked = GlooGroup.broadcast, threading.Event()

    def noting(group: GlooGroup, tensor: torch.Tensor) -> None:
        if group._group.rank() == 0 and threading.current_thread().name.startswith("sending"):
            blocked.set()
        broadcast(group, tensor)

    def senders() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("sending")]

    async def body() -> None:
        async with linked(store) as (link, worker), linked(store) as (other_link, other):
            opened, also = await link.open(name), await other_link.open(name)
            await asyncio.gather(worker.join(), other.join())
            monkeypatch.setattr(GlooGroup, "broadcast", noting)
            sending = asyncio.ensure_future(link.send())
            assert await asyncio.to_thread(blocked.wait, 10 * SLOW), "the learner sends, and nobody receives"
            before = len(senders())
            worker.destroy()
            await link.close()
            await asyncio.wait([sending])
            assert isinstance(sending.exception(), WeightsUnavailable)
            assert same((await other.receive(also))[0], tensors())
            while len(senders()) > before - 1:
                await asyncio.sleep(0.01)
            again, successor = await link.open(name), Ranks(link, 1)
            await successor.join()
            assert same((await successor.receive(again))[0], tensors())
            assert opened.manifest == again.manifest

    run(body)


def test_a_learner_at_its_end_sends_what_a_worker_has_opened(tmp_path):
    store, url = WeightStore(tmp_path), f"http://127.0.0.1:{free_port()}"
    name = store.publish(1, 1, tensors(), CANARY)
    link = WeightLink(url)
    worker, ended = Ranks(link, 1), asyncio.Event()

    async def learner() -> None:
        async with sending(store, url, 5 * SLOW):
            await ended.wait()

    async def body() -> None:
        leading = asyncio.ensure_future(learner())
        while True:
            try:
                opened = await link.open(name)
                break
            except WeightsUnavailable:
                await asyncio.sleep(0.01)
        await worker.join()
        ended.set()
        done, _ = await asyncio.wait([leading], timeout=0.1 * SLOW)
        assert not done, "it stays"
        assert same((await worker.receive(opened))[0], tensors())
        await leading
        with pytest.raises(WeightsUnavailable):
            await link.open(name)
        await link.close()

    run(body)


def test_a_learner_that_is_gone_is_named_and_the_next_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sending_module, "OWED_S", 0.0)
    store = WeightStore(tmp_path)
    name = store.publish(1, 1, tensors(), CANARY)
    url = f"http://127.0.0.1:{free_port()}"

    async def body() -> None:
        link = WeightLink(url)
        with pytest.raises(WeightsUnavailable, match=rf"the learner does not answer at weights.url {url}"):
            await link.open(name)
        async with sending(store, url, 5 * SLOW):
            await link.open(name)
        with pytest.raises(WeightsUnavailable, match=url):
            await link.open(name)
        async with sending(store, url, 5 * SLOW):
            assert (await link.open(name)).manifest == store.verify(name)
        await link.close()

    run(body)


def test_a_learner_waits_for_the_port_of_the_one_before(tmp_path, caplog):
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(ConfigError, match=r"weights.url: the learner cannot listen at 127.0.0.1, port \d+ \("):
                async with sending(WeightStore(tmp_path), url, 0.1):
                    pass
            asyncio.get_running_loop().call_later(0.2, taken.close)
            async with sending(WeightStore(tmp_path), url, 10 * SLOW):
                pass

    run(body)


def test_an_address_of_another_machine_is_refused_at_once(tmp_path):
    async def body() -> None:
        with pytest.raises(ConfigError, match=r"weights.url: the learner cannot listen at 192.0.2.1, port 29400 \("):
            async with sending(WeightStore(tmp_path), "http://192.0.2.1:29400", 600):
                pass

    run(body)


STRANGE = [b"{", b'{"type": "Reboot"}', b'{"type": "Send"}', b'{"type": "Join", "backend": "gloo", "ranks": 0}', "text"]


@pytest.mark.parametrize("said", STRANGE)
def test_what_is_no_request_ends_that_connection_only(said, tmp_path, caplog):
    store = WeightStore(tmp_path)
    name = store.publish(1, 1, tensors(), CANARY)

    async def body() -> None:
        async with linked(store) as (link, _), aiohttp.ClientSession() as session:
            async with session.ws_connect(link.url + PATH) as strange:
                await (strange.send_str(said) if isinstance(said, str) else strange.send_bytes(said))
                assert (await strange.receive()).type in {aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED}
            assert (await link.open(name)).name == name

    with caplog.at_level(logging.WARNING):
        run(body)
    assert isinstance(said, str) or "sending weights to 127.0.0.1 ended: " in caplog.text


def test_without_a_url_nothing_listens(tmp_path: Path):
    async def body() -> None:
        async with sending(WeightStore(tmp_path), None, 0):
            pass

    run(body)


def test_nccl_is_refused_by_a_learner_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sending_module, "OWED_S", 0.0)
    store = WeightStore(tmp_path)
    name = store.publish(1, 1, tensors(), CANARY)

    async def body() -> None:
        async with linked(store) as (link, _):
            await link.open(name)
            with pytest.raises(WeightsUnavailable, match="says: it has no GPU, and NCCL sends from GPU to GPU"):
                await link.join("nccl", 1)

    run(body)
