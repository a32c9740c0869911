"""Agents that are programs: a process for every episode."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from cusearch_async.environments.task import Ending, Task
from cusearch_async.errors import EpisodeFailed

KEPT_BYTES = 4096
"""Of the end of what a program writes."""


async def run_program(command: Sequence[str], task: Task) -> Ending:
    """The last line that the program writes (None when it writes none), and the end of its errors. It finds its task in
    its environment: OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, the first two for ANTHROPIC, too, CUSEARCH_QUESTION,
    CUSEARCH_QUESTION_ID and CUSEARCH_SEARCH_URL.

    Raises: EpisodeFailed with the last line of its errors when its exit status is not 0, or it cannot be started."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=_environment(task), start_new_session=True
        )
    except OSError as error:
        raise EpisodeFailed(f"{command[0]} cannot be started: {error.strerror}") from error
    try:
        written, errors = await asyncio.gather(_end_of(process.stdout), _end_of(process.stderr))
        status = await process.wait()
    finally:  # also when the episode is cancelled, or takes too long
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if status:
        raise EpisodeFailed(f"{command[0]} ended with status {status}: {_last_line(errors) or 'it wrote no error'}")
    return Ending(_last_line(written), errors)


def _environment(task: Task) -> dict[str, str]:
    """Without our own variables, which hold passwords and tokens; a program in Python finds the modules beside it,
    which processes of a run do not look for."""
    ours = ("CUSEARCH_", "PYTHONSAFEPATH")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return inherited | {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "OPENAI_MODEL": task.model,
        "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": task.api_key,
        "CUSEARCH_QUESTION": task.question,
        "CUSEARCH_QUESTION_ID": task.question_id,
        "CUSEARCH_SEARCH_URL": task.search_url,
    }


async def _end_of(stream: asyncio.StreamReader | None) -> str:
    """The last KEPT_BYTES of a stream, as text."""
    pieces: deque[bytes] = deque(maxlen=2)
    while stream is not None and (piece := await stream.read(KEPT_BYTES)):
        pieces.append(piece)
        while len(pieces) == 2 and len(pieces[0]) + len(pieces[1]) <= KEPT_BYTES:  # short pieces
            pieces.append(pieces.popleft() + pieces.popleft())
    return b"".join(pieces)[-KEPT_BYTES:].decode(errors="replace")


def _last_line(text: str) -> str | None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None
