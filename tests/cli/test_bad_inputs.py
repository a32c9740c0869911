"""Bad input to a command: one line that names thing, value and remedy; no traceback, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from string import Template
from urllib.parse import urlsplit

import pytest
import redis

from cusearch_async.cli import main
from cusearch_async.config import load_config
from cusearch_async.transport.buffer import open_buffer
from tests.cli.bad_inputs import CASES, Case
from tests.conftest import SLOW, free_port

pytestmark = pytest.mark.system  # each is a whole command

MOST_S = 10.0
"""Of this process's own time: what another process keeps busy is no fault of the command. By the clock it may take
SLOW times as long."""


class Nonsense(BaseHTTPRequestHandler):
    """Answers searches wrongly, as its path says."""

    def do_POST(self) -> None:
        kind = self.path.split("/")[1]
        if kind == "silence":
            self.server.ended.wait(30)
            return
        body = b"<html>not a search</html>"
        self.send_response({"404": 404, "500": 500}.get(kind, 200))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """HOST:PORT of a web server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Nonsense)
    server.daemon_threads = True
    server.ended = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.ended.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def places(web: str, redis_url: str, atlas_config: Path) -> dict[str, str]:
    """What $NAMES in a command stand for. Redis knows one run, `known`."""

    async def make_known() -> None:
        async with open_buffer(load_config(atlas_config, ["--redis.url", redis_url, "--run.name", "known"])) as buffer:
            await buffer.recover(0)

    asyncio.run(make_known())
    nobody = f"127.0.0.1:{free_port()}"
    return {
        "redis": redis_url,
        "locked": redis_url,
        "dead": f"redis://{nobody}/0",
        "nobody": f"http://{nobody}",
        "http": f"http://{web}",
        "web": f"redis://{web}/0",
    }


@pytest.fixture
def password(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Redis wants one, and we have another."""
    client = redis.Redis(port=urlsplit(redis_url).port)
    client.config_set("requirepass", "right")
    monkeypatch.setenv("CUSEARCH_REDIS_PASSWORD", "wrong")
    yield
    client.config_set("requirepass", "")


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_there_are_a_hundred_and_each_has_a_name() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 99


LOADS_VLLM = "a long question for a worker"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.system if case.name == LOADS_VLLM else ()) for case in CASES],
    ids=lambda case: case.name,
)
def test_bad_input(
    case: Case,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    (tmp_path / "mine.toml").write_text(f'{case.toml}\n[run]\nname = "mine"\n', encoding="utf-8")
    for name, content in case.files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    before = contents(tmp_path)
    if "$locked" in case.command:
        request.getfixturevalue("password")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("CUSEARCH_REDIS_PASSWORD", "SERPER_API_KEY", "SERPAPI_API_KEY"):
        if "$locked" not in case.command:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of the modules in its folder
    command = shlex.split(Template(case.command).substitute(places))
    monkeypatch.setattr(sys, "argv", command)
    began, began_at = time.process_time(), time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main.main()
    took_s, waited_s = time.process_time() - began, time.monotonic() - began_at
    status, printed = ended.value.code, capsys.readouterr()
    said = printed.err
    if isinstance(status, str):  # the interpreter prints it
        said, status = f"{said}{status}\n", 1
    shown = " ".join(printed.out.split()) if case.is_report else said
    assert status == case.status
    assert re.search(case.says, shown), shown
    assert len(said.splitlines()) == (0 if case.is_report else 1), said
    assert "Traceback" not in said
    assert contents(tmp_path) == before, "something was left behind"
    assert took_s < MOST_S
    assert waited_s < SLOW * MOST_S
