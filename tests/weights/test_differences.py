"""Weights over HTTP as what has changed since the version that a machine has: fewer bytes, and the same bits."""

from __future__ import annotations

import asyncio
import io
import random
import threading

import pytest
import torch
import zstandard

from cusearch_async.errors import WriteFailed
from cusearch_async.files import remove
from cusearch_async.weights import difference, http
from cusearch_async.weights import downloads as client
from cusearch_async.weights.difference import restore, write_difference
from cusearch_async.weights.interface import MANIFEST, TENSORS
from cusearch_async.weights.tensor_file import ArrivingTensors, BadTensorFile, records_of, write_tensors
from tests.weights.test_http import ADAPTER, CANARY, SECONDS, Site, cutting, same, site, tensors

__all__ = ["site"]

SIZE = 1_000_000


def learned(steps: int, lr: float = 1e-6) -> dict[str, torch.Tensor]:
    """bfloat16 weights after so many updates of float32 ones."""
    noise = torch.Generator().manual_seed(0)
    weights = 0.02 * torch.randn(SIZE, generator=noise)
    for _ in range(steps):
        weights += lr * torch.randn(SIZE, generator=noise).sign()
    return {"layer.weight": weights.to(torch.bfloat16), "untouched": torch.ones(1000)}


@pytest.fixture
def sent(monkeypatch) -> list[tuple[str, int]]:
    """Path and bytes of every answer of the learner with a file."""
    found: list[tuple[str, int]] = []
    prepare = http._Counted.prepare

    async def counting(own, request):
        writer = await prepare(own, request)
        found.append((request.path.removeprefix("/weights/"), own.content_length or 0))
        return writer

    monkeypatch.setattr(http._Counted, "prepare", counting)
    return found


def publish(site: Site, version: int, weights: dict[str, torch.Tensor]) -> str:
    return site.store.publish(version, 1, weights, CANARY)


async def test_at_a_small_learning_rate_a_step_takes_a_twentieth_of_the_bytes(site, sent):
    async with site.learner.serving(), site.host() as downloads:
        for version in range(3):
            name = publish(site, version, learned(version))
            opened = await downloads.open(name)
            assert same(opened, learned(version))
            assert {path.name for path in opened.directory.iterdir()} == {TENSORS, MANIFEST}
    files = [(path, size) for path, size in sent if MANIFEST not in path]
    assert [path.partition("/from/")[2] for path, _ in files] == ["", "v000000-e1", "v000001-e1"]
    whole, *rest = (size for _, size in files)
    assert whole > 2 * SIZE > 0
    assert max(rest) < 0.05 * whole


async def test_a_machine_that_has_missed_too_much_takes_the_whole_file(site, sent):
    async with site.learner.serving(), site.host() as downloads:
        await downloads.open(publish(site, 0, learned(0)))
        names = [publish(site, version, learned(version)) for version in range(1, 5)]
        assert same(await downloads.open(names[-1]), learned(4))
    assert (f"{names[-1]}/{TENSORS}", sent[0][1]) not in sent[:-1]
    assert sent[-1][0] == f"{names[-1]}/{TENSORS}", "version 0 is no longer kept"


async def test_where_everything_has_changed_the_whole_file_is_sent_and_no_other_kept(site, sent):
    async with site.learner.serving(), site.host() as downloads:
        await downloads.open(site.publish(0))
        name = site.publish(1)
        assert same(await downloads.open(name), tensors(1))
        assert sent[-1][0] == f"{name}/{TENSORS}"
        assert {path.name for path in site.store.directory(name).iterdir()} == {TENSORS, MANIFEST}


async def test_an_adapter_of_another_rank_is_taken_whole(site, sent):
    def adapter(rank: int) -> dict[str, torch.Tensor]:
        return {"lora_A": torch.ones(rank, 64)}

    async with site.learner.serving(), site.host() as downloads:
        await downloads.open(site.store.publish(0, 1, adapter(4), CANARY, adapter=ADAPTER))
        opened = await downloads.open(site.store.publish(1, 1, adapter(8), CANARY, adapter=ADAPTER))
        assert same(opened, adapter(8))
        again = await downloads.open(site.store.publish(2, 1, adapter(8), CANARY, adapter=ADAPTER))
        assert same(again, adapter(8))
        assert not any(".unfinished" in path.name for path in site.store.folder.rglob("*"))
    assert sent[-1][0].endswith("/from/v000001-e1")


@pytest.mark.parametrize("what", ["base", "difference", "nothing"])
async def test_what_is_damaged_is_never_loaded_and_the_whole_file_comes_instead(site, sent, monkeypatch, what):
    async with site.learner.serving(), site.host() as downloads:
        before = await downloads.open(publish(site, 0, learned(0)))
        name = publish(site, 1, learned(1))
        if what == "base":
            file = before.directory / TENSORS
            content = bytearray(file.read_bytes())
            content[-5000] ^= 1
            file.write_bytes(content)
        if what == "difference":
            monkeypatch.setattr(http, "write_difference", lambda old, new, into, threads: into.write(b"garbage"))
        assert same(await downloads.open(name), learned(1))
    whole = [path for path, _ in sent if path == f"{name}/{TENSORS}"]
    assert len(whole) == (what != "nothing")


