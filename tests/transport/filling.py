"""A run on either buffer, and trajectories put into it."""

from __future__ import annotations

from typing import Any

from cusearch_async.transport.interface import Buffer, RolloutSlot
from tests.strategies import make_trajectory

N, G = 4, 2
"""Questions of a pool and rollouts of a group, as `make_limits` has them."""


async def start(buffer: Buffer) -> None:
    """As a learner does: take over, announce the first weights."""
    await buffer.recover(0)
    await buffer.announce(0, "v000000-e1")


async def fill(buffer: Buffer, slots: list[RolloutSlot], **changes: Any) -> None:
    for slot in slots:
        assert await buffer.put(make_trajectory(slot.ticket, slot.rollout, **changes)) == "stored"
