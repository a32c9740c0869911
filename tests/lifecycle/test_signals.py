"""A process stops when it is asked to, whatever swallows a cancellation."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cusearch_async.lifecycle import signals
from cusearch_async.lifecycle.signals import ending_at_once, stop_on_signals, stop_signals, unless_stopped
from tests.conftest import SLOW, wait_until


@pytest.mark.parametrize(
    ("number", "nohup"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGHUP, False), (signal.SIGHUP, True)],
)
async def test_a_process_is_asked_to_stop_by_each_signal_unless_nohup_ignores_it(number: signal.Signals, nohup: bool):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)  # tests may run under nohup
    try:
        stop = stop_on_signals()
        os.kill(os.getpid(), number)
        if nohup:
            await asyncio.sleep(0.05)
            assert not stop.is_set()
        else:
            await asyncio.wait_for(stop.wait(), 5 * SLOW)
    finally:
        for handled in stop_signals():
            asyncio.get_running_loop().remove_signal_handler(handled)
        signal.signal(signal.SIGHUP, before)


async def test_work_that_swallows_its_cancellation_is_cancelled_again(monkeypatch):
    monkeypatch.setattr(signals, "CANCEL_AGAIN_S", 0.05)
    swallowed = []

    async def work() -> None:
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                if len(swallowed) == 2:
                    raise
                swallowed.append("once more")

    stop = asyncio.Event()
    waiting = asyncio.create_task(unless_stopped(asyncio.ensure_future(work()), stop))
    await asyncio.sleep(0.01)
    stop.set()
    done, _ = await asyncio.wait((waiting,), timeout=20 * SLOW)
    assert done
    assert waiting.result() is False
    assert len(swallowed) == 2


LOADS = """
import asyncio, multiprocessing, pathlib, sys, time
import uvloop
from cusearch_async.lifecycle.signals import ending_at_once, stop_on_signals

async def run():
    stop_on_signals()
    engine = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    engine.start()
    with ending_at_once("it was loading", pathlib.Path(sys.argv[2]).touch):
        print(engine.pid, flush=True)
        time.sleep(600)

sys.argv[1] == "uvloop" and uvloop.install()
asyncio.run(run())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_loads_ends_at_once_with_all_that_it_has_spawned(loop: str, number: signal.Signals, tmp_path):
    given_back = tmp_path / "given_back"
    worker = subprocess.Popen([sys.executable, "-c", LOADS, loop, given_back], stdout=subprocess.PIPE, text=True)
    engine = Path("/proc") / worker.stdout.readline().strip()
    worker.send_signal(number)
    assert worker.wait(5 * SLOW) == 128 + number
    assert given_back.exists()
    worker.stdout.close()
    wait_until(lambda: not engine.exists() or "Z (zombie)" in (engine / "status").read_text(), 5)


def test_signals_that_nobody_handles_keep_their_effect_while_something_loads():
    before = signal.getsignal(signal.SIGINT)
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with ending_at_once("it was loading"):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGTERM, handler)
