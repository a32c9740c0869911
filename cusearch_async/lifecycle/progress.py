"""Saying in the log what is waited for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOG_EVERY_S = 5.0
"""Seconds between two lines about what is still waited for."""


@contextmanager
def log_waiting(log: logging.Logger, what: str) -> Iterator[None]:
    """Around what may take long, also what blocks: every LOG_EVERY_S a thread logs `what`, and how long it has lasted."""
    began, ended = time.monotonic(), threading.Event()

    def say() -> None:
        while not ended.wait(LOG_EVERY_S):
            log.info("%s: %.0f s", what, time.monotonic() - began)

    thread = threading.Thread(target=say, name="log_waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
