"""Child processes: none of them outlives this process."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cusearch_async.lifecycle.entry import STOPPED

log = logging.getLogger(__name__)

LEAVE_S = 60.0
"""Seconds that the other ranks have to end after the learner has finished."""
ENDING_S = 30.0
"""Where another rank has failed, seconds in which rank 0 may end by itself, and tell of it; it may wait without end."""
_PR_SET_PDEATHSIG = 1

failed_ranks: list[str] = []
"""Other ranks of this machine that have ended with an error, and their status."""

ENTRY = "cusearch_async.cli.main"
"""The module of `cusearch`."""
CLI = (sys.executable, "-m", ENTRY)
"""The command line of `cusearch`, in this environment."""

_ENDED = re.compile(r"(?:rollout|learner|retriever|evaluator|cusearch): .+")
_ENGINE = re.compile(r"\(EngineCore[^)]*\).*?\b(\w+(?:Error|Exception): .+)")
_RAISED = re.compile(r"[\w.]*(?:Error|Exception|Interrupt)\b.*")


def start_child(
    command: Sequence[str],
    env: dict[str, str] | None = None,
    log_file: Path | None = None,
    inherited: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process that does not outlive this one, not even after kill -9. It gets no signals from the terminal.

    Its output is appended to `log_file`, or goes to this process's output. It gets the file handles `inherited`."""
    output = log_file.open("ab") if log_file else None
    try:
        return subprocess.Popen(
            list(command),
            env=os.environ | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=inherited,
            preexec_fn=die_with_parent,  # noqa: PLW1509  (no threads run yet where children are started)
        )
    finally:
        if output:
            output.close()


def why_it_ended(output: Path, since: int = 0) -> str:
    """Why a process has ended, from its log, of which the bytes before `since` are earlier: the last line that our code
    printed, and the error of its engine. Without these, the last error; without an error, the last line, if any."""
    with output.open("rb") as file:
        file.seek(since)
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    ended = [line for line in lines if _ENDED.fullmatch(line)]
    engine = [match[1] for match in map(_ENGINE.match, lines) if match]
    raised = [line for line in lines if _RAISED.fullmatch(line)]
    last = (ended or engine or raised or lines or [""])[-1]
    if ended and engine and engine[-1] not in last:
        last = f"{last} ({engine[-1]})"
    return last[:500]


def die_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Let the kernel send this process the signal `by` when its parent ends for any reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)


@contextmanager
def other_ranks(module: str, count: int) -> Iterator[int]:
    """Run as rank 0 of `count` with the other ranks as children, which run `module` with this process's arguments, or
    as the rank in RANK; yields the rank.

    When another rank fails, this process ends too: it would wait for that rank in a collective."""
    if "RANK" in os.environ or count == 1:
        yield int(os.environ.get("RANK", "0"))
        return
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", module, *sys.argv[1:]]
    children = [start_child(command, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(1, count)]
    os.environ.update(shared | {"RANK": "0", "LOCAL_RANK": "0"})
    ending = threading.Event()
    for rank, child in enumerate(children, start=1):
        threading.Thread(target=_end_when_child_fails, args=(rank, child, ending), daemon=True).start()
    try:
        yield 0
        ending.set()
        _wait_for_other_ranks(children)
    finally:
        ending.set()
        for child in children:
            child.kill()


def free_port() -> int:
    """A free TCP port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_other_ranks(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for the other ranks after the learner has finished. Their exit status does not change its result."""
    deadline = time.monotonic() + LEAVE_S
    for rank, child in enumerate(children, start=1):
        try:
            status = child.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("rank %d did not end within %g s; killed", rank, LEAVE_S)
        else:
            if status not in (0, STOPPED):
                log.warning("rank %d ended with status %d after the learner had finished", rank, status)


def _end_when_child_fails(rank: int, child: subprocess.Popen[bytes], ending: threading.Event) -> None:
    status = child.wait()
    if status not in (0, STOPPED) and not ending.is_set():
        failed_ranks.append(f"rank {rank} ended with status {status}")
        log.error("%s; the learner ends too", failed_ranks[-1])
        if not ending.wait(ENDING_S):
            os._exit(1)
