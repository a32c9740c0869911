"""Whether an event loop is blocked, seen from another thread: then nothing in it can tell."""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time

log = logging.getLogger(__name__)

BLOCKED_S = 20.0
"""A loop that does nothing for so long is blocked: no episode of the worker continues, nor does its heartbeat."""
_LIBRARIES = tuple({path for name, path in sysconfig.get_paths().items() if name.endswith(("lib", "stdlib"))})
REMEDY = "use an asynchronous client, or asyncio.to_thread"


def is_blocked(loop: asyncio.AbstractEventLoop, seconds: float) -> bool:
    """Whether it does nothing for so long. Raises: RuntimeError when it is closed."""
    beat = threading.Event()
    loop.call_soon_threadsafe(beat.set)
    return not beat.wait(seconds) and loop.is_running()


def newest_line(thread: int) -> str:
    """FILE:LINE of a thread's newest frame that is of no library, or of its newest."""
    newest = frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    found = frame or newest
    return f"{found.f_code.co_filename}:{found.f_lineno}" if found else "?"


def watch(loop: asyncio.AbstractEventLoop, name: str) -> None:
    """From now on log when the loop of this thread is blocked. `name`: who may do that."""
    threading.Thread(target=_watch, args=(loop, threading.get_ident(), name), name="watch", daemon=True).start()


def _watch(loop: asyncio.AbstractEventLoop, thread: int, name: str) -> None:
    was_blocked = False
    while not loop.is_closed():
        try:
            blocks = is_blocked(loop, BLOCKED_S)
        except RuntimeError:  # it has been closed just now
            return
        if blocks and not was_blocked:
            text = "the event loop is blocked at %s, and all episodes wait; if %s does that, %s"
            log.warning(text, newest_line(thread), name, REMEDY)
        was_blocked = blocks
        time.sleep(BLOCKED_S)
