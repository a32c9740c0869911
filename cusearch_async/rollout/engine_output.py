"""What vLLM's engine process says: passed on, and its last words kept, for it tells its owner only that it is dead."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

_KEPT_LINES = 500
_WAIT_S = 2.0
"""A process may be known to be dead before its last line has come through."""
_ERROR = re.compile(rb"\b((?:\w+\.)*\w*(?:Error|Exception|Exit): .*?)\s*$")


class EngineOutput:
    """The output of the processes that are started within `listening`."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Our own output takes the same way meanwhile; all of it goes to our standard error, as it comes."""
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        ours = os.dup(1), os.dup(2)
        threading.Thread(target=self._pass_on, args=(read, os.dup(2)), daemon=True).start()
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(write)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(ours, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)

    def last_error(self) -> str | None:
        """The last line that names an error (`RuntimeError: out of memory`), without what the logger puts before it."""
        until = time.monotonic() + _WAIT_S
        while True:
            for line in reversed(list(self._lines)):
                found = _ERROR.search(line)
                if found:
                    return found[1].decode(errors="replace")
            if time.monotonic() > until:
                return None
            time.sleep(0.05)

    def _pass_on(self, read: int, to: int) -> None:
        with open(read, "rb", buffering=0) as said, contextlib.suppress(OSError):
            rest = b""
            while piece := said.read(1 << 16):
                *lines, rest = (rest + piece).split(b"\n")
                self._lines.extend(lines)
                os.write(to, piece)
