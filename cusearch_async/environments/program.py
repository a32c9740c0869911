"""Agents that are programs: a process for every episode."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Collection, Sequence
from contextlib import suppress

from cusearch_async.environments.task import Ending, Task
from cusearch_async.errors import EpisodeFailed

KEPT_BYTES = 4096
"""Of the end of a program's errors."""
ANSWER_BYTES = 2**18 + 2**12
"""Of the end of what it writes: more than any answer may have, which is then refused and not cut."""
LOOK_S = 1.0
"""A program whose output stays open has ended for at most twice this time when that is seen: a process that it has
started may hold it."""
_SECRET = re.compile(
    r"CUSEARCH_|PYTHONSAFEPATH$|AWS_|AZURE_|GOOGLE_|.+_PWD$|.*WEBHOOK|(.*_)?(AUTH|PAT|JWT|DSN)(_.*)?$"
    r"|.*(TOKENS?|SECRETS?|PASS(WORD|WD|PHRASE|FILE)?|KEYS?|CREDENTIALS?)(_.*)?$",
    re.IGNORECASE,
)
_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")
"""Variables that a program does not inherit, and addresses in others: it may run what the policy writes."""


async def run_program(command: Sequence[str], passes: Collection[str], task: Task) -> Ending:
    """The last line that the program writes (None when it writes none), and the end of its errors. It finds its task in
    its environment: OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, the first two for ANTHROPIC, too, CUSEARCH_QUESTION,
    CUSEARCH_QUESTION_ID and CUSEARCH_SEARCH_URL. Of variables that look like secrets it has those that are in `passes`.

    Raises: EpisodeFailed with the last line of its errors when its exit status is not 0, or it cannot be started."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=_environment(passes, task), start_new_session=True
        )
    except OSError as error:
        raise EpisodeFailed(f"{command[0]} cannot be started: {error.strerror}") from error
    written, errors = _End(ANSWER_BYTES), _End(KEPT_BYTES)
    reading = [asyncio.ensure_future(written.read(process.stdout)), asyncio.ensure_future(errors.read(process.stderr))]
    try:
        while process.returncode is None:
            if running := [one for one in reading if not one.done()]:
                await asyncio.wait(running, timeout=LOOK_S)
            else:
                await process.wait()
    finally:  # also when the episode is cancelled, or takes too long
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        while process.returncode is None:
            await asyncio.sleep(0.01)
        await asyncio.wait(reading, timeout=LOOK_S)
        for one in reading:
            one.cancel()
        process._transport.close()  # type: ignore[attr-defined]
    if process.returncode:
        status = process.returncode
        raise EpisodeFailed(f"{command[0]} ended with status {status}: {errors.last_line or 'it wrote no error'}")
    return Ending(written.last_line, errors.text)


def _environment(passes: Collection[str], task: Task) -> dict[str, str]:
    """A program in Python finds the modules beside it, which processes of a run do not look for."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in passes or not (_SECRET.match(name) or _WITH_PASSWORD.search(value))
    }
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


class _End:
    """The last bytes of a stream."""

    def __init__(self, most: int) -> None:
        self._most, self._kept = most, b""

    async def read(self, stream: asyncio.StreamReader | None) -> None:
        while stream is not None and (piece := await stream.read(self._most)):
            self._kept = (self._kept + piece)[-self._most :]

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")

    @property
    def last_line(self) -> str | None:
        lines = [line.strip() for line in self.text.split("\n") if line.strip()]  # an answer may hold U+2028
        return lines[-1] if lines else None
