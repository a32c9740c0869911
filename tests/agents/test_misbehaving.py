"""Thousands of requests of clients that misbehave: each gets an error or its own session's turn, nothing is logged as a
failure of ours, and memory stays flat."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from dataclasses import replace
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest

from cusearch_async.agents import api
from cusearch_async.agents.turns import Turns
from cusearch_async.environments import Episode
from cusearch_async.rollout.limit import Limit
from tests.agents.test_episodes import QUESTION, Scene, parser  # noqa: F401
from tests.fakes import FakeTurn

KINDS = ("good", "again", "twice at once", "cut", "bad json", "bad utf-8", "oversize", "foreign key", "no key")
KINDS += ("foreign session", "path trick", "wrong method", "wrong field", "deep json", "no length")
SESSIONS = 4


class Parrot:
    """Says what was asked last."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer

    async def generate(self, prompt, max_tokens, temperature, seed, stops):
        text = self._tokenizer.decode(prompt).rpartition("user: ")[2].split("\n")[0]
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"][:max_tokens]
        await asyncio.sleep(0)
        return FakeTurn(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), False)


class Client:
    """Of one session, whose texts hold its secret."""

    def __init__(self, number: int, url: str, key: str, others: list[Client], draw: random.Random) -> None:
        self.secret, self.url, self.key = f"secret{number}", url, key
        self._others, self._draw = others, draw
        self._asked = 0
        self.statuses: Counter[int] = Counter()

    def body(self, new: bool = True) -> bytes:
        self._asked += new
        text = f"{self.secret} {self._asked % 3}"
        return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()

    async def misbehave(self) -> None:
        kind, draw, key = self._draw.choice(KINDS), self._draw, self.key
        chat = f"{self.url}/v1/chat/completions"
        other, path = draw.choice(self._others), draw.choice((chat, f"{self.url}/search"))
        body = self.body(kind != "again")
        if kind == "twice at once":
            await asyncio.gather(*(self.send(chat, body, key) for _ in range(2)))
            return
        tricks = ("/../", "/%2e%2e/", "//", "/%00", "/" + "a" * 3000, f"/..%2F{other.key}/v1/models")
        fields = {"messages": draw.choice((3, [3], [{}], None)), "n": 7}
        asked: dict[str, dict] = {
            "good": {"url": chat},
            "again": {"url": chat},
            "cut": {"body": body[: draw.randrange(20)], "claims": draw.choice((100, 1 << 20)), "waits": False},
            "bad json": {"body": draw.choice((b"{", b"nul", b'{"messages": [}', b""))},
            "bad utf-8": {"body": b'{"messages": "\xff\xfe"}'},
            "oversize": {"body": b" " * 2000, "claims": api.MAX_BODY_BYTES + 5000, "waits": False},
            "foreign key": {"key": other.key if other is not self else "x"},
            "no key": {"key": ""},
            "foreign session": {"url": path.replace(key, "x" * draw.randrange(40))},
            "path trick": {"url": self.url + draw.choice(tricks)},
            "wrong method": {"method": draw.choice(("GET", "PUT", "DELETE", "BREW"))},
            "wrong field": {"body": json.dumps(fields).encode()},
            "deep json": {"body": b"[" * 20_000},
            "no length": {"claims": None, "waits": False},
        }
        await self.send(**({"url": path, "body": body, "key": key} | asked[kind]))

    async def send(self, url: str, body: bytes, key: str, claims: int | None = -1, method="POST", waits=True) -> None:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        lines = [f"{method} {parts.path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
        lines += [f"Authorization: Bearer {key}"] if key else []
        lines += [] if claims is None else [f"Content-Length: {len(body) if claims < 0 else claims}"]
        writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)
        try:
            answered = await asyncio.wait_for(reader.read(), None if waits else 0.02)
        except (TimeoutError, ConnectionError):
            answered = b""
        writer.close()
        status = answered.split(b" ", 2)[1:2]
        self.statuses[int(status[0]) if status else 0] += 1
        for other in self._others:
            assert other is self or other.secret.encode() not in answered, "another session's text"
        assert b"Traceback" not in answered


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.system])])
async def test_nothing_leaks_and_nothing_breaks(count: int, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    scene = Scene([], s_max=10**6)
    scene.runner.chat = replace(scene.runner.chat, policy=Parrot(scene.tokenizer))
    gateway, clients = scene.runner._gateway, []
    environment = scene.runner._environments["a"]
    draw = random.Random(0)
    opened = []
    for number in range(SESSIONS):
        episode = Episode(question=QUESTION, ticket=number, rollout=0)
        turns = Turns(scene.runner.chat, environment, episode, 1.0, Limit(600.0))
        opened.append((gateway.session(turns.ask, turns.search), turns))
        _, url, key = await opened[-1][0].__aenter__()
        clients.append(Client(number, url, key, clients, draw))
    before = psutil.Process().memory_info().rss
    for _ in range(count // 20):
        await asyncio.gather(*(draw.choice(clients).misbehave() for _ in range(20)))
    for context, turns in opened:
        await turns.end()
        await context.__aexit__(None, None, None)
    statuses = sum((client.statuses for client in clients), Counter())
    assert statuses[500] == 0, statuses
    assert statuses.keys() >= {0, 200, 400, 401, 404}, statuses
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert psutil.Process().memory_info().rss - before < 64 << 20
