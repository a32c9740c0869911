"""A process stops when it is asked to, whatever swallows a cancellation."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from cusearch_async.lifecycle import signals
from cusearch_async.lifecycle.signals import stop_on_signals, stop_signals, unless_stopped
from tests.conftest import SLOW


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_process_is_asked_to_stop_by_each_signal(number: signal.Signals):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    try:
        stop = stop_on_signals()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 5 * SLOW)
    finally:
        for handled in stop_signals():
            asyncio.get_running_loop().remove_signal_handler(handled)
        signal.signal(signal.SIGHUP, before)


async def test_nohup_is_heeded():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = stop_on_signals()
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert not stop.is_set()
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
