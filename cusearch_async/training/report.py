"""The times of a step, and its row in the metrics."""

from __future__ import annotations

import time
from collections import defaultdict

from cusearch_async.config import Config
from cusearch_async.metrics.log import MetricsLog
from cusearch_async.metrics.machine import describe_machine
from cusearch_async.metrics.step import (
    WorkerRates,
    describe_environments,
    describe_ledger,
    describe_server,
    describe_step,
    describe_times,
)
from cusearch_async.metrics.table import Metrics
from cusearch_async.training.alarms import AlarmWatch
from cusearch_async.training.selector import Chosen
from cusearch_async.transport.interface import LearnerBuffer


class StepReport:
    """Measures the parts of a step one after the other, and writes a row when it is done."""

    def __init__(self, buffer: LearnerBuffer, config: Config, from_step: int) -> None:
        self._buffer = buffer
        self._config = config
        self._alarms = AlarmWatch(config, buffer.epoch, from_step)
        self._log = MetricsLog(config.folder, buffer.epoch, from_step)
        self._rates = WorkerRates()
        self._seconds: dict[str, float] = defaultdict(float)
        self.restart()

    def restart(self) -> None:
        """The time since the last part was done belongs to none."""
        self._since = time.monotonic()

    def done(self, part: str) -> None:
        """`part` (wait, update, publish or checkpoint) took the time since the last one was done; after `write` it
        counts for the next row."""
        now = time.monotonic()
        self._seconds[part] += now - self._since
        self._since = now

    async def begin(self) -> None:
        """The workers' totals under an earlier learner do not count for the first row."""
        self._rates.since_last(await self._buffer.workers())

    async def write(self, chosen: Chosen, update: Metrics, publishing_s: float, lent_s: float) -> None:
        """`publishing_s`: the time that the newest weights took, concurrently with the steps; `lent_s`: that the update
        waited for them. Raises: WriteFailed; StoppedByAlarm, after the row is written."""
        config, seconds = self._config, self._seconds
        tokens = sum(len(t.token_ids) for t in chosen.trajectories)
        row = update | describe_step(
            chosen.pool, chosen.trajectories, chosen.advantages, config.method.budget, config.episode.s_max
        )
        row |= describe_environments(chosen.pool, chosen.trajectories, list(config.environment))
        row |= {f"selection/{name}": value for name, value in chosen.metrics.items()}
        is_last = chosen.pool.step + config.pool.max_staleness >= config.run.steps  # no questions since the step before
        opened = config.pool.order == "oldest_complete" or not is_last
        row |= self._rates.since_last(await self._buffer.workers(), opened)
        began = time.monotonic()
        row |= describe_ledger(await self._buffer.ledger())
        latency_s = time.monotonic() - began
        row |= describe_server(*await self._buffer.server_memory(), latency_s)
        row |= describe_machine(config.folder)
        parts = {f"{part}_s": seconds[part] for part in ("wait", "update", "publish", "checkpoint")}
        row |= describe_times(**parts, publishing_s=publishing_s, lent_s=lent_s, tokens=tokens)
        firing = self._alarms.look(chosen.pool.step, row)
        self._log.write(chosen.pool.step, row | {"alarms/firing": float(len(firing))})
        await self._alarms.refuse(firing)
        seconds.clear()
        self.restart()

    async def close(self) -> None:
        self._log.close()
        await self._alarms.finish()
