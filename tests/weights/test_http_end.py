"""A learner's end, when its last version cannot be had."""

from __future__ import annotations

import asyncio

from cusearch_async.weights import downloads as client
from cusearch_async.weights import http
from tests.conftest import SLOW
from tests.weights.test_http import servers, site, until  # noqa: F401  (fixtures)


async def test_a_learner_at_its_end_gives_up_a_client_that_cannot_get_the_last_version(site, servers, monkeypatch):  # noqa: F811
    """It is damaged on the learner's disk, or the client's disk is full."""
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    monkeypatch.setattr(http, "MOST_ASKED", 3)
    name = site.publish(1)
    file = site.learner.store().directory(name) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    async with site.host(needs_last=True), asyncio.timeout(20 * SLOW), site.learner.serving():
        await until(lambda: servers[0].asking == 1)
    assert site.downloaded() == set()
