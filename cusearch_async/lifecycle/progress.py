"""Logs what a process is waiting for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOG_EVERY_S = 5.0
"""Seconds between two lines about the same wait."""


@contextmanager
def log_waiting(log: logging.Logger, what: str) -> Iterator[None]:
    """Wraps an operation that may take long, also one that blocks: every LOG_EVERY_S a thread logs `what` and the
    seconds so far."""
    began, ended = time.monotonic(), threading.Event()

    def report() -> None:
        while not ended.wait(LOG_EVERY_S):
            log.info("%s: %.0f s", what, time.monotonic() - began)

    thread = threading.Thread(target=report, name="log_waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
