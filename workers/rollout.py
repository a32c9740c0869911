"""A rollout worker: plays search episodes with the newest weights and streams them into the buffer."""

from __future__ import annotations

import asyncio
import os
import socket

from cusearch_async import host
from cusearch_async.config import Config


def main(config: Config) -> None:
    index = int(os.environ.get("CUSEARCH_WORKER_INDEX", "0"))
    host.settle(
        host.share_of(config.rollout.cores, index, config.rollout.workers), config.rollout.gpus[index : index + 1]
    )
    from cusearch_async.processes import rollout  # noqa: PLC0415  (libraries read the settings above when loaded)

    asyncio.run(rollout.run(config, f"{socket.gethostname()}-{os.getpid()}"))


if __name__ == "__main__":
    host.run_worker("rollout", main)
