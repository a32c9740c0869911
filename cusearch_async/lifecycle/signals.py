"""Signals that ask a process to stop, and how it stops its work."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

log = logging.getLogger(__name__)

CANCEL_AGAIN_S = 1.0
"""Seconds after which a cancelled task that still runs is cancelled again."""

LEFT_S = 5.0

Result = TypeVar("Result")

_asked: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()
"""Event loops that were asked to stop, and by which signal."""


def stop_signals() -> list[signal.Signals]:
    """The signals that ask a process to stop cleanly: SIGINT, SIGTERM, and SIGHUP (a closed terminal or ssh connection)
    unless `nohup` ignores it."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


def stop_on_signals() -> asyncio.Event:
    """An event that is set by `stop_signals`; loops check it and end."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def ask(number: int) -> None:
        log.info("stopping after %s", signal.Signals(number).name)
        _asked[loop] = number
        stop.set()

    for number in stop_signals():
        loop.add_signal_handler(number, ask, number)
    return stop


@contextmanager
def ending_at_once(what: str, give_back: Callable[[], None] = lambda: None) -> Iterator[Callable[[], None]]:
    """For a long call that blocks the event loop, like loading an engine: a signal that asks to stop ends this process,
    and those that it has spawned, with the status that shells give it. No more may be held than `give_back` gives back.
    Signals that nobody handles keep their effect. Yields what ends the process if its event loop was asked to stop just
    before."""

    def end(number: int, _: object = None) -> None:
        log.info("stopped while %s", what)
        for child in multiprocessing.active_children():
            child.kill()
        give_back()
        os._exit(128 + number)

    def end_if_asked() -> None:
        if asked := _asked.get(asyncio.get_running_loop()):
            end(asked)

    unhandled = (signal.SIG_DFL, signal.SIG_IGN, None)
    before = {number: signal.getsignal(number) for number in stop_signals()}
    handled = {number: handler for number, handler in before.items() if handler not in unhandled}
    for number in handled:
        signal.signal(number, end)
    try:
        yield end_if_asked
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)


@asynccontextmanager
async def later(event: asyncio.Event, seconds: float) -> AsyncIterator[asyncio.Event]:
    """An event that is set so many seconds after another one."""
    late = asyncio.Event() if seconds else event

    async def follow() -> None:
        await event.wait()
        await asyncio.sleep(seconds)
        late.set()

    following = asyncio.create_task(follow())
    try:
        yield late
    finally:
        await end_tasks([following])


async def unless_stopped(work: asyncio.Future[Any], stop: asyncio.Event) -> bool:
    """Wait for `work`, or cancel it when `stop` is set. True when the work is done."""
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        stopped.cancel()
        await end_tasks([work])


async def ending(work: Coroutine[Any, Any, Result]) -> Result:
    """What `work`, all that an event loop is for, gives. Tasks of users' programs that still run then are cancelled,
    and after LEFT_S left: asyncio would wait for them without end."""
    try:
        return await work
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        with suppress(TimeoutError):
            async with asyncio.timeout(LEFT_S):
                await end_tasks([*left])
        for task in left:
            if not task.done():
                log.warning("%r does not end though it is cancelled; it is left", task.get_coro())
                asyncio._unregister_task(task)  # documented, for other kinds of tasks
                # Python never closes it at its end: one that catches everything would run without end.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


async def end_tasks(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks until they have ended: a library may swallow one cancellation."""
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
