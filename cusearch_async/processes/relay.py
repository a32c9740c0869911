"""The relay process: published weights for machines that are far from the learner."""

from __future__ import annotations

from cusearch_async.config import Config
from cusearch_async.lifecycle.signals import stop_on_signals
from cusearch_async.weights.relay import relaying


async def run(config: Config) -> None:
    """Serve until a signal arrives."""
    stop = stop_on_signals()
    async with relaying(config):
        await stop.wait()
