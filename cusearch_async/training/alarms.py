"""Tells of the alarms that begin, and of a run that ends with an error: in the log, by a command, to a URL. No step
waits for these."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import aiohttp

from cusearch_async.alarms.firing import Alarm, firing_of, look_closer
from cusearch_async.alarms.history import History, Limits
from cusearch_async.config import Config, is_loopback
from cusearch_async.config.alarms import AlarmsConfig
from cusearch_async.errors import Fenced, StoppedByAlarm, first_line
from cusearch_async.metrics.files import read_metrics
from cusearch_async.metrics.table import Metrics
from cusearch_async.run.folder import METRICS

log = logging.getLogger(__name__)

HOOK_S = 10.0
"""Longest time of a command, or of a request."""
ENDED = "run_ended"
"""What hooks are told when an error has ended the run, in place of an alarm's name."""


class AlarmWatch:
    """Looks at every step of the run, from its first one on."""

    def __init__(self, config: Config, epoch: int, from_step: int) -> None:
        self._folder, self._settings = config.folder, config.alarms
        self._epoch = epoch
        self._history = History(Limits.of(config.model_dump(mode="json")))
        earlier = read_metrics(config.folder / METRICS)
        self._rows: list[dict[str, Any]] = [row for row in earlier if row["step"] < from_step]
        self._hooks: set[asyncio.Task[None]] = set()

    def look(self, step: int, row: Metrics) -> list[Alarm]:
        """The alarms that fire at this step; of those that begin, log and hooks are told."""
        self._rows.append({"step": step, "epoch": self._epoch, **row})
        firing = firing_of(self._rows, self._history)
        for alarm in firing:
            if alarm.first == step:
                log.warning("alarm %s", text_of(alarm, self._folder))
                self._begin(alarm)
        return firing

    async def refuse(self, firing: list[Alarm]) -> None:
        """Raises: StoppedByAlarm for one of alarms.stop_on, once the hooks are told."""
        for alarm in firing:
            if alarm.rule.name in self._settings.stop_on:
                await self.finish()
                raise StoppedByAlarm(
                    f"alarm {text_of(alarm, self._folder)} The run ends (alarms.stop_on); it continues from its newest "
                    "checkpoint"
                )

    async def finish(self) -> None:
        """Wait for the hooks that were begun; each is bounded in time."""
        await asyncio.gather(*self._hooks)

    def _begin(self, alarm: Alarm) -> None:
        task = asyncio.ensure_future(
            tell(self._settings, alarm.rule.name, text_of(alarm, self._folder), self._folder, alarm.last)
        )
        self._hooks.add(task)
        task.add_done_callback(self._hooks.discard)


async def tell_of_end(config: Config, error: Exception, step: int) -> None:
    """Tell the hooks of an error that has ended the run in `step`. An alarm of alarms.stop_on they know, and a run that
    another learner has taken over continues."""
    if not isinstance(error, StoppedByAlarm | Fenced):
        text = f"{config.run.name} has ended in step {step}: {first_line(error)}"
        await tell(config.alarms, ENDED, text, config.folder, step)


async def tell(settings: AlarmsConfig, name: str, text: str, folder: Path, step: int) -> None:
    """Run the command and the request of `settings`."""
    values = {"name": name, "text": text, "run": str(folder)}
    hooks: list[Awaitable[None]] = []
    if settings.command:
        hooks.append(run_command([word.format(**values, step=step) for word in settings.command]))
    if settings.url:
        hooks.append(post(settings.url, values | {"step": step}))
    await asyncio.gather(*(bounded(hook, name) for hook in hooks))


def text_of(alarm: Alarm, folder: Path) -> str:
    """In two sentences, with a command to look closer."""
    return (
        f"{alarm.rule.name} at step {alarm.last}: {alarm.evidence}. {alarm.rule.cause} {alarm.rule.remedy} "
        f"Look closer: {look_closer(alarm, folder)}"
    )


async def bounded(hook: Awaitable[None], name: str) -> None:
    """A hook that fails, or takes longer than HOOK_S, is logged."""
    try:
        await asyncio.wait_for(hook, HOOK_S)
    except TimeoutError:
        log.warning("the hook of alarm %s took more than %.0f s", name, HOOK_S)
    except (aiohttp.ClientResponseError, aiohttp.InvalidURL) as error:  # their texts have the URL, which may be a key
        answer = f"it answers {error.status}" if isinstance(error, aiohttp.ClientResponseError) else "it is no URL"
        log.warning("the hook of alarm %s failed: alarms.url: %s", name, answer)
    except (OSError, aiohttp.ClientError, ChildProcessError, ValueError) as error:
        log.warning("the hook of alarm %s failed: %s", name, first_line(error))


async def run_command(words: list[str]) -> None:
    """Raises: OSError; ChildProcessError when it ends with another status than 0."""
    process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL)
    try:
        status = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if status:
        raise ChildProcessError(f"{words[0]} ended with status {status}")


async def post(url: str, values: dict[str, Any]) -> None:
    """Raises: aiohttp.ClientError."""
    is_away = not is_loopback(url)  # no proxy of the environment reaches this machine
    async with aiohttp.ClientSession(trust_env=is_away) as session, session.post(url, json=values) as answer:
        answer.raise_for_status()
