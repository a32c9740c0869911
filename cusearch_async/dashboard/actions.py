"""What an operator may do to a live run, by `cusearch buffer` or on its page; the run's folder keeps a list of it."""

from __future__ import annotations

import getpass
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from cusearch_async.errors import ConfigError, CusearchError, first_line
from cusearch_async.files import append_row
from cusearch_async.run.folder import ACTIONS, now, read_marker
from cusearch_async.transport.interface import OperatorBuffer

log = logging.getLogger(__name__)

BY_OPERATOR = "by an operator"


async def act(buffer: OperatorBuffer, run: str, folder: Path, action: str, what: str = "", reason: str = "") -> str:
    """Do one of KINDS to a run; what was done, in words. `what`: the ticket, or the trajectory.

    `folder`: of the run, if this machine has it; actions and refusals are added to its list.
    Raises: ConfigError when it cannot be done now."""
    try:
        if action not in KINDS:
            raise ConfigError(f"{action!r} is none of {', '.join(KINDS)}")
        if not (await buffer.state()).exists:
            raise ConfigError(f"no learner has started run {run!r} yet, so it cannot be changed")
        done = await KINDS[action](buffer, run, what, reason)
    except CusearchError as error:
        _keep(folder, action, what, f"refused: {first_line(error)}")
        raise
    _keep(folder, action, what, done)
    return done


def _keep(folder: Path, action: str, what: str, outcome: str) -> None:
    """Where it cannot be written, it is only logged: the run is changed already."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    try:
        if read_marker(folder) is not None:  # else it is on another machine
            row = {"time": now(), "user": user, "action": action, "what": what, "outcome": outcome}
            append_row(folder / ACTIONS, row)
    except CusearchError as error:
        log.warning("%s was not added to %s: %s", action, folder / ACTIONS, first_line(error))


async def _pause(buffer: OperatorBuffer, run: str, _what: str, _reason: str) -> str:
    await buffer.pause(True)
    return f"run {run} is paused: no new episodes start"


async def _resume(buffer: OperatorBuffer, run: str, _what: str, _reason: str) -> str:
    await buffer.pause(False)
    return f"run {run} is resumed"


async def _requeue(buffer: OperatorBuffer, _run: str, what: str, _reason: str) -> str:
    if not what.isdecimal():
        raise ConfigError(f"a ticket is a number, got {what!r}")
    if not await buffer.reopen(int(what)):
        raise ConfigError(
            f"ticket {what} is not leased and has no incomplete group; `cusearch buckets` shows the groups"
        )
    return f"ticket {what} is requeued"


async def _quarantine(buffer: OperatorBuffer, _run: str, what: str, reason: str) -> str:
    if not await buffer.quarantine(what, reason or BY_OPERATOR):
        raise ConfigError(f"trajectory {what!r} is not in the buffer; `cusearch buffer ls` lists all")
    return f"trajectory {what} is quarantined"


KINDS: dict[str, Callable[[OperatorBuffer, str, str, str], Awaitable[str]]] = {
    "pause": _pause,
    "resume": _resume,
    "requeue": _requeue,
    "quarantine": _quarantine,
}
