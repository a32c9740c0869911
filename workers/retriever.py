"""The retriever: serves searches over a corpus, `POST /retrieve`."""

from __future__ import annotations

import asyncio

from cusearch_async import host
from cusearch_async.config import Config


def main(config: Config) -> None:
    host.settle([])
    from cusearch_async.processes import retriever  # noqa: PLC0415  (libraries read the settings above when loaded)

    asyncio.run(retriever.run(config))


if __name__ == "__main__":
    host.run_worker("retriever", main)
