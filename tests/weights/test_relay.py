"""A relay passes the learner's versions on: the learner sends each once, however many machines are behind it."""

from __future__ import annotations

import asyncio
import resource
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
import pytest

from cusearch_async.config import Config
from cusearch_async.errors import ConfigError, LearnerUnreachable, WeightsUnavailable
from cusearch_async.weights import downloads as client
from cusearch_async.weights import http, relay
from cusearch_async.weights.downloads import Downloads
from cusearch_async.weights.http import HttpTransport
from cusearch_async.weights.interface import MANIFEST, TENSORS
from cusearch_async.weights.relay import relaying
from tests.conftest import SLOW, free_port
from tests.weights.test_http import CANARY, Site, same, tensors, until


class Relayed(Site):
    """With one relay before the other machines."""

    def __init__(self, folder, upstream: str | None = None) -> None:
        super().__init__(folder)
        self.upstream = upstream or self.url
        self.relay_url = f"http://127.0.0.1:{free_port()}"

    def relay_config(self, host: str = "relay") -> Config:
        weights = {"url": self.relay_url, "upstream": self.upstream}
        config = self.config(host, wait_s=1)
        return config.model_copy(update={"weights": config.weights.model_copy(update=weights)})

    @asynccontextmanager
    async def behind(self, name: str, needs_last: bool = False) -> AsyncIterator[Downloads]:
        config = self.config(name)
        weights = config.weights.model_copy(update={"url": self.relay_url})
        async with HttpTransport(config.model_copy(update={"weights": weights})).source(needs_last) as downloads:
            yield downloads


@pytest.fixture
def site(tmp_path, monkeypatch) -> Relayed:
    monkeypatch.setenv("CUSEARCH_WEIGHTS_TOKEN", "of this test")
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    return Relayed(tmp_path)


@pytest.fixture
def sent(monkeypatch) -> list[tuple[str, str]]:
    """Of every file that a server sent: its folder on the way to the store, and the path asked for."""
    found: list[tuple[str, str]] = []
    prepare = http._Counted.prepare
    monkeypatch.setattr(
        http._Counted,
        "prepare",
        lambda own, request: found.append((own._path.parts[-4], request.path)) or prepare(own, request),
    )
    return found


async def test_the_learner_sends_a_version_once_to_many_machines(site, sent):
    name = site.publish(1)
    async with site.learner.serving(), relaying(site.relay_config()), AsyncExitStack() as machines:
        behind = [await machines.enter_async_context(site.behind(host)) for host in ("a", "b", "c")]
        opened = await asyncio.gather(*(one.open(name) for one in behind))
    assert all(same(one, tensors(1)) for one in opened)
    files = sorted([f"/weights/{name}/{MANIFEST}", f"/weights/{name}/{TENSORS}"])
    assert sorted(path for host, path in sent if host == "learner") == files
    assert sorted(path for host, path in sent if host == "relay") == sorted(3 * files)


async def test_a_learner_that_is_gone_is_no_missing_version(site):
    """Its workers wait where they ask it themselves; behind a relay they ended."""
    name = site.publish(1)
    async with relaying(site.relay_config()), site.behind("a") as downloads:
        async with site.learner.serving():
            await downloads.open(name)
        with pytest.raises(LearnerUnreachable, match="answers 502"):
            await downloads.open(site.publish(2))


