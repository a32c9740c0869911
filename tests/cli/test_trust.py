"""Commands that look at the folder of a run do not import what it names, unless they are told to."""

from __future__ import annotations

import asyncio
import sys

import pytest
from aiohttp.test_utils import TestClient, TestServer

from cusearch_async.cli import dashboard
from cusearch_async.config import Config, known_keys, load_config, section_of
from cusearch_async.config.section import Section
from cusearch_async.dashboard.server import application
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import record_start
from cusearch_async.run.trust import CODE, code_in

OWN = """
open("was_here", "w").close()
def reward(*_): return 0.0
def anything(*_): raise SystemExit("imported")
"""
NAMED = {
    "method.name": '[method]\nname = "theirs:Method"',
    "environment.search.name": '[environment.search]\nname = "theirs:Environment"',
    "environment.search.reward": '[environment.search]\nreward = "theirs:reward"',
    "environment.search.agent": '[environment.search]\nagent = "theirs:anything"',
    "environment.search.command": '[environment.search]\ncommand = ["theirs:program", "-x"]',
    "loss.objective": '[loss]\nobjective = "theirs:anything"',
    "retriever.backend": '[retriever]\nbackend = "theirs:anything"',
    "run.trackers": 'run.trackers = ["wandb", "theirs:anything"]',
    "redis.transport": '[redis]\ntransport = "theirs:anything"',
}
LOOKING = (
    ("config", "config.toml"),
    ("config", "starts/0001.toml"),
    ("check", "config.toml"),
    ("buckets", "launch.toml", "--ledger"),
    ("buckets", "config.toml", "--once"),
    ("buffer", "ls", "config.toml"),
    ("buffer", "peek", "config.toml", "0:0"),
    ("buffer", "pause", "config.toml"),
    ("reset", "config.toml"),
    ("redis", "config.toml"),
    ("index", "config.toml"),
    ("data", "check", "atlas", "--config", "config.toml"),
    ("replay", ".", "--step", "0"),
    ("trace", ".", "--step", "0"),
    ("dashboard", ".", "--output", "page.html"),
    ("dashboard", "config.toml", "--output", "page.html"),
    ("ask", ".", "What?"),
)


@pytest.fixture
def foreign(atlas_config, tmp_path, monkeypatch):
    """The folder of a run with modules in it; the current folder."""
    folder = tmp_path / "theirs"
    config = load_config(atlas_config, ["--run.folder", str(folder), "--redis.url", "redis://127.0.0.1:1/0"])
    run_folder.mark(folder, config.run.name)
    record_start(config, 1, 0)
    (folder / "theirs.py").write_text(OWN)
    monkeypatch.chdir(folder)
    yield folder
    sys.modules.pop("theirs", None)
    sys.path[:] = [place for place in sys.path if place != str(folder)]


def name_code(folder, key):
    section = NAMED[key]
    for path in ("config.toml", "launch.toml", "starts/0001.toml"):
        (folder / path).write_text(f'run.name = "atlas"\ndata.source = "hf:a/b/c"\n{section}\n')


@pytest.mark.parametrize("command", LOOKING, ids=" ".join)
def test_a_command_that_looks_imports_nothing_of_a_run_folder(foreign, cusearch, command):
    name_code(foreign, "environment.search.reward")
    said = cusearch(*command)[0]
    assert "names code, environment.search.reward = 'theirs:reward'; add --trust to import it" in said
    assert not (foreign / "was_here").exists()


@pytest.mark.parametrize("key", NAMED)
def test_whatever_names_code_is_refused(foreign, cusearch, key):
    name_code(foreign, key)
    assert f"names code, {key} = 'theirs:" in cusearch("config", "config.toml")[0]
    assert not (foreign / "was_here").exists()


@pytest.mark.parametrize("setting", ['name = "theirs:Env"', 'reward = "theirs:reward"', 'command = ["theirs:x"]'])
def test_a_label_without_a_letter_hides_no_code(foreign, cusearch, setting):
    """It was imported before the label was refused."""
    for path in ("config.toml", "launch.toml", "starts/0001.toml"):
        (foreign / path).write_text(f'run.name = "atlas"\n[environment.""]\n{setting}\n')
    assert "names code, environment.." in cusearch("config", "config.toml")[0]
    assert not (foreign / "was_here").exists()


