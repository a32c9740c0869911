"""What Redis holds of a run now, as JSON for the page."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from cusearch_async.config import Config
from cusearch_async.dashboard.snapshot import Snapshot, look
from cusearch_async.errors import CusearchError, first_line
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import LearnerStatus

Json = dict[str, Any]


async def live(config: Config) -> Json:
    """`problem` alone, in words, where Redis cannot be reached, or does not hold the run."""
    try:
        async with open_buffer(config) as buffer:
            if not (await buffer.state()).exists:
                return {"problem": f"Redis at {place(config)} has no run {config.run.name!r}"}
            return shown(await look(buffer), await buffer.learner(), config)
    except CusearchError as error:
        return {"problem": first_line(error)}


def place(config: Config) -> str:
    """The address of Redis, without a password."""
    return config.redis.url.rpartition("@")[2]


def shown(now: Snapshot, learner: LearnerStatus | None, config: Config) -> Json:
    """`cells` [S+1][staleness] are the buffered trajectories."""
    workers = [
        msgspec.to_builtins(status) | {"name": name, "is_alive": status.is_alive}
        for name, status in sorted(now.workers.items())
    ]
    return {
        "state": {
            "step": now.state.step,
            "epoch": now.state.epoch,
            "published": now.state.published,
            "paused": now.state.paused,
            "finished": now.state.is_finished,
            "fields": dict(now.state.fields),
        },
        "pool": now.pool,
        "queues": asdict(now.queues) | {"needed": config.questions_per_step},
        "cells": now.cells(config.episode.s_max, config.pool.max_staleness),
        "ledger": asdict(now.ledger) | {"closes": now.ledger.closes, "limit": config.buffer_limit},
        "workers": workers,
        "learner": None if learner is None else msgspec.to_builtins(learner),
        "redis": place(config),
    }
