"""What the page may do to a run in a real Redis, and for whom."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import stat
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from cusearch_async.cli import dashboard
from cusearch_async.cli.dashboard import token_of_all
from cusearch_async.config import Config, load_config
from cusearch_async.dashboard.server import Shown, application
from cusearch_async.errors import ConfigError
from cusearch_async.run import folder as run_folder
from cusearch_async.run.identity import Identity
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import MethodState
from tests.strategies import make_trajectory


@pytest.fixture
def config(atlas_config, redis_url, request, tmp_path) -> Config:
    """A run with ticket 0 leased and one of its trajectories buffered."""
    name = f"act-{abs(hash(request.node.name))}"
    options = ["--run.name", name, "--redis.url", redis_url, "--run.folder", str(tmp_path / "run")]
    made = load_config(atlas_config, options)
    run_folder.mark(made.folder, name)

    async def fill() -> None:
        async with open_buffer(made, identity=Identity({"run.seed": "0"}).in_folder(made.folder)) as buffer:
            await buffer.recover(0, MethodState())
            await buffer.announce(0, "v000000-e1")
            await buffer.admit("w0", 0, 6)
            await buffer.put(make_trajectory(0, 0, depth=1))

    asyncio.run(fill())
    return made


def post(config: Config, body: Any, token: str | None = None, content: str = "application/json") -> tuple[int, str]:
    """Status, and what is said; with the run's token unless another is given."""

    async def ask() -> tuple[int, str]:
        shown = Shown(config.folder, config)
        async with TestClient(TestServer(application({"run": shown}))) as client:
            headers = {"Content-Type": content}
            if token != "":
                headers["Authorization"] = f"Bearer {token or shown.token()}"
            text = body if isinstance(body, str) else json.dumps(body)
            async with client.post("/run/act", data=text, headers=headers) as answer:
                (said,) = (await answer.json()).values()
                return answer.status, said

    return asyncio.run(ask())


def state(config: Config) -> tuple[bool, list[str], int]:
    """Whether it is paused, what is quarantined, how many tickets wait to be admitted again."""

    async def look() -> tuple[bool, list[str], int]:
        async with open_buffer(config) as buffer:
            queues = await buffer.queues(0)
            return (await buffer.state()).paused, list(await buffer.quarantined()), queues.requeued

    return asyncio.run(look())


def kept(config: Config) -> list[tuple[str, str, str]]:
    lines = (config.folder / "actions.jsonl").read_text().splitlines()
    return [(row["action"], row["what"], row["outcome"]) for row in map(json.loads, lines)]


def test_who_has_the_token_changes_the_run_and_it_is_kept(config):
    name = config.run.name
    assert post(config, {"action": "pause"}) == (200, f"run {name} is paused: no new episodes start")
    assert state(config) == (True, [], 0)
    assert post(config, {"action": "resume"}) == (200, f"run {name} is resumed")
    assert post(config, {"action": "quarantine", "what": " 0:0 "}) == (200, "trajectory 0:0 is quarantined")
    assert post(config, {"action": "requeue", "what": "0"}) == (200, "ticket 0 is requeued")
    assert state(config) == (False, ["0:0"], 1)
    assert kept(config) == [
        ("pause", "", f"run {name} is paused: no new episodes start"),
        ("resume", "", f"run {name} is resumed"),
        ("quarantine", "0:0", "trajectory 0:0 is quarantined"),
        ("requeue", "0", "ticket 0 is requeued"),
    ]


