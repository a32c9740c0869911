"""Captures the output of vLLM's engine process: vLLM itself reports only that the engine has died."""

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
"""Seconds to wait for the last line of a dead process."""
_ERROR = re.compile(rb"\b((?:\w+\.)*\w*(?:Error|Exception|Exit): .*?)\s*$")


class EngineOutput:
    """The output of the processes that are started inside `listening`."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Redirects standard output and error of this process and its children: everything is recorded, and written to
        standard error."""
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
        """The last error in the output (like `RuntimeError: out of memory`), without the prefix of the logger."""
        until = time.monotonic() + _WAIT_S
        while True:
            for line in reversed(list(self._lines)):
                if found := _ERROR.search(line):
                    return found[1].decode(errors="replace")
            if time.monotonic() > until:
                return None
            time.sleep(0.05)

    def forget(self) -> None:
        """What was printed so far has been dealt with: it is not why the process will have died."""
        self._lines.clear()

    def _pass_on(self, read: int, to: int) -> None:
        with open(read, "rb", buffering=0) as output, contextlib.suppress(OSError):
            rest = b""
            while piece := output.read(1 << 16):
                *lines, rest = (rest + piece).split(b"\n")
                self._lines.extend(lines)
                os.write(to, piece)
