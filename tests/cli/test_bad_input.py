"""Bad input to a process of its own: one line and status 1, also through the interpreter. `bad_inputs` lists many."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from cusearch_async.config import load_config, save_config
from cusearch_async.run import folder as run_folder
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import WorkerStatus
from tests.conftest import SLOW, free_port

pytestmark = pytest.mark.system  # each starts an interpreter of its own

TEN_MINUTES_MS = 600_000
"""A heartbeat so far ahead is that of a living worker, however slowly the command starts."""


def refused(*command: str) -> str:
    """Run `python -m COMMAND...`; it must fail with one line, which is returned."""
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=60 * SLOW, check=False
    )
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture
def launch(atlas_config, tmp_path):
    """`cusearch launch` on private addresses, with overrides."""
    addresses = ["--run.folder", str(tmp_path / "run"), "--redis.url", f"redis://127.0.0.1:{free_port()}/0"]
    addresses += ["--retriever.url", f"http://127.0.0.1:{free_port()}"]

    def run(*overrides: str) -> str:
        line = refused("cusearch_async.cli.main", "launch", str(atlas_config), *addresses, *overrides)
        assert not (tmp_path / "run").exists(), "nothing may be half-started"
        return line

    return run


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["--learner.lrr", "1"], ["learner.lrr", "unknown", "learner.lr"]),
        (["--episode.max_turn_tokens", "200"], ["1736", "1024", "max_turn_tokens"]),
    ],
)
def test_an_impossible_setting_names_key_value_and_remedy(launch, overrides, parts):
    line = launch(*overrides)
    assert all(part in line for part in parts), line


def test_a_folder_that_is_no_run_is_never_deleted(atlas_config, tmp_path, redis_url):
    precious = tmp_path / "thesis.txt"
    precious.write_text("years of work")
    line = refused(
        "cusearch_async.cli.main", "reset", str(atlas_config), "--redis.url", redis_url, "--run.folder", str(tmp_path)
    )
    assert "holds no run.json, so it is not the folder of a run; nothing in it was deleted" in line
    assert precious.exists()


def test_a_demo_in_a_folder_that_is_no_runs_is_refused(atlas_config, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "config.toml").write_text("title = 'my blog'")
    line = refused("cusearch_async.cli.main", "demo", str(atlas_config), "--run.folder", str(site))
    assert f"{site} holds no run.json, so it is not the folder of a run; choose another with --run.folder" in line
    assert (site / "config.toml").read_text() == "title = 'my blog'"


def test_a_redis_on_a_taken_port_names_the_address_and_leaves_nothing(atlas_config, tmp_path, redis_url):
    folder = tmp_path / "run"
    line = refused(
        "cusearch_async.cli.main", "redis", str(atlas_config), "--run.folder", str(folder), "--redis.url", redis_url
    )
    assert f"redis.url {redis_url}: something listens there already; choose another port" in line
    assert not folder.exists()


def test_help_needs_no_config():
    done = subprocess.run([sys.executable, "-m", "cusearch_async.cli.main", "--help"], capture_output=True, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("command", ["reset", "demo", "launch"])
async def test_a_run_that_is_alive_is_not_forgotten(atlas_config, tmp_path, redis_url, command):
    overrides = ["--redis.url", redis_url, "--run.folder", str(tmp_path / "run"), "--run.name", f"alive-{command}"]
    config = load_config(atlas_config, overrides)
    run_folder.mark(config.folder, config.run.name)
    save_config(config, config.folder / "config.toml")
    async with open_buffer(config) as buffer:
        await buffer.recover(0)
        await buffer.heartbeat("w1", [], WorkerStatus(version=0))
        await buffer.connection.client.zincrby(buffer.keys.workers, TEN_MINUTES_MS, "w1")
        line = await asyncio.to_thread(refused, "cusearch_async.cli.main", command, str(atlas_config), *overrides)
        assert "is alive: w1" in line
        assert (config.folder / "config.toml").exists()
        assert "w1" in await buffer.workers()
