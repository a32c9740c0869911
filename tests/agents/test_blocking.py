"""A program that blocks the event loop is named: nothing in the loop can tell."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cusearch_async.agents import blocking
from cusearch_async.environments.task import Task
from tests.agents.test_episodes import Scene, parser  # noqa: F401  (a fixture)
from tests.agents.test_unruly import ask
from tests.conftest import SLOW


async def blocks(task: Task) -> str:
    time.sleep(0.5 * SLOW)  # noqa: ASYNC251  (that is what it does)
    return await ask(task)


async def test_a_blocked_loop_is_logged_once_with_who_may_do_it_and_where(monkeypatch, caplog):
    monkeypatch.setattr(blocking, "BLOCKED_S", 0.1 * SLOW)
    scene = Scene(["5", "5"])
    scene.runner._environments["a"].agent = blocks
    assert (await scene.run()).prediction == "5"
    (said,) = [record.message for record in caplog.records if "blocked" in record.message]
    assert said.startswith(f"the event loop is blocked at {__file__}:{blocks.__code__.co_firstlineno + 1}, ")
    assert "if the agent tests.agents.programs:with_tools does that, use an asynchronous client" in said


def test_of_a_thread_the_newest_line_is_found_that_is_no_librarys():
    begun, end = threading.Event(), threading.Event()

    def waits() -> None:
        begun.set()
        end.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    begun.wait()
    time.sleep(0.05)
    assert blocking.newest_line(thread.ident or 0) == f"{__file__}:{waits.__code__.co_firstlineno + 2}"
    end.set()
    thread.join()
    assert blocking.newest_line(thread.ident or 0) == "?"


async def test_a_loop_that_runs_is_not_blocked():
    assert not await asyncio.to_thread(blocking.is_blocked, asyncio.get_running_loop(), 5.0 * SLOW)


HANGS = """
import asyncio, sys, threading
import uvloop
from cusearch_async.agents import episode
from cusearch_async.errors import EpisodeFailed
from cusearch_async.lifecycle import signals
from cusearch_async.lifecycle.entry import exit_with_one_line
from tests.agents.test_episodes import hermes
from tests.agents.test_unruly import ask, scene_of

episode.parser_of, episode.END_S, signals.LEFT_S = (lambda *_: hermes), 0.05, 0.2

async def in_a_thread(task):
    await asyncio.to_thread(threading.Event().wait)

async def never_ends(task):
    while True:
        try:
            await asyncio.sleep(0.01)
            await ask(task)
            await asyncio.sleep(1000)
        except BaseException:
            pass

async def leaves_a_task(task):
    episode.kept = asyncio.create_task(never_ends(task))
    return await ask(task)

async def main():
    for agent in (in_a_thread, never_ends, leaves_a_task):
        try:
            print((await scene_of(agent, timeout_s=0.5).run()).prediction)
        except EpisodeFailed as error:
            print(error)

    if sys.argv[1:]:
        raise EpisodeFailed("an outage")

with exit_with_one_line("rollout"):
    uvloop.run(signals.ending(main()))
"""


@pytest.mark.parametrize("fails", [False, True])
def test_what_agents_leave_behind_does_not_keep_the_worker_from_ending(fails):
    """A thread that never returns, a task that ignores that it is cancelled, one that an agent began: asyncio waited
    for each, and SIGTERM did not help."""
    command, here = [sys.executable, "-c", HANGS, *["fails"] * fails], Path(__file__).parents[2]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=here, timeout=60 * SLOW)
    late = "the agent tests.agents.programs:with_tools took longer than episode.timeout_s (0.5 s)"
    assert done.stdout.splitlines() == [late, late, "5"]
    left = [line for line in done.stderr.splitlines() if line.endswith("though it is cancelled; it is left")]
    assert (len(left), done.returncode) == (2, int(fails)), done.stderr
    assert ("rollout: an outage" in done.stderr) == fails
