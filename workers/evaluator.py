"""The evaluator: scores published versions on held-out questions, beside the run."""

from __future__ import annotations

import asyncio

from cusearch_async import host
from cusearch_async.config import Config
from cusearch_async.errors import ConfigError


def main(config: Config) -> None:
    if not config.eval.every:
        raise ConfigError("eval.every is 0: nothing is to be scored during the run; set it to a number of steps")
    host.give_way()
    host.settle(config.eval.cores, config.eval.gpus)
    from cusearch_async.processes import evaluator  # noqa: PLC0415  (libraries read the settings above when loaded)

    asyncio.run(evaluator.run(config))


if __name__ == "__main__":
    host.run_worker("evaluator", main)
