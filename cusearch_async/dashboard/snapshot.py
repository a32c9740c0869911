"""What Redis holds of a run at one moment."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cusearch_async.transport.interface import Ledger, OperatorBuffer, Queues, RunState, WorkerStatus


@dataclass(frozen=True, slots=True)
class Snapshot:
    at: float
    state: RunState
    ledger: Ledger
    pool: int
    """The pool that the learner takes next."""
    queues: Queues
    """With the ready groups of that pool."""
    depth_by_version: dict[tuple[int, int], int]
    workers: dict[str, WorkerStatus]

    def cells(self, s_max: int, staleness: int) -> list[list[int]]:
        """[S_max+1][staleness+1] buffered trajectories by depth and staleness; more where some are deeper or older,
        as after a change of settings."""
        ages = {version: max(0, self.state.step - version) for _, version in self.depth_by_version}
        deepest = max([s_max, *(depth for depth, _ in self.depth_by_version)])
        counts = [[0] * (max([*ages.values(), staleness]) + 1) for _ in range(deepest + 1)]
        for (depth, version), count in self.depth_by_version.items():
            counts[depth][ages[version]] += count
        return counts


async def look(buffer: OperatorBuffer) -> Snapshot:
    state = await buffer.state()
    ledger, pool, queues = await buffer.ledger(), state.step, await buffer.queues(state.step)
    while queues.is_claimed:  # the learner trains on it, or has been restarted and will take it again
        pool += 1
        queues = await buffer.queues(pool)
    depth_by_version = await buffer.depth_by_version()
    return Snapshot(time.monotonic(), state, ledger, pool, queues, depth_by_version, await buffer.workers())