@pytest.mark.parametrize("token", ["", "wrong", "\u00e9"])
def test_nobody_else_does(config, token):
    status, said = post(config, {"action": "pause"}, token)
    assert (status, "page-token" in said) == (401, True)
    assert state(config)[0] is False
    assert not (config.folder / "actions.jsonl").exists()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"action": "delete"}, 409, "'delete' is none of pause, resume, requeue, quarantine"),
        ({"action": "requeue", "what": "x"}, 409, "a ticket is a number, got 'x'"),
        ({"action": "requeue", "what": "77"}, 409, "ticket 77 is not leased and has no incomplete group"),
        ({"action": "quarantine", "what": "9:9"}, 409, "trajectory '9:9' is not in the buffer"),
        ({"action": "pause", "more": 1}, 400, "unknown field `more`"),
        ({"action": 1}, 400, "Expected `str`, got `int`"),
        ("{", 400, "truncated"),
    ],
)
def test_what_cannot_be_done_is_said(config, body, status, said):
    found = post(config, body)
    assert (found[0], said in found[1]) == (status, True), found
    assert state(config)[0] is False


def test_a_run_of_another_folder_is_not_changed(config, tmp_path):
    run_folder.mark(tmp_path / "other", config.run.name)
    other = config.model_copy(update={"run": config.run.model_copy(update={"folder": tmp_path / "other"})})
    status, said = post(other, {"action": "pause"})
    assert (status, "another run of the name" in said) == (409, True)
    assert state(config)[0] is False


def test_the_token_is_for_its_user_only_and_stays(config, monkeypatch):
    first, again = Shown(config.folder, config).token(), Shown(config.folder, config).token()
    file = config.folder / "page-token"
    assert first == again == file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    monkeypatch.setenv("CUSEARCH_PAGE_TOKEN", "given")
    assert Shown(config.folder, config).token() == "given"


def test_on_other_addresses_all_runs_have_one_token(config, tmp_path, monkeypatch):
    """Else who has the token of one would see the others."""
    run_folder.mark(tmp_path / "other", "other")
    own, other = Shown(config.folder, config), Shown(tmp_path / "other", config)
    assert token_of_all([own], "0.0.0.0") == own.token()
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0 shows several runs only .* set CUSEARCH_PAGE_TOKEN"):
        token_of_all([own, other], "0.0.0.0")
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0 shows this folder only"):
        token_of_all([Shown(tmp_path, None)], "0.0.0.0")
    monkeypatch.setenv("CUSEARCH_PAGE_TOKEN", "given")
    assert token_of_all([own, other], "0.0.0.0") == "given"
    assert token_of_all([Shown(tmp_path / "not-yet", config)], "0.0.0.0") == "given", "before its learner has begun"
    monkeypatch.setenv("CUSEARCH_PAGE_TOKEN", "given\n")
    assert token_of_all([own], "0.0.0.0") == own.token() == "given", "out of a file"


def test_the_printed_address_has_the_token_as_it_is(config, monkeypatch, caplog):
    """A `+` was read as a space, and the address that had been printed was refused."""
    token = "a+b/c=&d#e%41"
    monkeypatch.setenv("CUSEARCH_PAGE_TOKEN", token)
    monkeypatch.setattr(dashboard, "serve", AsyncMock())
    parser = argparse.ArgumentParser()
    dashboard.add(parser)
    with caplog.at_level(logging.INFO):
        dashboard.run(parser.parse_args([str(config.folder), "--host", "0.0.0.0"]), [])
    (address,) = re.findall(r"http://\S+", caplog.text)
    assert URL(address).query == {"token": token}


def test_a_folder_that_is_no_runs_gets_no_token(config, tmp_path):
    """It would not be empty for the launch that makes it one."""
    (tmp_path / "new").mkdir()
    assert Shown(tmp_path / "new", config).token() is None
    assert not list((tmp_path / "new").iterdir())


def test_a_change_that_cannot_be_listed_is_made(config, monkeypatch, caplog):
    (config.folder / "actions.jsonl").mkdir()
    assert post(config, {"action": "pause"})[0] == 200
    assert state(config)[0] is True
    assert "pause was not added to" in caplog.text


def test_a_page_that_does_not_look_into_redis_changes_nothing(config):
    shown = Shown(config.folder, None)
    assert shown.token() is None

    async def ask() -> int:
        async with TestClient(TestServer(application({"run": shown}))) as client:
            return (await client.post("/run/act", data="{}")).status

    assert asyncio.run(ask()) == 403
