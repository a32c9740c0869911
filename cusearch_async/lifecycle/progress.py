"""Saying in the log what is waited for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SAY_S = 5.0
"""Seconds between two lines about what is still waited for."""


@contextmanager
def saying(log: logging.Logger, what: str) -> Iterator[None]:
    """Around what may take long, also what blocks: every SAY_S a thread logs `what`, and how long it has lasted."""
    began, ended = time.monotonic(), threading.Event()

    def say() -> None:
        while not ended.wait(SAY_S):
            log.info("%s: %.0f s", what, time.monotonic() - began)

    thread = threading.Thread(target=say, name="saying", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