def test_a_start_that_comes_while_the_page_is_open_is_not_imported(foreign):
    """The folder was looked at when the page began."""
    shown = dashboard.shown(foreign, [])
    name_code(foreign, "environment.search.reward")

    async def ask(run):
        server = TestServer(application({"theirs": run}))
        async with TestClient(server) as client, client.get("/theirs/step/0") as answer:
            return answer.status, (await answer.json())["error"]

    status, error = asyncio.run(ask(shown))
    assert status == 404
    assert "names code, environment.search.reward = 'theirs:reward'" in error
    assert "names code" not in asyncio.run(ask(dashboard.shown(foreign, [], trusts=True)))[1]


@pytest.mark.parametrize("is_own", [True, False])
def test_a_secret_is_not_sent_to_the_address_of_another_users_config(foreign, cusearch, monkeypatch, is_own):
    """Who looked at a run sent their password to the Redis that its config named."""
    (foreign / "config.toml").write_text('run.name = "atlas"\n[redis]\nurl = "redis://127.0.0.1:1/0"\n')
    monkeypatch.setenv("CUSEARCH_REDIS_PASSWORD", "hunter2")
    if not is_own:
        monkeypatch.setattr("os.getuid", lambda: 12345)
    said = cusearch("buckets", "config.toml", "--ledger")[0]
    asked = "is another user's, and CUSEARCH_REDIS_PASSWORD would be sent to its redis.url 'redis://127.0.0.1:1/0'"
    assert (asked in said) is not is_own
    assert "hunter2" not in said


def test_a_byte_order_mark_hides_no_code(foreign, cusearch):
    name_code(foreign, "environment.search.reward")
    path = foreign / "config.toml"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert "names code, environment.search.reward = 'theirs:reward'" in cusearch("config", "config.toml")[0]


def test_a_link_hides_no_code(foreign, cusearch):
    name_code(foreign, "environment.search.reward")
    deep = foreign / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (foreign / "config.toml").rename(deep / "config.toml")
    (foreign / "config.toml").symlink_to(deep / "config.toml")
    for path in ("config.toml", "a/b/c/config.toml"):
        assert "names code, environment.search.reward = 'theirs:reward'" in cusearch("config", path)[0]
    assert not (foreign / "was_here").exists()


@pytest.mark.parametrize(
    "setting", ['reasoning_parser_plugin = "theirs.py"', 'kv_transfer_config = {kv_connector_module_path = "theirs"}']
)
def test_options_of_vllm_that_may_name_code_need_trust(foreign, cusearch, setting):
    for path in ("config.toml", "starts/0001.toml"):
        (foreign / path).write_text(f'run.name = "atlas"\n[rollout.vllm]\nenforce_eager = true\n{setting}\n')
    said = cusearch("ask", ".", "What?")[0]
    assert f"names code, rollout.vllm.{setting.partition(' ')[0]}" in said
    assert list(code_in({"rollout": {"vllm": {"max_num_seqs": 3, "quantization": "fp8", "swap_space": 4}}})) == []


def test_code_that_is_trusted_is_imported(foreign, cusearch):
    name_code(foreign, "environment.search.reward")
    assert "theirs:reward" in cusearch("config", "config.toml", "--trust")[1]
    assert (foreign / "was_here").exists()


def test_the_users_config_needs_no_trust(foreign, tmp_path, cusearch):
    """It is in no folder of a run."""
    name_code(foreign, "environment.search.reward")
    (tmp_path / "mine.toml").write_text((foreign / "config.toml").read_text())
    assert "theirs:reward" in cusearch("config", tmp_path / "mine.toml")[1]


def test_every_setting_that_may_name_code_is_known():
    """By their descriptions."""

    def described(model: type, prefix: str = ""):
        for name, field in model.model_fields.items():
            inner, label = section_of(field)
            if inner is not None and issubclass(inner, Section):
                yield from described(inner, f"{prefix}{name}.{label}")
            elif "package.module:" in (field.description or ""):
                yield prefix + name

    assert set(described(Config)) == set(CODE)
    assert set(CODE) <= set(known_keys())


def test_names_that_come_with_the_package_are_no_code(atlas_config):
    assert not list(code_in(load_config(atlas_config).model_dump(mode="json")))
