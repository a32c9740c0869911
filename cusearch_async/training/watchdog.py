"""Reports why a learner is waiting, and detects a run without progress."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from cusearch_async.config import Config
from cusearch_async.errors import Stalled
from cusearch_async.lifecycle.progress import next_line_s
from cusearch_async.run.provenance import launched_by
from cusearch_async.transport.interface import LearnerBuffer, WorkerStatus

log = logging.getLogger(__name__)

POLL_S = 0.05
WORKERS_TELL_S = 5.0
AWAY_S = 5.0
"""Looks are half a second apart where Redis answers."""
REPUBLISH_S = 10.0
"""After this time without progress the learner checks the announced weights; again after twice the time."""


class Watchdog:
    """Logs why the learner waits, and raises Stalled when no episode ends for run.stall_s, unless the run is
    paused. Outages of Redis do not count."""

    def __init__(self, buffer: LearnerBuffer, config: Config, republish: Callable[[int], Awaitable[None]]) -> None:
        """`republish(step)` is called to check the announced weights when the run makes no progress."""
        self._buffer = buffer
        self._republish = republish
        self._republish_at = REPUBLISH_S
        self._config = config
        self._moved = (-1, -1, -1)
        self._moved_at = self._answered_at = time.monotonic()
        self._step = -1
        self._waits_since = time.monotonic()
        self._next_line_s = 0.0

    async def look(self, step: int) -> None:
        """Called while the learner waits for the pool of `step`. Raises: Stalled, with the report."""
        now = time.monotonic()
        if self._step not in (step, -1):  # a step was made: the run moves
            self._waits_since = self._moved_at = self._answered_at = now
            self._next_line_s, self._republish_at = next_line_s(0.0), REPUBLISH_S
        self._step = step
        waited_s = now - self._waits_since
        if waited_s >= self._next_line_s:
            self._next_line_s = next_line_s(waited_s)
            log.info("waiting for the pool of step %d: %s", step, await self.explain(step))
        ledger, state = await self._buffer.ledger(), await self._buffer.state()
        moved = ledger.finished, ledger.requeued, ledger.failed_rollouts  # failed attempts end, at pool.max_attempts
        now = time.monotonic()
        unanswered_s, self._answered_at = now - self._answered_at, now
        if unanswered_s > max(self._config.redis.timeout_s, AWAY_S):  # Redis was: no worker could put anything
            self._moved_at += unanswered_s
        if moved != self._moved or state.paused:
            self._moved, self._moved_at, self._republish_at = moved, now, REPUBLISH_S
            return
        idle_s = now - self._moved_at
        if idle_s > self._republish_at:
            self._republish_at = 2 * idle_s
            await self._republish(step)
            self._answered_at = time.monotonic()
        if idle_s > self._config.run.stall_s:
            raise Stalled(
                f"no episode ended for {idle_s:.0f} s (run.stall_s) while step {step} waits for its pool: "
                + await self.explain(step)
            )

    async def explain_empty_pool(self, step: int) -> str:
        """Why the pool of `step` has no trajectory, as the workers report it, at most WORKERS_TELL_S later."""
        attempts, count = self._config.pool.max_attempts, self._config.questions_per_step
        what = f"step {step} has nothing to train on: all episodes of its {count} groups failed, {attempts} times each"
        deadline = time.monotonic() + WORKERS_TELL_S
        while True:
            workers = await self._buffer.workers()
            worst = max(workers.values(), key=lambda status: status.failed_episodes, default=WorkerStatus())
            if worst.most_frequent_failure:
                return f"{what}; most often: {worst.most_frequent_failure}"
            if time.monotonic() > deadline:
                return (
                    f"{what}, or are quarantined; see the logs of the workers, and `cusearch buffer quarantine CONFIG`"
                )
            await asyncio.sleep(POLL_S)

    async def explain(self, step: int) -> str:
        """The state of the run for a person."""
        buffer, config = self._buffer, self._config
        state, queues, workers = await buffer.state(), await buffer.queues(step), await buffer.workers()
        found = [
            f"{queues.ready_of_pool} of {config.questions_per_step} groups are ready, {queues.leased} tickets are "
            f"leased, {queues.requeued} requeued"
        ]
        if state.paused:
            found.append("the run is paused (`cusearch buffer resume`)")
        alive = {name: status for name, status in workers.items() if status.is_alive}
        if not alive:
            gone = ", ".join(f"{name} {status.heartbeat_age_s:.1f} s ago" for name, status in workers.items())
            if gone:
                found.append(f"no worker is alive (last seen: {gone})")
            elif launched_by():  # which ends when one of them does
                found.append("this launch is starting its workers")
            else:
                found.append("no worker is alive; start one")
        for name, status in alive.items():
            if status.starting:
                found.append(f"{name} is {status.starting} ({status.alive_s:.0f} s)")
                continue
            line = f"{name} has version {status.version} of {state.published} and {status.in_flight} episodes"
            if status.retriever_down_s:
                line += f", and its retriever has been down for {status.retriever_down_s:.0f} s"
            elif status.hangs(config.redis.lease_s):
                line += f", and its engine has produced no token for {status.last_token_age_s:.0f} s; "
                line += "stop this launch, and start it again" if launched_by() else "restart it"
            found.append(line)
        return "; ".join(found)
