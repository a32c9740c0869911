"""Logs what a process is waiting for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOG_EVERY_S = 5.0
"""Seconds until the first line about a wait."""
LOG_AT_LEAST_EVERY_S = 60.0


def next_line_s(waited_s: float) -> float:
    """Seconds from the start of a wait to the next line about it, when the last one was after `waited_s`: twice as
    long, and at most LOG_AT_LEAST_EVERY_S later."""
    return waited_s + min(max(waited_s, LOG_EVERY_S), LOG_AT_LEAST_EVERY_S)


@contextmanager
def log_waiting(log: logging.Logger, what: str) -> Iterator[None]:
    """Wraps an operation that may take long, also one that blocks: a thread logs `what` and the seconds so far, first
    after LOG_EVERY_S, then less and less often."""
    began, ended = time.monotonic(), threading.Event()

    def report() -> None:
        waited_s = 0.0
        while not ended.wait(began + next_line_s(waited_s) - time.monotonic()):
            waited_s = time.monotonic() - began
            log.info("%s: %.0f s", what, waited_s)

    thread = threading.Thread(target=report, name="log_waiting", daemon=True)
    try:
        thread.start()
        yield
    finally:
        ended.set()
        if thread.is_alive():  # ctrl-C may come before it is
            thread.join()
