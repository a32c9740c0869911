"""Signals that ask a process to stop, and ending what it does when one comes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import Any

CANCEL_AGAIN_S = 1.0
"""Seconds that a cancelled task is given before it is cancelled once more."""


def stop_signals() -> list[signal.Signals]:
    """What asks a process to end in good order: ctrl-C, SIGTERM, and a terminal that is closed or an ssh that is cut
    off; not the last where `nohup` has said so."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


def stop_on_signals() -> asyncio.Event:
    """An event that `stop_signals` set; loops watch it and end by themselves."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
    return stop


async def unless_stopped(work: asyncio.Future[Any], stop: asyncio.Event) -> bool:
    """Wait for `work`, or end it when `stop` is set; whether it was done."""
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        stopped.cancel()
        await end_tasks([work])


async def end_tasks(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks until they have ended: a library in between may swallow one cancellation."""
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
