"""A run on either buffer, and trajectories put into it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest

from cusearch_async.transport.interface import NOTHING, Buffer, MethodState, RolloutSlot
from cusearch_async.types import Pool
from tests.strategies import make_trajectory

N, G = 4, 2
"""Questions of a pool and rollouts of a group, as `make_limits` has them."""


def group(*tickets: int) -> list[RolloutSlot]:
    """All rollouts of these tickets."""
    return [RolloutSlot(ticket, rollout) for ticket in tickets for rollout in range(G)]


async def start(buffer: Buffer) -> None:
    """As a learner does: take over, announce the first weights."""
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")


async def started(backend: Any, *identity: Any, **limits: Any) -> Any:
    buffer = backend.make(*identity, **limits)
    await start(buffer)
    return buffer


async def recovered(backend: Any, *identity: Any, step: int = 0, **limits: Any) -> Any:
    """The next learner, from its checkpoint at `step`."""
    heir = backend.make(*identity, **limits)
    await heir.recover(step)
    return heir


async def fill(buffer: Buffer, slots: list[RolloutSlot], **changes: Any) -> None:
    for slot in slots:
        assert await buffer.put(make_trajectory(slot.ticket, slot.rollout, **changes)) == "stored"


async def filled(backend: Any, *identity: Any, pools: int = 1, **limits: Any) -> Any:
    """One that has started, with all trajectories of its first pools."""
    buffer = await started(backend, *identity, **limits)
    await fill(buffer, await buffer.admit("w", 0, pools * N * G))
    return buffer


async def run_steps(buffer: Buffer, steps: int, pools: int = 1, selected: int | None = None) -> None:
    """Steps whose trajectories are all of the newest version; `pools` are generated before each."""
    for step in range(steps):
        await fill(buffer, await buffer.admit("w", step, pools * N * G), versions=np.full(4, step, np.int32))
        await train(buffer, step, selected)
        await buffer.announce(step + 1, f"v{step + 1:06d}-e1")


async def all_raise(error: type[Exception], *attempts: Awaitable[Any], match: str | None = None) -> None:
    for attempt in attempts:
        with pytest.raises(error, match=match):
            await attempt


async def train(buffer: Buffer, step: int = 0, selected: int | None = None, method: MethodState = NOTHING) -> Pool:
    """A step, on the first `selected` of its pool."""
    pool = await buffer.claim(step)
    assert pool is not None
    await buffer.commit(pool, pool.trajectories[:selected], method)
    return pool
