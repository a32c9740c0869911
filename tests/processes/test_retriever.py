"""The retriever process: what it serves, and that its backend is closed."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import TestClient, TestServer

from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError
from cusearch_async.processes import retriever


class FakeBackend:
    """Finds one document, whatever is asked for."""

    deterministic, accepts_seed, is_closed = True, False, False

    async def search(self, queries, topk):
        return [[({"id": "1", "contents": f"{query.text} {topk}"}, 1.0)] for query in queries]

    def figures(self):
        return {}

    async def close(self):
        self.is_closed = True


@pytest.fixture
def backend(monkeypatch) -> FakeBackend:
    backend = FakeBackend()
    monkeypatch.setattr(retriever, "make_backend", lambda config: backend)
    return backend


async def test_it_serves_its_backend_at_the_configs_address_and_closes_it_at_the_end(
    atlas_config, monkeypatch, backend
):
    served = []

    async def serve(application, url, key, what):
        assert not backend.is_closed
        async with TestClient(TestServer(application)) as http:
            answer = await http.post("/retrieve", json={"queries": ["Lima"]})
            served.append((url, key, what, await answer.json()))

    monkeypatch.setattr(retriever, "serve", serve)
    await retriever.run(load_config(atlas_config, ["--retriever.topk", "7"]))
    ((url, key, what, answer),) = served
    assert (url, key, what[:12]) == ("http://127.0.0.1:8765", "retriever.url", "bm25 over 0 ")
    assert answer["result"][0][0]["contents"] == "Lima 7"
    assert backend.is_closed


async def test_a_backend_that_cannot_be_served_is_closed(atlas_config, monkeypatch, backend):
    async def refuse(*arguments, **named):
        raise ConfigError("retriever.url: cannot listen")

    monkeypatch.setattr(retriever, "serve", refuse)
    with pytest.raises(ConfigError, match="cannot listen"):
        await retriever.run(load_config(atlas_config))
    assert backend.is_closed
