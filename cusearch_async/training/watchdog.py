"""Who waits for what, when a run has stopped moving."""

from __future__ import annotations

import time

from cusearch_async.config import Config
from cusearch_async.errors import Stalled
from cusearch_async.transport.buffer import RedisBuffer

SILENT_S = 10.0
"""A worker whose last heartbeat is older counts as gone."""


class Watchdog:
    """Raises Stalled when no trajectory has been finished for run.stall_s."""

    def __init__(self, buffer: RedisBuffer, config: Config) -> None:
        self._buffer = buffer
        self._config = config
        self._finished = -1
        self._moved_at = time.monotonic()

    async def look(self, step: int) -> None:
        """Called while the learner waits for the pool of `step`. Raises: Stalled, with the report."""
        ledger = await self._buffer.ledger()
        if ledger.finished != self._finished:
            self._finished, self._moved_at = ledger.finished, time.monotonic()
            return
        idle_s = time.monotonic() - self._moved_at
        if idle_s > self._config.run.stall_s:
            raise Stalled(
                f"no trajectory was finished for {idle_s:.0f} s (run.stall_s) while step {step} waits for its pool: "
                + "; ".join(await explain(self._buffer, step, self._config))
            )


async def explain(buffer: RedisBuffer, step: int, config: Config) -> list[str]:
    """What a person would look at first, one finding each."""
    state, queues, workers = await buffer.state(), await buffer.queues(step), await buffer.workers()
    found = [
        f"{queues.ready_of_pool} of {config.questions_per_step} groups of the pool are ready, {queues.leased} tickets "
        f"are leased, {queues.requeued} are queued again"
    ]
    if state.paused:
        found.append("the run is paused (`cusearch resume`)")
    alive = {name: facts for name, facts in workers.items() if float(facts["heartbeat_age_s"]) < SILENT_S}
    if not alive:
        gone = ", ".join(f"{name} {facts['heartbeat_age_s']} s ago" for name, facts in workers.items())
        found.append("no worker is alive" + (f" (last seen: {gone})" if gone else "; start one"))
    for name, facts in alive.items():
        told = f"{name} has version {facts.get('version')} of {state.published} and {facts.get('in_flight')} episodes"
        down_s = float(facts.get("retriever_down_s", 0))
        found.append(told + (f", and its retriever has been down for {down_s:.0f} s" if down_s else ""))
    return found
