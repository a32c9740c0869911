"""What Redis holds of a run now, as JSON for the page."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from cusearch_async.config import Config
from cusearch_async.dashboard.actions import act
from cusearch_async.dashboard.snapshot import Snapshot, look
from cusearch_async.errors import ConfigError, CusearchError, first_line
from cusearch_async.run.identity import NOBODY
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import LearnerStatus, OperatorBuffer

Json = dict[str, Any]


class Live:
    """A run in Redis, looked at over one connection; a context manager."""

    def __init__(self, config: Config, folder: Path) -> None:
        """`folder`: of the run, wherever its config says that it was."""
        self._config, self._folder = config, folder
        self._open = AsyncExitStack()
        self._buffer: OperatorBuffer | None = None

    async def __aenter__(self) -> Live:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._buffer = None
        await self._open.aclose()

    async def now(self) -> Json:
        """`problem` alone, in words, where Redis cannot be reached, or does not hold the run."""
        try:
            buffer = await self._opened()
            return shown(await look(buffer), await buffer.learner(), self._config)
        except CusearchError as error:
            await self.__aexit__()  # the next look opens another connection
            return {"problem": first_line(error)}

    async def act(self, action: str, what: str, reason: str) -> str:
        """Change the run, as `actions.act`. Raises: ConfigError; BufferUnavailable."""
        buffer = await self._opened()
        return await act(buffer, self._config.run.name, self._folder, action, what, reason)

    async def _opened(self) -> OperatorBuffer:
        """Raises: ConfigError where Redis does not hold this run; BufferUnavailable."""
        name = self._config.run.name
        if self._buffer is None:
            self._buffer = await self._open.enter_async_context(open_buffer(self._config))
        if not (await self._buffer.state()).exists:
            raise ConfigError(f"no learner has taken run {name!r} over yet, at {self._config.redis.place}")
        held, own = await self._buffer.identity(), NOBODY.in_folder(self._folder)
        if held.run_id and held.run_id != own.run_id:
            raise ConfigError(f"{self._config.redis.place} holds another run of the name {name!r}, of {held.folder}")
        return self._buffer


def troubles(now: Snapshot, learner: LearnerStatus | None, config: Config) -> list[Json]:
    """What the learner cannot see of its workers, or of itself: name and text."""
    found = []
    if learner is None and not now.state.is_finished:
        found.append(("no_learner", "no learner is alive: start it again, it continues from its newest checkpoint"))
    for name, status in sorted(now.workers.items()):
        if not status.is_alive:
            found.append(
                ("worker_silent", f"{name} was last heard of {status.heartbeat_age_s:.0f} s ago; read its log")
            )
        elif status.retriever_down_s:
            text = f"{name} has had no answer from {config.retriever.url} for {status.retriever_down_s:.0f} s"
            found.append(("retriever_down", text))
        elif status.hangs(config.redis.lease_s):
            text = f"{name} has {status.in_flight} episodes in flight and no token for {status.last_token_age_s:.0f} s"
            found.append(("worker_stuck", text))
    return [{"name": name, "text": text} for name, text in found]


def shown(now: Snapshot, learner: LearnerStatus | None, config: Config) -> Json:
    """`cells` [S+1][staleness] are the buffered trajectories."""
    workers = [
        msgspec.to_builtins(status) | {"name": name, "is_alive": status.is_alive}
        for name, status in sorted(now.workers.items())
    ]
    return {
        "troubles": troubles(now, learner, config),
        "state": {
            "step": now.state.step,
            "epoch": now.state.epoch,
            "paused": now.state.paused,
            "finished": now.state.is_finished,
        },
        "pool": now.pool,
        "queues": asdict(now.queues) | {"needed": config.questions_per_step},
        "cells": now.cells(config.episode.s_max, config.pool.staleness_bound),
        "ledger": asdict(now.ledger) | {"closes": now.ledger.closes, "limit": config.buffer_limit},
        "workers": workers,
        "learner": None if learner is None else msgspec.to_builtins(learner),
        "redis": config.redis.place,
    }