async def test_machines_with_the_same_version_share_one_difference(site, monkeypatch):
    made = []

    def counting(old, new, into, threads):
        made.append(new)
        write_difference(old, new, into, threads)

    monkeypatch.setattr(http, "write_difference", counting)
    async with site.learner.serving(), site.host("a") as one, site.host("b") as other:
        first = publish(site, 0, learned(0))
        await asyncio.gather(one.open(first), other.open(first))
        second = publish(site, 1, learned(1))
        opened = await asyncio.gather(one.open(second), other.open(second))
        assert all(same(found, learned(1)) for found in opened)
    assert len(made) == 1


async def test_without_room_for_the_difference_beside_it_the_whole_file_is_fetched(site, sent, monkeypatch):
    """Into a memory file system for four versions none came after the third."""
    keep = client.keep

    def only_whole(piece, file, tensors):
        if file.name.endswith("difference"):
            raise WriteFailed("No space left on device")
        keep(piece, file, tensors)

    monkeypatch.setattr(client, "keep", only_whole)
    async with site.learner.serving(), site.host() as downloads:
        await downloads.open(publish(site, 0, learned(0)))
        name = publish(site, 1, learned(1))
        assert same(await downloads.open(name), learned(1))
    assert sent[-1][0] == f"{name}/{TENSORS}"


async def test_a_difference_that_takes_long_to_make_is_waited_for(site, sent, monkeypatch):
    """Longer than silence is borne; before, the whole file was sent besides, for every version of a large model."""
    go_on, asked = threading.Event(), []

    def slow(old, new, into, threads):
        write_difference(old, new, into, threads)
        assert go_on.wait(SECONDS)

    put_off = http.Server._difference

    async def counting(own, request):
        answer = await put_off(own, request)
        asked.append(answer.status)
        return answer

    for module in (http, client):
        monkeypatch.setattr(module, "SILENCE_S", 1)
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    monkeypatch.setattr(http, "write_difference", slow)
    monkeypatch.setattr(http.Server, "_difference", counting)
    async with site.learner.serving(), site.host() as downloads:
        await downloads.open(publish(site, 0, learned(0)))
        name = publish(site, 1, learned(1))
        opening = asyncio.ensure_future(downloads.open(name))
        async with asyncio.timeout(SECONDS):
            while asked.count(202) < 5 and not opening.done():
                await asyncio.sleep(0.01)
        remove(site.learner.store().directory("v000000-e1"))  # two versions later it is no longer kept
        go_on.set()
        assert same(await opening, learned(1))
    assert set(asked) == {202, 200}
    assert sent[-1][0] == f"{name}/{TENSORS}/from/v000000-e1"


async def test_a_lost_connection_is_taken_up_within_a_difference(site, sent, monkeypatch):
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    async with site.learner.serving(), cutting(site.url, [1 << 30, 1 << 15]) as (url, _):
        config = site.config("worker")
        behind = config.model_copy(update={"weights": config.weights.model_copy(update={"url": url})})
        async with HttpTransportOf(behind) as downloads:
            await downloads.open(publish(site, 0, learned(0)))
        async with HttpTransportOf(behind) as downloads:
            name = publish(site, 1, learned(1))
            assert same(await downloads.open(name), learned(1))
    assert not any(path == f"{name}/{TENSORS}" for path, _ in sent)


def HttpTransportOf(config):
    return http.HttpTransport(config).source()


async def test_many_versions_with_gaps_are_the_same_bits(site):
    draw = random.Random(0)
    async with asyncio.timeout(SECONDS), site.learner.serving(), site.host() as downloads:
        weights = {"w": torch.randn(5000).to(torch.bfloat16)}
        for version in range(60):
            changed = torch.rand(5000) < draw.choice([0.0, 0.01, 0.5])
            weights = {"w": torch.where(changed, torch.randn(5000).to(torch.bfloat16), weights["w"])}
            name = publish(site, version, weights)
            if draw.random() < 0.6:
                assert same(await downloads.open(name), weights)


@pytest.fixture
def files(tmp_path):
    """Two files of tensors, the second's records, and what it changed of the first."""
    old, new, packed = tmp_path / "old", tmp_path / "new", tmp_path / "difference"
    write_tensors(old, learned(0))
    write_tensors(new, learned(1))
    with packed.open("wb") as into:
        write_difference(old, new, into, threads=1)
    return old, new, packed


def test_pieces_make_no_difference(files, monkeypatch):
    old, new, packed = files
    monkeypatch.setattr(difference, "_PIECE_BYTES", 77_777)
    restored = io.BytesIO()
    restore(old, packed, restored, ArrivingTensors("x", records_of(new)))
    assert restored.getvalue() == new.read_bytes()


@pytest.mark.parametrize("kept", [0, 1, 1000, -1])
def test_half_a_difference_is_refused(files, kept):
    old, new, packed = files
    packed.write_bytes(packed.read_bytes()[:kept])
    with pytest.raises(BadTensorFile, match=r"the difference is (incomplete|damaged)|checksum|readable|header"):
        restore(old, packed, io.BytesIO(), ArrivingTensors("x", records_of(new)))


def test_a_difference_that_unpacks_to_much_more_is_not_unpacked(files):
    old, new, packed = files
    packed.write_bytes(zstandard.ZstdCompressor().compress(bytes(300 << 20)))
    into = io.BytesIO()
    with pytest.raises(BadTensorFile):
        restore(old, packed, into, ArrivingTensors("x", records_of(new)))
    assert len(into.getvalue()) <= old.stat().st_size