async def test_a_relay_that_cannot_write_is_no_learner_that_is_gone(site, monkeypatch):
    """For a learner that is gone its workers would wait as long as it takes."""
    name, later = site.publish(1), site.publish(2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(relay, "COMPARED_S", 0.0)
    async with site.learner.serving(), relaying(site.relay_config()), site.behind("a") as downloads:
        await downloads.open(name)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            with pytest.raises(WeightsUnavailable, match=r"answers 500: .*File too large") as refused:
                await downloads.open(later)
            assert (await downloads.names())[-1] == later
            assert await downloads.is_current(name), "what it has needs no disk"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not isinstance(refused.value, LearnerUnreachable)


async def test_what_a_relay_has_is_served_while_the_learner_is_silent(site, monkeypatch):
    """It asked again and again whether its copy was the learner's."""
    monkeypatch.setattr(relay, "COMPARED_S", 0.0)
    monkeypatch.setattr(relay, "COMPARING_S", 0.2)
    name = site.publish(1)
    async with relaying(site.relay_config()):
        async with site.learner.serving(), site.behind("a") as downloads:
            await downloads.open(name)
        with socket.create_server(("127.0.0.1", urlsplit(site.url).port)):
            async with site.behind("b") as downloads:
                assert same(await asyncio.wait_for(downloads.open(name), 20 * SLOW), tensors(1))


async def test_a_relay_behind_a_relay_passes_on_what_it_gets(site, tmp_path):
    name = site.publish(1)
    second = Relayed(tmp_path / "second", upstream=site.relay_url)
    relays = relaying(site.relay_config()), relaying(second.relay_config())
    async with site.learner.serving(), relays[0], relays[1], second.behind("worker") as downloads:
        assert same(await downloads.open(name), tensors(1))
        assert await downloads.newest_of(1) == name


async def test_the_next_runs_version_of_the_same_name_is_fetched(site, monkeypatch):
    """Before, a relay that outlived `cusearch reset` served the weights of the run before."""
    monkeypatch.setattr(relay, "COMPARED_S", 0)
    name = site.publish(1)
    async with relaying(site.relay_config()):
        async with site.learner.serving(), site.behind("a") as downloads:
            assert same(await downloads.open(name), tensors(1))
        shutil.rmtree(site.store.directory(name))
        assert site.store.publish(1, 1, tensors(2), CANARY) == name
        async with site.learner.serving(), site.behind("b") as downloads:
            assert same(await downloads.open(name), tensors(2))


async def test_differences_pass_through_and_a_base_that_the_relay_lacks_means_the_whole_file(site, sent):
    first = site.publish(1)
    changed = tensors(1)
    changed["layers.0.weight"] = changed["layers.0.weight"] + 1
    async with site.learner.serving(), site.host("late") as late:
        await late.open(first)
        async with relaying(site.relay_config()), site.behind("early") as early:
            await early.open(first)
            second = site.store.publish(2, 1, changed, CANARY)
            assert same(await early.open(second), changed)
        async with relaying(site.relay_config("another")), site.behind("late") as behind:
            assert same(await behind.open(second), changed)
    by_difference = [host for host, path in sent if path == f"/weights/{second}/{TENSORS}/from/{first}"]
    assert by_difference == ["learner", "relay"]


async def test_a_version_that_takes_the_relay_longer_than_clients_wait_arrives(site, sent, monkeypatch):
    """No client's silence ends the relay's own download, and each asks until it is there."""
    monkeypatch.setattr(relay, "SILENCE_S", 0.03)
    name, answered, keep = site.publish(1), asyncio.Event(), client.keep
    loop = asyncio.get_running_loop()

    class Noting(client._NotYet):
        def __init__(self, text: str) -> None:
            loop.call_soon_threadsafe(answered.set)
            super().__init__(text)

    def once_answered(piece, file, tensors):
        asyncio.run_coroutine_threadsafe(answered.wait(), loop).result(10 * SLOW)
        keep(piece, file, tensors)

    monkeypatch.setattr(client, "_NotYet", Noting)
    monkeypatch.setattr(client, "keep", once_answered)
    async with site.learner.serving(), relaying(site.relay_config()), site.behind("worker") as downloads:
        assert same(await downloads.open(name), tensors(1))
    assert [path for host, path in sent if host == "learner"] == [
        f"/weights/{name}/{MANIFEST}",
        f"/weights/{name}/{TENSORS}",
    ]


async def test_what_is_not_there_is_refused_and_a_learner_that_is_gone_is_named(site):
    name = site.publish(1)
    async with relaying(site.relay_config()), site.behind("worker") as downloads:
        with pytest.raises(WeightsUnavailable, match=f"does not answer at weights.url {site.url}"):
            await downloads.newest_of(1)
        async with site.learner.serving():
            with pytest.raises(WeightsUnavailable, match="v000009-e1"):
                await downloads.open("v000009-e1")
            await downloads.open(name)
        async with site.behind("later") as later:
            assert same(await later.open(name), tensors(1)), "what the relay has needs no learner"


@pytest.mark.parametrize("path", ["/{name}/secret", "/..%2F..%2Frelay/weights-token/x", "/{name}", "/../../x/y"])
async def test_nothing_but_files_of_versions_passes(site, path):
    name = site.publish(1)
    (site.store.directory(name) / "secret").write_text("x")
    async with site.learner.serving(), relaying(site.relay_config()), aiohttp.ClientSession() as session:
        headers = {"Authorization": "Bearer of this test"}
        async with session.get(f"{site.relay_url}/weights{path.format(name=name)}", headers=headers) as response:
            assert response.status == 404


async def test_without_the_token_nothing_passes(site):
    site.publish(1)
    request = aiohttp.request("GET", f"{site.relay_url}/weights")
    async with site.learner.serving(), relaying(site.relay_config()), request as response:
        assert response.status == 401


async def test_a_relay_needs_the_runs_token_and_an_upstream(site, monkeypatch):
    monkeypatch.delenv("CUSEARCH_WEIGHTS_TOKEN")
    with pytest.raises(ConfigError, match=r"a relay needs the learner's token.*CUSEARCH_WEIGHTS_TOKEN"):
        async with relaying(site.relay_config()):
            pass
    monkeypatch.setenv("CUSEARCH_WEIGHTS_TOKEN", "of this test")
    config = site.relay_config()
    alone = config.model_copy(update={"weights": config.weights.model_copy(update={"upstream": None})})
    with pytest.raises(ConfigError, match=r"a relay needs weights.upstream"):
        async with relaying(alone):
            pass


async def test_without_a_learner_the_connection_for_the_last_version_breaks(site):
    """An empty answer would be taken for one."""
    headers = {"Authorization": "Bearer of this test"}
    async with relaying(site.relay_config()), aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            async with session.get(f"{site.relay_url}/weights/last?client=c", headers=headers) as response:
                await response.read()


async def test_the_last_version_comes_through_and_the_learner_waits_for_it(site):
    async with relaying(site.relay_config()), site.behind("evaluator", needs_last=True) as downloads:
        servers: list[http.Server] = []
        init = http.Server.__init__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(http.Server, "__init__", lambda own, *args: servers.append(own) or init(own, *args))
            async with site.learner.serving():
                first = site.publish(1)
                await until(lambda: bool(servers and servers[0].asking))
                last = site.publish(2)
        assert last in site.downloaded("evaluator")
        assert same(await downloads.open(last), tensors(2))
        with pytest.raises(WeightsUnavailable):
            await downloads.open(first)
