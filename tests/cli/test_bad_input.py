"""Bad input to a separate process: one line and status 1, also through the interpreter. `bad_inputs` lists many."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from cusearch_async.config import load_config, save_config
from cusearch_async.run import folder as run_folder
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import WorkerStatus
from tests.conftest import SLOW

pytestmark = pytest.mark.system  # each starts an interpreter

AHEAD_MS = 50_000
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


@pytest.mark.parametrize("command", ["reset", "demo", "launch"])
async def test_a_run_that_is_alive_is_not_forgotten(atlas_config, tmp_path, redis_url, command):
    overrides = ["--redis.url", redis_url, "--run.folder", str(tmp_path / "run"), "--run.name", f"alive-{command}"]
    config = load_config(atlas_config, overrides)
    run_folder.mark(config.folder, config.run.name)
    save_config(config, config.folder / "config.toml")
    async with open_buffer(config) as buffer:
        await buffer.recover(0)
        await buffer.heartbeat("w1", [], WorkerStatus(version=0))
        await buffer.connection.client.zincrby(buffer.keys.workers, AHEAD_MS, "w1")
        line = await asyncio.to_thread(refused, "cusearch_async.cli.main", command, str(atlas_config), *overrides)
        assert "is alive: w1" in line
        assert (config.folder / "config.toml").exists()
        assert "w1" in await buffer.workers()
